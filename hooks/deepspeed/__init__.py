"""Hooks of DeepSpeed. `hook` is the reversible pair that `commtrace.startup` installs."""
