"""Hooks of mpi4py. `hook` is the reversible pair that `commtrace.startup` installs."""
