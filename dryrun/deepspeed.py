"""DeepSpeed in a dry run: nothing is compiled, and what must be imported early is."""

from __future__ import annotations

import deepspeed
import torch._dynamo  # noqa: F401  (zero.Init replaces how tensors are made, which it does not survive when it comes later)


def install() -> None:
    """When DeepSpeed has been imported."""
    # Its all_reduce through shared memory would be compiled now, for minutes; training does not use it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def uninstall() -> None:
    """Nothing to take out."""
