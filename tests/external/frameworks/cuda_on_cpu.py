"""Replacements that make "cuda", which Megatron-Core hard-codes in places, mean the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


class _NoStream:
    """A stream or an event on the CPU, where operations run in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        return lambda *_, **__: self


def install() -> None:
    """Make "cuda" mean the CPU. Call this before Megatron-Core is imported."""
    library: Any = torch
    for name in ("empty", "full", "ones", "tensor", "zeros", "arange"):
        setattr(library, name, _on_cpu(getattr(torch, name)))
    library.cuda.current_device = lambda: torch.device("cpu")
    library.cuda.synchronize = lambda *_: None
    library.cuda.Stream = library.cuda.Event = _NoStream
    library.cuda.current_stream = library.cuda.default_stream = lambda *_: _NoStream()
    library.cuda.stream = lambda *_: nullcontext()
    library.cuda.random.get_rng_state = library.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    library.Tensor.cuda = lambda tensor, *_, **__: tensor
    library.Tensor.type = _type(torch.Tensor.type)


def install_in_megatron() -> None:
    """Make Megatron-Core use the CPU's random state, and do without TransformerEngine. This imports Megatron-Core."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # 0.16.1 does not define it otherwise
    token_dispatcher.maybe_move_tensor_to_cpu = _moved_to_cpu

    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random.model_parallel_cuda_manual_seed(7)


def _moved_to_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Return a tensor that is on the CPU already; Megatron-Core's function converts only others to numpy."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


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
