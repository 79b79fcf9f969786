"""Hooks of mpi4py.

hook, wrappers, extension_types       installation, and the wrappers of mpi4py's methods
methods, buffers, pickled_objects     arguments of methods, and sizes of messages
tracer, requests, windows             records of calls, and their ends
communicators                         groups
"""
