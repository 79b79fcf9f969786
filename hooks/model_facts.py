"""What a job row says of any model, whoever trains it: its parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def parameters(module: Any) -> list[dict[str, Any]]:
    """Name, shape, element type of each parameter of the whole model; shared ones once, partitioned ones whole."""
    return [
        {**_tensor(name, parameter), "trainable": bool(parameter.requires_grad)}
        for name, parameter in module.named_parameters()
    ]


def buffers(module: Any) -> list[dict[str, Any]]:
    """Name, shape, element type of each buffer."""
    return [_tensor(name, buffer) for name, buffer in module.named_buffers()]


def known(readers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What the readers give. A setting that this version of the library does not have, or not yet, is left out."""
    values = {}
    for name, read in readers.items():
        try:
            values[name] = read()
        except Exception:
            continue
    return values


def dtype_name(dtype: Any) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _tensor(name: str, tensor: Any) -> dict[str, Any]:
    shape = getattr(tensor, "ds_shape", tensor.shape)  # ZeRO-3 leaves an empty tensor in place of a partitioned one
    return {"name": name, "shape": [int(size) for size in shape], "dtype": dtype_name(tensor.dtype)}
