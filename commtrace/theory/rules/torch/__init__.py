"""Rules that mirror PyTorch, of the version `registry.TORCH`.

DDP (`ddp`), FSDP2 (`fsdp`), and what the styles of a tensor-parallel plan move (`parallel_styles`). The source of DDP's
reducer (C++) is not in the wheel, so its rules follow its observed behaviour.
"""
