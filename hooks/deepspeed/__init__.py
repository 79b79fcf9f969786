"""Hooks of DeepSpeed: `hook` is the pair of `install` and `uninstall`, the other modules read its engines."""
