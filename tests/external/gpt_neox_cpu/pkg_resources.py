"""Stand-in for setuptools' `pkg_resources`, which GPT-NeoX imports before it needs CUDA. Enables CPU ranks."""

from __future__ import annotations

import os
import sys

import deepspeed
import packaging.version  # GPT-NeoX takes `packaging` from this module
import torch
from deepspeed.accelerator import get_accelerator

__all__ = ["packaging"]

RANKS = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("NEOX_RANKS") or 1)


def is_available() -> bool:
    """Return whether the caller is GPT-NeoX, which refuses to train without CUDA."""
    return str(sys._getframe(1).f_globals.get("__name__")).startswith("megatron")


CUDA = {
    "is_available": is_available,
    "device_count": lambda: RANKS,
    "current_device": lambda: "cpu",
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "LongTensor": torch.LongTensor,
    "FloatTensor": torch.FloatTensor,
    "ByteTensor": torch.ByteTensor,
}
for _name, _value in CUDA.items():
    setattr(torch.cuda, _name, _value)
for _kind in (torch.Tensor, torch.nn.Module):
    setattr(_kind, "cuda", lambda self, *args, **kwargs: self)  # noqa: B010
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an extension that only CPU ranks would compile
setattr(get_accelerator(), "is_fp16_supported", lambda: True)  # noqa: B010
