"""Communication calls of a Kineto trace: host events that belong together, joined with the kernels that they launch.

A call is an outermost event of `c10d::` operators, `record_param_comms` and the backend's annotations on a thread;
the same call within it (an operator and its `record_param_comms`, a coalesced call and its parts) is not counted
again. A kernel belongs to the call during which the host launched it, by the correlation of launch and kernel. NCCL
launches the kernel of a group of calls after them, at the end of the group.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from commtrace.schema import Clock, Flag, State

from .events import ImportedCall, ImportedGroup, NotKnown
from .kineto_context import Context
from .kineto_sizes import StatedSize, TraceGroups, comms_size, peer_of, shape_size, tag_of
from .kineto_trace import (
    CLOCK,
    COMMS,
    EXTERNAL_ID,
    FLAGS,
    MARK,
    ON_HOST,
    HostEvent,
    Kernel,
    KinetoTrace,
    Times,
    TraceClock,
)
from .operation_names import UNKNOWN_OPERATION, element_type, operation_of

_MEANINGS: Final = {
    "payload": "the payload of {} of its calls: the trace does not record it",
    "own share": "the own share of {} of its all_to_alls: the trace cuts their lists of splits",
    "group": "the group of {} of its calls",
    "call of the host": "what called {} of its communication kernels, which no call of the host launched",
}
"""What is not known, by its name in `KinetoCalls.not_known`."""


@dataclass(eq=False)
class HostCall:
    """Host events of one call, the outermost first, and its kernels.

    Attributes:
        events: The events.
        begin: When it was entered, ns.
        end: When it returned.
        kernels: Rows of its kernels.
        batch: Number of the coalesced batch that shares its kernels; 0: none.
    """

    events: list[HostEvent]
    begin: int
    end: int
    kernels: list[int] = field(default_factory=list)
    batch: int = 0

    @property
    def thread(self) -> int:
        """Number of the thread."""
        return self.events[0].thread

    @property
    def operator(self) -> HostEvent | None:
        """The operator of `c10d` or of symmetric memory, if it is recorded."""
        return next((event for event in self.events if event.name.startswith(("c10d::", "symm_mem::"))), None)

    @property
    def comms(self) -> HostEvent | None:
        """The outermost `record_param_comms` that states a name."""
        return next((event for event in self.events if event.name == COMMS and "Collective name" in event.args), None)

    @property
    def names(self) -> Iterator[str]:
        """Names of the call, the best known first."""
        if self.operator is not None:
            yield self.operator.name
        if self.comms is not None:
            yield str(self.comms.args["Collective name"])
        yield from (event.name for event in self.events if event.name not in (COMMS, ""))


class KinetoCalls:
    """The calls of a trace.

    Attributes:
        not_known: Number of calls of which something is not known, by what it is.
    """

    def __init__(self, trace: KinetoTrace, clock: TraceClock, context: Context, rank: int | None) -> None:
        self._trace, self._context, self._rank = trace, context, rank
        self.groups = TraceGroups(trace.distributed_info)
        self.not_known: Counter[str] = Counter()
        host, begin, end = _timed(trace.host, clock)
        self._calls = _outermost(host, begin, end)
        self._kernels, self._kernel_begin, self._kernel_end = _timed(trace.kernels, clock)
        launches = [trace.launches.get(kernel.correlation) for kernel in self._kernels]
        self._launch_begin = clock.spans(
            [0.0 if launch is None else launch.begin for launch in launches], np.zeros(len(launches))
        )[0]
        self._launches = launches
        self._alone: list[int] = []
        self._gloo = _by_tensor(trace.gloo)
        waits = clock.spans([*trace.waits.values()], np.zeros(len(trace.waits)))[0]
        self._waits: dict[int | None, int] = dict(zip(trace.waits, waits.tolist(), strict=True))
        self._join()

    def calls(self) -> Iterator[ImportedCall]:
        """Yield the calls, in the order in which the host made them; then kernels without a call of the host."""
        for call in self._calls:
            op = self._operation(call)
            if op:
                yield self._call(call, op)
        for kernel in self._alone:
            yield self._kernel_alone(kernel)

    def facts_not_known(self) -> Iterator[NotKnown]:
        """Yield what is not known of some calls, when all have been yielded."""
        for name, text in _MEANINGS.items():
            if number := self.not_known[name]:
                yield NotKnown(text.format(f"{number:,}"))

    def _join(self) -> None:
        """Give each kernel to the call that launched it."""
        by_thread: dict[int, list[HostCall]] = {}
        for made in self._calls:
            by_thread.setdefault(made.thread, []).append(made)
        begins = {thread: np.array([call.begin for call in calls]) for thread, calls in by_thread.items()}
        by_id = {
            external: call
            for call in self._calls
            for event in call.events
            if (external := _external_id(event.args)) is not None
        }
        late: list[int] = []
        for row, (kernel, launch) in enumerate(zip(self._kernels, self._launches, strict=True)):
            call: HostCall | None = None
            if launch is not None and launch.thread in begins:
                moment = int(self._launch_begin[row])
                at = int(np.searchsorted(begins[launch.thread], moment, side="right")) - 1
                if at >= 0 and moment <= by_thread[launch.thread][at].end:
                    call = by_thread[launch.thread][at]
            if call is None and kernel.meaning.library == "nccl" and not (launch is not None and launch.is_graph):
                external = _external_id(kernel.args)
                call = by_id.get(external) if external is not None and external != kernel.correlation else None
            if call is not None:
                call.kernels.append(row)
            else:
                late.append(row)
        for row in late:
            self._join_group_end(row, by_thread, begins)

    def _join_group_end(self, row: int, by_thread: dict[int, list[HostCall]], begins: dict[int, Times]) -> None:
        """Give a kernel that was launched after a group of calls to them, or mark it as a kernel without a call."""
        kernel, launch = self._kernels[row], self._launches[row]
        group: list[HostCall] = []
        if launch is not None and not launch.is_graph and kernel.meaning.library == "nccl" and launch.thread in begins:
            at = int(np.searchsorted(begins[launch.thread], int(self._launch_begin[row]), side="right")) - 1
            calls = by_thread[launch.thread]
            while at >= 0 and not calls[at].kernels:
                if self._operation(calls[at]):
                    group.append(calls[at])
                at -= 1
        if not group or any(
            step != self._context.step(int(self._launch_begin[row]))
            for step in {self._context.step(call.begin) for call in group}
        ):
            self._alone.append(row)
            return
        for call in group:
            call.kernels.append(row)
            call.batch = row + 1 if len(group) > 1 else 0

    def _operation(self, call: HostCall) -> str:
        """Return the operation of a call; "" for an event that is no call, such as a wait."""
        for name in call.names:
            if op := operation_of(name):
                return op
        if call.kernels:
            return self._kernels[call.kernels[0]].meaning.op or UNKNOWN_OPERATION
        return ""

    def _call(self, call: HostCall, op: str) -> ImportedCall:
        operator = call.operator.args if call.operator is not None else {}
        comms = call.comms.args if call.comms is not None else {}
        group = self.groups.of_call(comms) or self.groups.only
        ranks, position = _place(group, self._rank)
        size = self._size(call, op, ranks, position)
        if size.payload is None:
            self.not_known["payload"] += 1
        elif size.local is None:
            self.not_known["own share"] += 1
        if group is None:
            self.not_known["group"] += 1
        variant = next(iter(call.names), "").removeprefix("c10d::").removeprefix("symm_mem::")
        coalesced = "coalesced" in variant or call.batch
        why = self._context.why(call.begin, call.thread, op)
        return ImportedCall(
            kind=(op, variant, "torch", size.dtype, ""),
            group=group,
            payload=size.payload,
            local=size.local,
            seq=_sequence_number(comms),
            t_begin=call.begin,
            t_return=call.end,
            t_wait=self._waits.get(_external_id(comms), 0),
            step=self._context.step(call.begin),
            peer=peer_of(op, operator, comms, group),
            tag=tag_of(op, operator, comms),
            batch=call.batch,
            thread=call.thread,
            phase=self._context.phase(call.begin, call.thread),
            flags=int(size.flags | (Flag.COALESCED if coalesced else 0) | _flags(comms)),
            site=self._context.site(call.begin, call.thread, why),
            **self._device_times(call.kernels),
        )

    def _device_times(self, kernels: Sequence[int]) -> dict[str, Any]:
        if not kernels:
            return {"state": State.UNOBSERVABLE}
        args = self._kernels[kernels[0]].args
        return {
            "t_start": 0 if args.get(MARK) == ON_HOST else int(self._kernel_begin[kernels].min()),
            "t_end": int(self._kernel_end[kernels].max()),
            "clock": Clock.__members__.get(str(args.get(CLOCK, "device")).upper(), Clock.DEVICE),
            "state": State.COMPLETE,
        }

    def _size(self, call: HostCall, op: str, ranks: int, position: int) -> StatedSize:
        if call.comms is None:
            return self._size_of_operator(call, op, ranks, position)
        size = comms_size(op, call.comms.args, ranks, position)
        if size.payload is None and call.operator is not None:
            return self._size_of_operator(call, op, ranks, position)
        return size

    def _size_of_operator(self, call: HostCall, op: str, ranks: int, position: int) -> StatedSize:
        """Return the size by the shapes of an operator's tensors.

        Kineto does not record the element type of a list of tensors. If gloo carries out the call, its annotation of an
        equal tensor has it.
        """
        if call.operator is None:
            return StatedSize()
        args = call.operator.args
        size = shape_size(op, args, ranks, position)
        types, shapes = args.get("Input type"), args.get("Input Dims")
        if size.payload is None and isinstance(types, list) and isinstance(shapes, list) and "TensorList" in types[:1]:
            names = self._gloo.get((op, str(shapes[:1])), set())
            if len(names) == 1:
                return shape_size(op, {**args, "Input type": [*names, *types[1:]]}, ranks, position)
        return size

    def _kernel_alone(self, row: int) -> ImportedCall:
        """Return the call of a kernel that no call of the host launched: its name is all that is known."""
        kernel, launch = self._kernels[row], self._launches[row]
        stated = str(kernel.args.get("Collective name") or "")
        op = operation_of(stated) or kernel.meaning.op or UNKNOWN_OPERATION
        group = self.groups.of_call(kernel.args) if stated else None
        size = comms_size(op, kernel.args, *_place(group, self._rank)) if stated else StatedSize()
        begin = int(self._launch_begin[row]) if launch is not None else 0
        self.not_known["call of the host"] += 1
        if size.payload is None:
            self.not_known["payload"] += 1
        if group is None:
            self.not_known["group"] += 1
        return ImportedCall(
            kind=(op, _kernel_variant(kernel), "kernel", size.dtype or element_type("")[0], ""),
            group=group,
            payload=size.payload,
            local=size.local,
            t_begin=begin or int(self._kernel_begin[row]),
            step=self._context.step(begin or int(self._kernel_begin[row])),
            thread=launch.thread if launch is not None else 1,
            phase=self._context.phase(begin, launch.thread) if launch is not None else self._context.phase(0, 0),
            flags=int(size.flags | (Flag.CAPTURED if launch is not None and launch.is_graph else 0)),
            site=self._context.site(begin, launch.thread, None) if launch is not None else None,
            **self._device_times([row]),
        )


def _by_tensor(annotations: Sequence[HostEvent]) -> dict[tuple[str, str], set[str]]:
    """Return the element types in gloo's annotations by operation and the shapes of the tensors, as a list's text."""
    types: dict[tuple[str, str], set[str]] = {}
    for event in annotations:
        shapes, names = event.args.get("Input Dims"), event.args.get("Input type")
        if isinstance(shapes, list) and isinstance(names, list) and names:
            types.setdefault((operation_of(event.name), str([shapes])), set()).add(str(names[0]))
    return types


def _kernel_variant(kernel: Kernel) -> str:
    """Return the function's name in a kernel's name, without return type, namespaces, template and arguments."""
    name = kernel.name.removeprefix("void ").replace("(anonymous namespace)::", "")
    plain = name.partition("(")[0].partition("<")[0].rpartition("::")[2]
    return f"{kernel.meaning.library}:{plain}"[:80]


def _place(group: ImportedGroup | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks of a group and a rank's position in it; 0 and -1 where they are not known."""
    if group is None:
        return 0, -1
    return len(group.ranks), group.ranks.index(rank) if rank in group.ranks else -1


