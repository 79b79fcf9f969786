"""Direct calls of the methods of a backend object (`dist.ProcessGroupGloo(...).allreduce(...)`).

torch itself calls backends from C++, below its dispatcher. So these methods of `Backend` are called in Python only by a
program that has a backend object at hand, and wrapping them costs nothing elsewhere. A backend does not know the ranks
of its group (`process_groups.likely_ranks`). With the native recorder, the ends of these calls are not observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
import torch.distributed as dist

from commtrace.hooks.native.slots import NativeSlots
from commtrace.hooks.recorder_setup import call_unmeasured, fault
from commtrace.patching import Patches, Wrapper
from commtrace.recording.session import session

from .c10d_operators import Operator
from .recording_kernels import begin
from .tracer import TorchEntry, current, now

_METHODS: Final = {
    **{name: f"{name}_" for name in ("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "gather")},
    **{name: f"{name}_" for name in ("_allgather_base", "reduce_scatter", "_reduce_scatter_base", "scatter")},
    **{name: f"{name}_" for name in ("alltoall", "alltoall_base", "recv")},
    "recv_anysource": "recv_any_source_",
    "send": "send",
    "barrier": "barrier",
}
"""Method of a backend -> the operator of c10d that means the same."""
_NOT_NEEDED: Final = ("async_op", "asyncOp", "device_ids", "root_tensor", "sparse_indices", "timeout")
"""Parameters of operators from which on a record needs none."""

_patches = Patches()


@_patches.installer
def install(operators: Sequence[Operator]) -> None:
    """Wrap the methods."""
    by_name = {operator.variant: operator for operator in operators}
    for method, name in _METHODS.items():
        if name in by_name:
            _patches.wrap(torch._C._distributed_c10d.Backend, method, _wrapper(method, by_name[name]))
    _patches.on_undo(_groups.clear)


uninstall = _patches.undo


@dataclass(frozen=True)
class _BackendGroup:
    """What a groups table asks of a process group, of all backend objects of a type, rank and size."""

    name: str
    own_rank: int
    ranks: int
    group_name = ""
    group_desc = "backend object"

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return self.ranks

    def _get_sequence_number_for_group(self) -> int:
        return 0


_groups: Final[dict[tuple[str, int, int], _BackendGroup]] = {}


class _BackendOperator(Operator):
    """An operator whose group is a backend object."""

    def group(self, args: Sequence[Any]) -> Any:
        """Return what stands for the backend: a program may get a new Python object of it for each call."""
        backend = args[self.group_at or 0]
        key = type(backend).__name__, backend.rank(), backend.size()
        return _groups.setdefault(key, _BackendGroup(*key))


class _Reduction:
    """A reduction in the form in which an operator gets it."""

    def __init__(self, op: Any) -> None:
        self._op = int(getattr(op, "op", op))

    def _get_method(self, name: str) -> Callable[[], int]:
        return lambda: self._op


def _wrapper(method: str, operator: Operator) -> Wrapper:
    same = {field.name: getattr(operator, field.name) for field in fields(operator)}
    direct = _BackendOperator(**{**same, "variant": f"Backend.{method}"})
    parameters = operator.overload._schema.arguments

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            entry: TorchEntry | None = None
            try:
                tracer = None if session.settings is None else current() or begin()
                if tracer is not None:
                    entry = tracer.before(direct, [*_operator_arguments(parameters, self, args, kwargs)])
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
            recorder.lost(entry.slot, t_return)
        fault()


def _operator_arguments(
    parameters: Sequence[Any], backend: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Any]:
    """Yield the arguments of the operator that a method's arguments mean, up to the last one that a record needs.

    A method takes tensors (one for a list of one), then options in one object, or as arguments of their own.
    """
    rest = [*args, *kwargs.values()]
    options = next((value for value in rest if hasattr(value, "timeout")), None)
    for parameter in parameters:
        kind = str(parameter.type)
        if parameter.name == "process_group":
            yield backend
        elif parameter.name == "reduce_op":
            kinds = dist.ReduceOp, dist.ReduceOp.RedOpType
            given = next((value for value in rest if isinstance(value, kinds)), dist.ReduceOp.SUM)
            yield _Reduction(getattr(options, "reduceOp", given))
        elif parameter.name == "root_rank":
            yield getattr(options, "rootRank", next((value for value in rest if type(value) is int), 0))
        elif parameter.name in _NOT_NEEDED:
            return
        elif kind == "Tensor" and not (rest and isinstance(rest[0], torch.Tensor)):
            yield None  # of a barrier, which has none
        else:
            yield _nested(rest.pop(0), kind.count("List"))


def _nested(value: Any, depth: int) -> Any:
    """Return a tensor, or a list of tensors, in as many lists as an operator takes."""
    actual, inner = 0, value
    while isinstance(inner, (list, tuple)) and len(inner):
        actual, inner = actual + 1, inner[0]
    for _ in range(depth - actual if isinstance(inner, torch.Tensor) else 0):
        value = [value]
    return value
