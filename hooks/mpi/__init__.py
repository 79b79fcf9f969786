"""Hooks of mpi4py.

hook, wrappers, extension_types       the pair of `install` and `uninstall`, and what replaces mpi4py's methods
methods, buffers, pickled_objects     what arguments mean, and how large messages are
tracer, requests, windows             the records of calls, and their ends
communicators                         groups
"""
