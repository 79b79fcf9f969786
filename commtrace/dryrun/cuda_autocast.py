"""Autocast for simulated CUDA devices: CPU autocast, with CUDA's list of float32 operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map

_KEYS: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
# Operators that CUDA autocast runs in float32, and CPU autocast does not (torch 2.13).
_IN_FLOAT32: Final = (
    "acos", "asin", "cosh", "cosine_similarity", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1",
    "frobenius_norm.dim", "group_norm", "layer_norm", "linalg_matrix_norm", "linalg_vector_norm", "log", "log10",
    "log1p", "log2", "log_softmax.int", "logsumexp", "native_layer_norm", "norm.Scalar", "norm.ScalarOpt_dim",
    "nuclear_norm", "pdist", "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal", "renorm",
    "rms_norm", "rsqrt", "sinh", "softmax.int", "softplus", "sum", "sum.dim_IntList", "tan",
)  # fmt: skip


def install() -> torch.library.Library:
    """Make CUDA autocast apply to the CPU too. Returns the library of the kernels: keep a reference to it."""
    library = torch.library.Library("aten", "IMPL")
    for name in _IN_FLOAT32:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
        if operator is not None:
            library.impl(name, functools.partial(_in_float32, operator), "AutocastCPU")
    for name in ("set_autocast_enabled", "set_autocast_dtype"):
        setattr(torch, name, _also_on_cpu(getattr(torch, name)))
    return library


def _in_float32(operator: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        return operator(*tree_map(_to_float32, args), **tree_map(_to_float32, kwargs))


def _to_float32(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value


def _also_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_autocast(device: Any, *value: Any) -> None:
        original(device, *value)
        if device == "cuda":
            original("cpu", *value)

    return set_autocast
