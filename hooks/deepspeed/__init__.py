"""Hooks of DeepSpeed: `hook` has `install` and `uninstall`; the other modules read its engines."""
