"""Set-up that makes frameworks for accelerators run on CPU ranks."""

from __future__ import annotations

import os


def prepare(row: str) -> None:
    """Prepare the process and accelerate's state for "ddp", "fsdp", "zero2" or "zero3"."""
    if row.startswith("zero"):
        without_compiler()
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    if row == "ddp":
        PartialState(cpu=True)
    elif row == "fsdp":
        # accelerate offers FSDP on accelerators only; FSDP2 itself runs on CPU as well.
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    else:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")


def without_compiler() -> None:
    """Keep DeepSpeed from compiling its shared-memory all_reduce."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
