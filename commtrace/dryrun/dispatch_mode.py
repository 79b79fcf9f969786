"""The mode of a dry run: tensors are real and on the CPU, and the memory of large ones is never touched.

    a view, a shape, a storage         done as it is
    a write into a large tensor        left out
    a new large tensor                 its shape from torch's own rules (device `meta`), its memory untouched
    small tensors, and data loaded     computed for real: indices, counters, batches
    a number, or a shape, from data    read for real; where the data was not computed it is zero, and the line is named
    a collective                       handed on to the dispatcher, where the hooks record it and `collectives` is below

It stands below autograd, DDP's reducer and DTensor, and sees plain operators on plain tensors of whatever they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import untouched_memory as memory
from .notices import add_notice
from .operators import OperatorKind, OperatorPlan, operator_plan, tensors_in
from .uncomputed_storages import UncomputedStorages
from .untouched_memory import MAX_COMPUTED_ELEMENTS

_META: Final = torch.device("meta")
_SMALL_BYTES: Final = 16 * MAX_COMPUTED_ELEMENTS
_LOADED: Final = 1 << 24
"""Elements of data up to which what is known stays known."""

_READ: Final = "reads a number that a dry run does not compute; it goes on with what lies there, zero mostly"
_SHAPED: Final = "makes a shape from numbers that a dry run does not compute; it goes on as if all were zero"

_disabled: Final = torch._C._disabled_torch_dispatch_impl

_dtype: Final = attrgetter("dtype")
_is_meta: Final = attrgetter("is_meta")
_layout: Final = attrgetter("layout")

functional: Final[Any] = torch.ops._c10d_functional


class DryRunMode(TorchDispatchMode):
    """Enter it once, on the thread that trains."""

    def __init__(self, unknown: UncomputedStorages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unknown = unknown
        self.forked = False
        """In a child of the process, a loader of data: everything is real."""
        self._plans: dict[Any, OperatorPlan] = {}
        self._real: dict[Any, Callable[..., Any]] = {}
        self._wrapping: dict[type, bool] = {}
        self._do: Final = {
            OperatorKind.WRITE: self._write,
            OperatorKind.NEW: self._new,
            OperatorKind.NUMBER: self._number,
            OperatorKind.SHAPE: self._shape,
            OperatorKind.INDEX: self._index,
            OperatorKind.JOIN: self._new,
            OperatorKind.COPY: self._copy,
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """What torch asks before it wraps the method below, at every call's cost: nothing is compiled here anyway."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do an operator, as the table above has it."""
        if types:  # none where all are plain tensors
            for cls in types:
                if issubclass(cls, FakeTensor):
                    return func(*args, **(kwargs or {}))  # a compiler, or DTensor, works out shapes
                if self._wraps(cls):
                    return NotImplemented  # DTensor, say: it comes here again with what it holds
        real = self._real.get(func)
        if real is not None:  # views mostly, of which ZeRO-3 makes a million a step on a thousand ranks
            return real(*args, **kwargs) if kwargs else real(*args)
        kwargs = kwargs or {}
        if _fake_mode() is not None:
            return func(*args, **kwargs)  # the same, of tensors that it makes: that mode is asked after all others
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = operator_plan(func)
        if plan.sort is OperatorKind.REAL or self.forked:
            if plan.sort is OperatorKind.REAL:
                self._real[func] = func._op
            return func(*args, **kwargs)
        if plan.sort is OperatorKind.JOIN:
            joined = self._joined(func, args, kwargs)
            if joined is not None:
                return joined
        tensors = [*tensors_in(args), *tensors_in([*kwargs.values()])]
        if _is_shapes_only(tensors, kwargs):
            return func(*args, **kwargs)
        return self._do[plan.sort](func, plan, tensors, args, kwargs)

    def _wraps(self, cls: type) -> bool:
        wraps = self._wrapping.get(cls)
        if wraps is None:
            dispatch = getattr(cls, "__torch_dispatch__", _disabled)
            wraps = self._wrapping[cls] = dispatch is not _disabled and dispatch is not torch.Tensor.__torch_dispatch__
        return wraps

    # ---- writes ------------------------------------------------------------------------------------------------------

    def _write(
        self, func: Any, plan: OperatorPlan, tensors: list[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        given = [kwargs.get(name, args[at] if at < len(args) else None) for at, name in plan.writes]
        written = [*tensors_in(given)]
        unknown = self.unknown.any(tensors)
        if self._may_write(written, tensors, unknown):
            result = func(*args, **kwargs)
            if plan.fills and not self.unknown.any(tensors[1:]):
                self.unknown.overwritten(written[0])
            elif unknown:
                self.unknown.add(written)
            return result
        self.unknown.add(written)
        return None if plan.returns == 0 else given[0] if plan.returns == 1 else tuple(given[: plan.returns])

    def _may_write(self, written: list[torch.Tensor], tensors: list[torch.Tensor], unknown: bool) -> bool:
        if not unknown:
            return all(tensor.numel() <= _LOADED for tensor in tensors)
        return all(tensor.numel() <= MAX_COMPUTED_ELEMENTS for tensor in tensors) and all(
            tensor.untyped_storage().nbytes() <= _SMALL_BYTES for tensor in written
        )

    # ---- new tensors -------------------------------------------------------------------------------------------------

    def _new(
        self, func: Any, plan: OperatorPlan, tensors: list[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        unknown = self.unknown.any(tensors)
        limit = MAX_COMPUTED_ELEMENTS if unknown else _LOADED
        may_compute = bool(tensors) and all(tensor.numel() <= limit for tensor in tensors)
        if may_compute and plan.pointwise and len({tensor.shape for tensor in tensors}) == 1:
            return self._computed(func, args, kwargs, unknown)
        try:
            shapes = func(*_on_meta(args), **_factory(kwargs, tensors))
        except NotImplementedError:
            return self._computed(func, args, kwargs, unknown)  # torch has no rule for its shape
        if (may_compute or not tensors) and all(_is_kept(tensor, limit, tensors) for tensor in tensors_in(shapes)):
            result = self._computed(func, args, kwargs, unknown)
            # Old numbers in it would be other ones in each run, and may look like an overflow.
            return result.zero_() if plan.leaves_empty else result
        result = _untouched(shapes)
        self.unknown.add(tensors_in(result))
        return result

    def _joined(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Of pieces that have one dimension, as ZeRO-3 has thousands. None where they are others."""
        pieces, dim = args[0], args[1] if len(args) > 1 else 0
        if dim not in (0, -1) or {*map(torch.Tensor.dim, pieces)} != {1} or any(map(_is_meta, pieces)):
            return None
        dtypes = {*map(_dtype, pieces)}
        if len(dtypes) > 1 or {*map(_layout, pieces)} != {torch.strided}:
            return None
        length, unknown = sum(map(torch.Tensor.numel, pieces)), self.unknown.any(pieces)
        if length <= (MAX_COMPUTED_ELEMENTS if unknown else _LOADED):
            joined: torch.Tensor = self._computed(func, args, kwargs, unknown)
            return joined
        joined = memory.empty_tensor((length,), (1,), dtypes.pop())
        self.unknown.add([joined])
        return joined

    def _computed(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], unknown: bool) -> Any:
        result = func(*args, **kwargs)
        if unknown:
            self.unknown.add(tensors_in(result))
        return result

    # ---- what depends on numbers -------------------------------------------------------------------------------------

    def _number(
        self, func: Any, plan: OperatorPlan, tensors: list[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        if not self.unknown.any(tensors):
            return func(*args, **kwargs)
        add_notice(_READ)
        if all(tensor.numel() <= MAX_COMPUTED_ELEMENTS for tensor in tensors):
            return func(*args, **kwargs)
        return True  # are these two equal? both are nothing

    def _shape(
        self, func: Any, plan: OperatorPlan, tensors: list[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        unknown = self.unknown.any(tensors)
        if unknown:
            add_notice(_SHAPED)
        return self._computed(func, args, kwargs, unknown)

    def _index(
        self, func: Any, plan: OperatorPlan, tensors: list[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        indices: list[torch.Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            if index in self.unknown:
                add_notice(_SHAPED)
            indices += index.nonzero().unbind(1)
        return self._new(func, plan, tensors, (args[0], indices), kwargs)

    # ---- collectives -------------------------------------------------------------------------------------------------

    def _copy(
        self, func: Any, plan: OperatorPlan, tensors: list[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """The collective in place, on a copy that has not been copied."""
        name = func._schema.name.partition("::")[2] + "_"
        with self:
            copies = (
                [tensor.clone(memory_format=torch.contiguous_format) for tensor in args[0]]
                if isinstance(args[0], list | tuple)
                else args[0].clone(memory_format=torch.contiguous_format)
            )
        return getattr(functional, name).default(copies, *args[1:], **kwargs)


def _fake_mode() -> Any:
    """The FakeTensorMode that is entered, if any."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def _is_shapes_only(tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return True
    return any(tensor.is_meta or tensor.layout is not torch.strided for tensor in tensors)


def _is_kept(made: torch.Tensor, limit: int, tensors: list[torch.Tensor]) -> bool:
    """Whether a new tensor gets its numbers. One made of nothing is a weight, where it is not an index."""
    return made.numel() <= (limit if tensors or not made.is_floating_point() else MAX_COMPUTED_ELEMENTS)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    if isinstance(value, list | tuple):
        return [_on_meta(item) for item in value]
    return None if isinstance(value, torch.Generator) else value  # shapes need no random numbers


def _factory(kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> dict[str, Any]:
    found = {name: _on_meta(value) for name, value in kwargs.items()}
    if "device" in found or not tensors:
        found["device"] = _META
    if found.get("pin_memory"):
        found["pin_memory"] = False
    return found


def _untouched(shapes: Any) -> Any:
    if isinstance(shapes, torch.Tensor):
        return memory.empty_tensor(tuple(shapes.shape), shapes.stride(), shapes.dtype)
    if isinstance(shapes, list | tuple):
        return type(shapes)(_untouched(one) for one in shapes)
    return shapes
