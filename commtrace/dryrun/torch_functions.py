"""Patches for torch functions that are not operators: conversion to lists and arrays, saving, compiling."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from commtrace.patching import Patches

from .notices import add_notice
from .operators import tensors_in
from .storage_set import StorageSet, numel
from .untouched_memory import MAX_COMPUTED_ELEMENTS, clear

_patches: Final = Patches()

_READ: Final = "reads numbers that a dry run does not compute; it continues with the values in memory, usually zero"
_SAVED: Final = "torch.save of tensors that a dry run does not compute: no file is written"
_COMPILED: Final = "torch.compile is skipped, because compiled code would compute; the code runs uncompiled"


def install(uncomputed: StorageSet, *, save: bool) -> None:
    """Report reads of values that were not computed, skip compiling, and clear resized storages.

    Args:
        uncomputed: The storages without values.
        save: Whether `torch.save` writes files with holes for values that were not computed, instead of nothing.
    """
    for name in ("tolist", "numpy", "__array__"):
        _watch(name, uncomputed)
    if save:
        _patches.replace(torch._C, "PyTorchFileWriter", lambda original: _writing_holes(original, uncomputed))
    else:
        _patches.wrap(torch, "save", _saving(uncomputed))
    _patches.wrap(torch, "compile", _compiling)
    torch.UntypedStorage.resize_ = _clearing(torch.UntypedStorage.resize_)  # type: ignore[method-assign]


def _watch(name: str, uncomputed: StorageSet) -> None:
    original = getattr(torch.Tensor, name)

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) in (torch.Tensor, torch.nn.Parameter) and self in uncomputed:
            add_notice(_READ)
        return original(self, *args, **kwargs)

    setattr(torch.Tensor, name, read)


def _clearing(original: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        """Clear the memory that a storage gains: it may never be filled, as with FSDP's gathered parameters."""
        before = self.nbytes()
        result = original(self, size)
        if self.nbytes() > before and self.device.type == "cpu":
            clear(self, before)
        return result

    return resize_


def _saving(uncomputed: StorageSet) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
            large = [tensor for tensor in _tensors_of(obj, set()) if numel(tensor) > MAX_COMPUTED_ELEMENTS]
            if any(tensor in uncomputed for tensor in large):
                add_notice(_SAVED, also_libraries=True)
                return None
            return original(obj, *args, **kwargs)

        return save

    return wrapper


def _writing_holes(original: Any, uncomputed: StorageSet) -> Any:
    class HoleWriter(original):  # type: ignore[misc]
        """Writer of torch.save that leaves a hole, which reads as zeros, for a storage without values."""

        def __init__(self, target: Any, *options: Any) -> None:
            if isinstance(target, str):
                sys.audit("open", target, "wb", os.O_WRONLY | os.O_CREAT)  # it is opened in C++
            # The writer skips the hole by its position in the file, so the archive must begin with the file.
            self._may_skip = isinstance(target, str) or (isinstance(target, io.BufferedWriter) and not target.tell())
            super().__init__(target, *options)

        def write_record(self, name: str, data: Any, size: int) -> None:
            large = self._may_skip and torch.is_storage(data) and data.nbytes() > MAX_COMPUTED_ELEMENTS
            if large and uncomputed.has(data):
                self.write_record_metadata(name, size)
            else:
                super().write_record(name, data, size)

    return HoleWriter


def _tensors_of(value: Any, seen: set[int]) -> list[torch.Tensor]:
    """Return the tensors of an object to save: of modules, optimizers, and objects that contain them."""
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
    return [tensor for item in value for tensor in _tensors_of(item, seen)] if isinstance(value, list | tuple) else []


def _compiling(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile(model: Any = None, **_: Any) -> Any:
        add_notice(_COMPILED)
        return model if model is not None else lambda function: function

    return compile
