"""Hook for direct calls of a backend's methods (`dist.ProcessGroupGloo(...).allreduce(...)`).

torch itself calls backends from C++, below its dispatcher. In Python, only programs that hold a
backend object call these methods of `Backend`, so wrapping them costs nothing elsewhere. A backend
does not have the ranks of its group: they are guessed (`process_groups.likely_ranks`). With the
native recorder, the ends of these calls are not observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
import torch.distributed as dist

from commtrace.hooks.native.native_slots import NativeSlots
from commtrace.hooks.recorder_setup import call_unmeasured, count_fault
from commtrace.patching import Patches, Wrapper
from commtrace.recording.session import session

from .c10d_operators import Operator
from .recording_kernels import ensure_tracer
from .tracer import TorchEntry, current, now

_METHODS: Final = {
    **{name: f"{name}_" for name in ("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "gather")},
    **{name: f"{name}_" for name in ("_allgather_base", "reduce_scatter", "_reduce_scatter_base", "scatter")},
    **{name: f"{name}_" for name in ("alltoall", "alltoall_base", "recv")},
    "recv_anysource": "recv_any_source_",
    "send": "send",
    "barrier": "barrier",
}
"""Method of a backend -> the equivalent operator of c10d."""
_NOT_NEEDED: Final = ("async_op", "asyncOp", "device_ids", "root_tensor", "sparse_indices", "timeout")
"""Parameters of operators that a record does not need, nor any after them."""

_patches = Patches()


@_patches.installer
def install(operators: Sequence[Operator]) -> None:
    """Wrap the methods of backends."""
    by_name = {operator.variant: operator for operator in operators}
    for method, name in _METHODS.items():
        if name in by_name:
            _patches.wrap(torch._C._distributed_c10d.Backend, method, _wrapper(method, by_name[name]))
    _patches.on_undo(_groups.clear)


uninstall = _patches.undo


@dataclass(frozen=True)
class _BackendGroup:
    """Stand-in for a process group, for all backend objects with the same type, rank and size."""

    name: str
    own_rank: int
    group_size: int
    group_name = ""
    group_desc = "backend object"

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return self.group_size

    def _get_sequence_number_for_group(self) -> int:
        return 0


_groups: Final[dict[tuple[str, int, int], _BackendGroup]] = {}


class _BackendOperator(Operator):
    """An operator whose group is a backend object."""

    def group(self, args: Sequence[Any]) -> Any:
        """Return the stand-in for the backend, which may be a new Python object in each call."""
        backend = args[self.group_at or 0]
        key = type(backend).__name__, backend.rank(), backend.size()
        return _groups.setdefault(key, _BackendGroup(*key))


class _Reduction:
    """A reduction with the interface of a boxed ReduceOp."""

    def __init__(self, op: Any) -> None:
        self._op = int(getattr(op, "op", op))

    def _get_method(self, name: str) -> Callable[[], int]:
        return lambda: self._op


def _wrapper(method: str, operator: Operator) -> Wrapper:
    attributes = {field.name: getattr(operator, field.name) for field in fields(operator)}
    backend_operator = _BackendOperator(**{**attributes, "variant": f"Backend.{method}"})
    parameters = operator.overload._schema.arguments

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            entry: TorchEntry | None = None
            try:
                tracer = None if session.settings is None else current() or ensure_tracer()
                if tracer is not None:
                    entry = tracer.begin_call(backend_operator, [*_operator_arguments(parameters, self, args, kwargs)])
            except Exception as error:
                return call_unmeasured(error, original, self, *args, **kwargs)
            if entry is None:
                return original(self, *args, **kwargs)
            try:
                work = original(self, *args, **kwargs)
            except BaseException:
                entry.tracer.recorder.failed(entry.slot, now())
                raise
            _return(entry, work)
            return work

        return call

    return wrapper


def _return(entry: TorchEntry, work: Any) -> None:
    t_return = now()
    recorder = entry.tracer.recorder
    try:
        observable = work is not None and not isinstance(recorder.slots, NativeSlots)
        call = recorder.returned(entry.slot, t_return, observable=observable)
        if call is not None and observable:
            entry.tracer.works.add(work, [call], entry.on_host)
    except Exception:
        with suppress(Exception):
            recorder.set_unobservable(entry.slot, t_return)
        count_fault()


def _operator_arguments(
    parameters: Sequence[Any], backend: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Any]:
    """Yield an operator's arguments from those of a method, up to the last one that a record needs.

    A method takes tensors (a tensor may replace a list of one), then options, in one object or as
    separate arguments.
    """
    rest = [*args, *kwargs.values()]
    options = next((value for value in rest if hasattr(value, "timeout")), None)
    for parameter in parameters:
        kind = str(parameter.type)
        if parameter.name == "process_group":
            yield backend
        elif parameter.name == "reduce_op":
            types = dist.ReduceOp, dist.ReduceOp.RedOpType
            reduce_op = next((value for value in rest if isinstance(value, types)), dist.ReduceOp.SUM)
            yield _Reduction(getattr(options, "reduceOp", reduce_op))
        elif parameter.name == "root_rank":
            yield getattr(options, "rootRank", next((value for value in rest if type(value) is int), 0))
        elif parameter.name in _NOT_NEEDED:
            return
        elif kind == "Tensor" and not (rest and isinstance(rest[0], torch.Tensor)):
            yield None  # a barrier has no tensor
        else:
            yield _nested(rest.pop(0), kind.count("List"))


def _nested(value: Any, depth: int) -> Any:
    """Return a tensor or list of tensors, nested in lists to the depth that an operator takes."""
    actual, inner = 0, value
    while isinstance(inner, (list, tuple)) and len(inner):
        actual, inner = actual + 1, inner[0]
    for _ in range(depth - actual if isinstance(inner, torch.Tensor) else 0):
        value = [value]
    return value