def _external_id(args: dict[str, Any]) -> int | None:
    number = args.get(EXTERNAL_ID)
    return number if isinstance(number, int) else None


def _flags(comms: dict[str, Any]) -> Flag:
    names = str(comms.get(FLAGS) or "").upper().split("|")
    return Flag(sum(Flag[name] for name in {*names} & {*Flag.__members__}))


def _sequence_number(comms: dict[str, Any]) -> int | None:
    number = comms.get("Seq")
    return number if type(number) is int and 0 <= number < 1 << 32 else None


def _timed(events: Sequence[Any], clock: TraceClock) -> tuple[list[Any], Times, Times]:
    """Return the events with possible times, and their begins and ends in ns."""
    begin, end, known = clock.spans([event.begin for event in events], [event.duration for event in events])
    return [event for event, is_known in zip(events, known, strict=True) if is_known], begin[known], end[known]


def _outermost(events: Sequence[HostEvent], begin: Times, end: Times) -> list[HostCall]:
    """Return the events as calls: those within an event of the same thread belong to its call. In order of begin.

    Operators of `c10d` call no other ones: where an execution trace has one below another, it lost the end of that.
    """
    calls: list[HostCall] = []
    around: dict[int, list[HostCall]] = defaultdict(list)
    for row in np.lexsort((-end, begin)).tolist():
        event, open_calls = events[row], around[events[row].thread]
        while open_calls and begin[row] >= open_calls[-1].end:
            open_calls.pop()
        outer = open_calls[-1] if open_calls else None
        if outer is not None and not (_is_c10d(event) and any(map(_is_c10d, outer.events))):
            outer.events.append(event)
        else:
            calls.append(HostCall([event], int(begin[row]), int(end[row])))
            open_calls.append(calls[-1])
    return calls


def _is_c10d(event: HostEvent) -> bool:
    return event.name.startswith("c10d::")
