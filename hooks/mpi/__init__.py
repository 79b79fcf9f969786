"""Hooks of mpi4py.

hook, extension_types                 installation
wrappers                              wrappers of mpi4py's methods; starts of persistent requests; which
                                      requests a wait or test completes; which methods of Win end
                                      one-sided operations
methods                               table of the methods, each with the rule for its size
buffers                               bytes and element type of a message argument, in each form
pickled_objects                       sizes of pickled messages
tracer, requests, windows             records of calls, and their ends
communicators                         groups
"""
