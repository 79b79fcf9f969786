"""Rules that mirror PyTorch, of the version `registry.TORCH`: DDP (`ddp`) and FSDP2 (`fsdp`).

The source of DDP's reducer (C++) is not in the wheel, so its rules follow its observed behaviour.
"""
