"""Replacements that make "cuda", which Megatron-Core hard-codes in places, mean the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def install() -> None:
    """Make "cuda" mean the CPU. Call this before Megatron-Core is imported."""
    library: Any = torch
    for name in ("empty", "full", "ones", "tensor", "zeros", "arange"):
        setattr(library, name, _on_cpu(getattr(torch, name)))
    library.cuda.current_device = lambda: torch.device("cpu")
    library.cuda.synchronize = lambda *_: None
    library.cuda.random.get_rng_state = library.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    library.Tensor.cuda = lambda tensor, *_, **__: tensor
    library.Tensor.type = _type(torch.Tensor.type)


def install_random_states() -> None:
    """Make Megatron-Core use the CPU's random state. This imports Megatron-Core."""
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random.model_parallel_cuda_manual_seed(7)


def _on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return original(*args, **kwargs)

    return function


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    def type(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return "torch.cuda.FloatTensor" if isinstance(result, str) and result == "torch.FloatTensor" else result

    return type
