"""What a program asks torch for that is no operator: numbers as lists or arrays, files, compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from commtrace.patching import Patches

from .notices import add_notice
from .operators import tensors_in
from .uncomputed_storages import UncomputedStorages
from .untouched_memory import MAX_COMPUTED_ELEMENTS

_patches: Final = Patches()

_READ: Final = "reads numbers that a dry run does not compute; it goes on with what lies there, zero mostly"
_SAVED: Final = "torch.save of tensors that a dry run does not compute: no file is written"
_COMPILED: Final = "torch.compile is left out, as compiled code would compute; the calls are those of the code itself"


def install(unknown: UncomputedStorages) -> None:
    """Watch them."""
    for name in ("tolist", "numpy", "__array__"):
        _watch(name, unknown)
    _patches.wrap(torch, "save", _saving(unknown))
    _patches.wrap(torch, "compile", _compiling)


def uninstall() -> None:
    """Leave them alone."""
    _patches.undo()


def _watch(name: str, unknown: UncomputedStorages) -> None:
    original = getattr(torch.Tensor, name)

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) in (torch.Tensor, torch.nn.Parameter) and self in unknown:
            add_notice(_READ)
        return original(self, *args, **kwargs)

    setattr(torch.Tensor, name, read)


def _saving(unknown: UncomputedStorages) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
            if any(tensor.numel() > MAX_COMPUTED_ELEMENTS and tensor in unknown for tensor in _held(obj, set())):
                add_notice(_SAVED, led_to=True)
                return None
            return original(obj, *args, **kwargs)

        return save

    return wrapper


def _held(value: Any, seen: set[int]) -> list[torch.Tensor]:
    """The tensors of whatever is pickled: modules, optimizers, and a program's own objects around them."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [*tensors_in(value)]
    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, dict):
        value = [*value.values()]
    elif not isinstance(value, list | tuple | type):
        value = [*getattr(value, "__dict__", {}).values()]
    return [tensor for item in value for tensor in _held(item, seen)] if isinstance(value, list | tuple) else []


def _compiling(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile(model: Any = None, **_: Any) -> Any:
        add_notice(_COMPILED)
        return model if model is not None else lambda function: function

    return compile
