"""Rules that mirror PyTorch, of the version `registry.TORCH`: DDP and FSDP2.

The source of DDP's reducer (C++) is not in the wheel, so its rules follow its observed behaviour.
"""
