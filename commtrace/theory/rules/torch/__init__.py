"""Rules that mirror PyTorch, of the version `registry.TORCH`: DDP and FSDP2.

DDP's reducer is C++ and not part of a wheel: its rules follow its measured behaviour.
"""
