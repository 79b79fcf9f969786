"""Dispatch mode of a dry run: tensors are real and on the CPU, and the memory of large ones is never touched.

    a view, a shape, a storage         executed
    a write into a large tensor        skipped
    a new large tensor                 shape from torch's rules (device `meta`), memory untouched
    small tensors, and loaded data     computed: indices, counters, batches
    a number, or a shape, from data    read; data that was not computed is zero, and the line is reported
    a collective                       passed on to the dispatcher: the hooks record it, `collectives` replaces it

The mode runs below autograd, DDP's reducer and DTensor, and receives only plain operators on plain tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .flops import FlopCounter
from .notices import add_notice
from .operators import OperatorKind, OperatorPlan, operator_plan, tensors_in
from .simulated_cuda import DeviceTensors
from .storage_set import StorageSet, numel, storage_of
from .untouched_memory import MAX_COMPUTED_ELEMENTS, MAX_DATA_ELEMENTS, empty_tensor

Tensors: TypeAlias = list[torch.Tensor]
Arguments: TypeAlias = Sequence[Any]
Keywords: TypeAlias = dict[str, Any]

_META: Final = torch.device("meta")
_MAX_COMPUTED_BYTES: Final = 16 * MAX_COMPUTED_ELEMENTS

_READ: Final = "reads a number that a dry run does not compute; it continues with the value in memory, usually zero"
_SHAPED: Final = "makes a shape from numbers that a dry run does not compute; it continues as if all were zero"

_disabled: Final = torch._C._disabled_torch_dispatch_impl

_dtype: Final = attrgetter("dtype")
_is_meta: Final = attrgetter("is_meta")
_layout: Final = attrgetter("layout")
_stride: Final = torch.Tensor.stride

functional: Final[Any] = torch.ops._c10d_functional


class DryRunMode(TorchDispatchMode):
    """The dispatch mode, which is entered once, on the training thread."""

    def __init__(self, uncomputed: StorageSet, devices: DeviceTensors | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uncomputed, self._devices = uncomputed, devices
        self.flops = FlopCounter()
        self.forked = False  # True in a data loader's process, where everything is executed
        self._plans: dict[Any, OperatorPlan] = {}
        self._real: dict[Any, Callable[..., Any]] = {}
        self._wrapping: dict[type, bool] = {}
        self._shapes: dict[Hashable, Any] = {}
        self._handlers: Final = {
            OperatorKind.WRITE: self._write,
            OperatorKind.NEW: self._new,
            OperatorKind.NUMBER: self._number,
            OperatorKind.SHAPE: self._shape,
            OperatorKind.INDEX: self._index,
            OperatorKind.JOIN: self._join,
            OperatorKind.COPY: self._copy,
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping the method below, which would cost time at each call; nothing is compiled anyway."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Handle one operator as the table in the module's docstring says."""
        if types:  # empty if all are plain tensors
            for cls in types:
                if issubclass(cls, FakeTensor):
                    return func(*args, **(kwargs or {}))  # a compiler, or DTensor, computes shapes
                if self._wraps(cls):
                    return NotImplemented  # for example DTensor, which calls again with its plain tensor
        real = self._real.get(func)
        if real is not None:  # mostly views: ZeRO-3 makes a million per step on a thousand ranks
            return real(*args, **kwargs) if kwargs else real(*args)
        kwargs = kwargs or {}
        if _fake_mode() is not None:
            return func(*args, **kwargs)  # a FakeTensorMode, which dispatches after all others, makes new tensors
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = operator_plan(func)
        if plan.kind is OperatorKind.REAL or self.forked:
            if plan.kind is OperatorKind.REAL:
                self._real[func] = func._op
            return func(*args, **kwargs)
        tensors = [*tensors_in(args), *tensors_in([*kwargs.values()])]
        if _is_meta_or_sparse(tensors, kwargs):
            return func(*args, **kwargs)
        if self._devices is not None and plan.draws and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._devices.generator_of(tensors)}
        if self._devices is None or plan.kind in (OperatorKind.WRITE, OperatorKind.NUMBER):
            result = self._handlers[plan.kind](func, plan, tensors, args, kwargs)
        else:
            on_cpu, device = self._devices.redirect(kwargs, tensors)
            result = self._devices.place(self._handlers[plan.kind](func, plan, tensors, args, on_cpu), device)
        if plan.flops is not None:
            self.flops.count(plan.flops, args, kwargs, result)
        return result

    def _wraps(self, cls: type) -> bool:
        wraps = self._wrapping.get(cls)
        if wraps is None:
            dispatch = getattr(cls, "__torch_dispatch__", _disabled)
            wraps = self._wrapping[cls] = dispatch is not _disabled and dispatch is not torch.Tensor.__torch_dispatch__
        return wraps

    # ---- writes ------------------------------------------------------------------------------------------------------

    def _write(self, func: Any, plan: OperatorPlan, tensors: Tensors, args: Arguments, kwargs: Keywords) -> Any:
        targets = [kwargs.get(name, args[at] if at < len(args) else None) for at, name in plan.writes]
        written = [*tensors_in(targets)]
        uncomputed = self.uncomputed.any(tensors)
        if self._may_write(written, tensors, uncomputed):
            result = func(*args, **kwargs)
            if plan.fills and not self.uncomputed.any(tensors[1:]):
                self.uncomputed.discard_overwritten(written[0])
            elif uncomputed:
                self.uncomputed.add(written)
            return result
        self.uncomputed.add(written)
        return None if plan.returns == 0 else targets[0] if plan.returns == 1 else tuple(targets[: plan.returns])

    def _may_write(self, written: Tensors, tensors: Tensors, uncomputed: bool) -> bool:
        if not uncomputed:
            return max(map(numel, tensors), default=0) <= MAX_DATA_ELEMENTS
        return max(map(numel, tensors), default=0) <= MAX_COMPUTED_ELEMENTS and all(
            storage_of(tensor).nbytes() <= _MAX_COMPUTED_BYTES for tensor in written
        )

    # ---- new tensors -------------------------------------------------------------------------------------------------

    def _new(self, func: Any, plan: OperatorPlan, tensors: Tensors, args: Arguments, kwargs: Keywords) -> Any:
        uncomputed = self.uncomputed.any(tensors)
        limit = MAX_COMPUTED_ELEMENTS if uncomputed else MAX_DATA_ELEMENTS
        may_compute = bool(tensors) and max(map(numel, tensors)) <= limit
        if may_compute and plan.pointwise and len({tensor.shape for tensor in tensors}) == 1:
            return self._compute(func, args, kwargs, uncomputed)
        try:
            shapes = self._shapes_of(func, args, kwargs, tensors)
        except NotImplementedError:
            return self._compute(func, args, kwargs, uncomputed)  # torch has no meta kernel for it
        if (may_compute or not tensors) and all(_is_computed(tensor, limit, tensors) for tensor in tensors_in(shapes)):
            result = self._compute(func, args, kwargs, uncomputed)
            # Old values in its memory would differ between runs, and could look like an overflow.
            return result.zero_() if plan.leaves_empty else result
        result = _untouched(shapes)
        self.uncomputed.add(tensors_in(result))
        return result

    def _shapes_of(self, func: Any, args: Arguments, kwargs: Keywords, tensors: Tensors) -> Any:
        """Return the results of an operator on the device `meta`. They are cached, because torch's rules are slow."""
        key = func, _shape_key(args), _shape_key([*kwargs.items()]), torch.get_default_dtype()
        shapes = self._shapes.get(key)
        if shapes is None:
            with _without_alerts():
                shapes = self._shapes[key] = func(*_on_meta(args), **_meta_options(kwargs, tensors))
        return shapes

    def _join(self, func: Any, plan: OperatorPlan, tensors: Tensors, args: Arguments, kwargs: Keywords) -> Any:
        """Concatenate one-dimensional tensors without torch's rules for shapes: ZeRO-3 has thousands of them."""
        pieces, dim = args[0], args[1] if len(args) > 1 else 0
        dtypes = {*map(_dtype, pieces)}
        if dim not in (0, -1) or {*map(torch.Tensor.dim, pieces)} != {1} or len(dtypes) > 1:
            return self._new(func, plan, tensors, args, kwargs)
        length, uncomputed = sum(map(numel, pieces)), self.uncomputed.any(pieces)
        if length <= (MAX_COMPUTED_ELEMENTS if uncomputed else MAX_DATA_ELEMENTS):
            return self._compute(func, args, kwargs, uncomputed)
        joined = empty_tensor((length,), (1,), dtypes.pop())
        self.uncomputed.add([joined])
        return joined

    def _compute(self, func: Any, args: Arguments, kwargs: Keywords, uncomputed: bool) -> Any:
        result = func(*args, **kwargs)
        if uncomputed:
            self.uncomputed.add(tensors_in(result))
        return result

    # ---- results that depend on values -------------------------------------------------------------------------------

    def _number(self, func: Any, plan: OperatorPlan, tensors: Tensors, args: Arguments, kwargs: Keywords) -> Any:
        if not self.uncomputed.any(tensors):
            return func(*args, **kwargs)
        add_notice(_READ)
        if max(map(numel, tensors)) <= MAX_COMPUTED_ELEMENTS:
            return func(*args, **kwargs)
        return True  # torch.equal: tensors without values count as equal

    def _shape(self, func: Any, plan: OperatorPlan, tensors: Tensors, args: Arguments, kwargs: Keywords) -> Any:
        uncomputed = self.uncomputed.any(tensors)
        if uncomputed:
            add_notice(_SHAPED)
        return self._compute(func, args, kwargs, uncomputed)

    def _index(self, func: Any, plan: OperatorPlan, tensors: Tensors, args: Arguments, kwargs: Keywords) -> Any:
        indices: list[torch.Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            if index in self.uncomputed:
                add_notice(_SHAPED)
            indices += torch.nonzero(index).unbind(1)
        return self._new(func, plan, tensors, (args[0], indices), kwargs)

    # ---- collectives -------------------------------------------------------------------------------------------------

    def _copy(self, func: Any, plan: OperatorPlan, tensors: Tensors, args: Arguments, kwargs: Keywords) -> Any:
        """Call the in-place collective on clones. The mode makes large clones without copying."""
        name = func._schema.name.partition("::")[2] + "_"
        with self:
            copies = (
                [torch.clone(tensor, memory_format=torch.contiguous_format) for tensor in args[0]]
                if isinstance(args[0], list | tuple)
                else torch.clone(args[0], memory_format=torch.contiguous_format)
            )
        return getattr(functional, name).default(copies, *args[1:], **kwargs)


def _draw(mode: DryRunMode, start: int, end: int, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Draw random numbers for a shard of a DTensor. Where in the sequence of numbers it begins and ends is ignored."""
    with mode:
        return operator(*args, **kwargs)


with contextlib.suppress(AttributeError):  # older versions of torch have no such operator
    rng_prims.run_dtensor_rng_op.py_impl(DryRunMode)(_draw)


def _fake_mode() -> Any:
    """Return the active FakeTensorMode, or None."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


@contextlib.contextmanager
def _without_alerts() -> Iterator[None]:
    """Let torch's rules for shapes not raise for lack of a deterministic kernel: they take `meta` for CUDA."""
    are_deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if not are_deterministic:
        yield
        return
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)


def _is_meta_or_sparse(tensors: Tensors, kwargs: Keywords) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return True
    return any(tensor.is_meta or tensor.layout is not torch.strided for tensor in tensors)


def _is_computed(new: torch.Tensor, limit: int, tensors: Tensors) -> bool:
    """Return whether to compute a new tensor. Floating-point tensors from a factory are weights; others are indices."""
    return numel(new) <= (limit if tensors or not new.is_floating_point() else MAX_COMPUTED_ELEMENTS)


def _shape_key(value: Any) -> Hashable:
    """Return what the shapes of an operator's results depend on in an argument, or in a list of arguments."""
    if isinstance(value, torch.Tensor):
        return value.shape, _stride(value), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_shape_key, value))
    return None if isinstance(value, torch.Generator) else (type(value), value)  # 1, 1.0 and True are equal


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, _stride(value), dtype=value.dtype, device=_META)
    if isinstance(value, list | tuple):
        return [_on_meta(item) for item in value]
    return None if isinstance(value, torch.Generator) else value  # a meta kernel needs no random numbers


def _meta_options(kwargs: Keywords, tensors: Tensors) -> dict[str, Any]:
    options = {name: _on_meta(value) for name, value in kwargs.items()}
    if "device" in options or not tensors:
        options["device"] = _META
    if options.get("pin_memory"):
        options["pin_memory"] = False
    return options


def _untouched(shapes: Any) -> Any:
    if isinstance(shapes, torch.Tensor):
        return empty_tensor(tuple(shapes.shape), _stride(shapes), shapes.dtype)
    if isinstance(shapes, list | tuple):
        return type(shapes)(_untouched(shape) for shape in shapes)
    return shapes
