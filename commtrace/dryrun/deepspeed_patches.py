"""DeepSpeed in a dry run: nothing is compiled, and what must be imported early is.

ZeRO-3 cuts each parameter into the parts of all ranks, and each gradient: on a thousand ranks a million views a step,
which need no mode, and of which each would cost as much as an operator.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final

import deepspeed
import torch
import torch._dynamo  # zero.Init replaces how tensors are made, which it does not survive when it comes later
from deepspeed.ops.op_builder.builder import OpBuilder

from commtrace.patching import Patches

# Where the parts of all ranks are cut, one by one: (module, class or "", function).
_CUTTING: Final = (
    ("deepspeed.runtime.comm.coalesced_collectives", "", "reduce_scatter_coalesced"),
    ("deepspeed.runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator", "fetch_sub_module"),
)
# Optimizers in C++, by the name of what builds them: they change parameters, and communicate nothing.
_OPTIMIZERS: Final = frozenset(("fused_adam", "cpu_adam", "cpu_adagrad", "cpu_lion"))

_patches: Final = Patches()


def install() -> None:
    """When DeepSpeed has been imported."""
    # Its all_reduce through shared memory would be compiled now, for minutes; training does not use it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _patches.wrap(OpBuilder, "load", _loading)
    for module, owner, name in _CUTTING:
        with contextlib.suppress(ImportError, AttributeError):  # another version: slower, and right all the same
            found = import_module(module)
            _patches.wrap(getattr(found, owner) if owner else found, name, _cutting)


def uninstall() -> None:
    """Leave it alone."""
    _patches.undo()


# ---- views -----------------------------------------------------------------------------------------------------------


class _Views:
    """Keeps slices of tensors from the mode for a while: they are made as if there were none."""

    # A slice is made by the second of these operators.
    _OPERATORS: Final = ("slice.Tensor", "as_strided")
    _KEYS: Final = ("Python", "PythonTLSSnapshot")

    def __init__(self) -> None:
        self._depth = 0

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Only where all tensors are plain ones: a wrapper around a tensor hears of nothing either."""
        self._depth += 1
        library: Any = None
        if self._depth == 1:
            library = torch.library.Library("aten", "IMPL")
            for operator, key in itertools.product(self._OPERATORS, self._KEYS):
                library.impl(operator, torch.library.fallthrough_kernel, key)
        try:
            yield
        finally:
            self._depth -= 1
            if library is not None:
                library._destroy()


_views: Final = _Views()


def _cutting(original: Callable[..., Any]) -> Callable[..., Any]:
    def cut(*args: Any, **kwargs: Any) -> Any:
        with _views.unseen():
            return original(*args, **kwargs)

    return cut


# ---- optimizers ------------------------------------------------------------------------------------------------------


class _Idle:
    """In place of compiled code: does nothing, whatever is asked for."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _Idle() if self.name in _OPTIMIZERS else original(self, *args, **kwargs)

    return load
