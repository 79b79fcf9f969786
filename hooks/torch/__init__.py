"""Hooks of PyTorch. `hook` is the reversible pair that `commtrace.startup` installs."""
