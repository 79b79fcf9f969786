"""Kineto traces: what torch.profiler writes, one JSON file per rank (`.json`, `.json.gz`)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from .enclosing import union
from .events import MOST_RANKS, DeviceWork, Event, ImportedProcess, NotKnown, Spans, StepSpans
from .execution_trace import ExecutionTrace, complete, process_id
from .file_names import rank_in_name
from .json_stream import JsonArray, natural, read_head
from .kineto_calls import KinetoCalls
from .kineto_context import Context, device_steps
from .kineto_trace import KinetoTrace, SpanArrays, TraceClock

_MARK: Final = re.compile(rb'"traceEvents"|"ph"\s*:')
_WORKER: Final = re.compile(r"(?P<host>.+)_(?P<pid>\d+)\.\d+\.pt\.trace\.json(\.gz)?")
_HEAD: Final = 1 << 12


def is_kineto(path: Path, head: bytes) -> bool:
    """Return whether a file with these first bytes is a Kineto trace."""
    return _MARK.search(head) is not None or b'"schemaVersion"' in head


def survey(paths: Sequence[Path], completing: Sequence[Path]) -> Callable[[Path], Iterator[Event]]:
    """Return what yields the events of one of the traces of a run, completed by its execution trace if it is given.

    Args:
        paths: The traces.
        completing: Execution traces.

    Raises:
        ImportFileError: A file cannot be read.
    """
    return partial(_events, ExecutionTraces(completing))


def events(path: Path) -> Iterator[Event]:
    """Yield the events of a trace alone: see `survey`."""
    return survey([path], [])(path)


class ExecutionTraces:
    """The execution traces of a run, by process id and rank."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._of_process: dict[int, list[ExecutionTrace]] = defaultdict(list)
        for path in paths:
            trace = ExecutionTrace(path)
            if (pid := process_id(read_head(path, _HEAD))) is not None:
                self._of_process[pid].append(trace)

    def complete(self, trace: KinetoTrace, rank: int | None) -> str:
        """Add to a trace what the execution trace of its process states, if there is one.

        It is the only one of its process id, or of its id and rank: processes of several hosts may have equal ids.

        Returns:
            What could not be added and why, or "".
        """
        found = [known for pid in trace.processes for known in self._of_process.get(pid, ())]
        if len(found) > 1:
            found = [known for known in found if rank is not None and known.stated_rank == rank]
            if not found:
                return "what its execution trace states: which one is of its process is not known"
        if len(found) != 1:
            return ""
        reason = complete(trace, found[0])
        return reason and f"what its execution trace {found[0].path.name} states: {reason}"


def _events(execution_traces: ExecutionTraces, path: Path) -> Iterator[Event]:
    trace = KinetoTrace(JsonArray(path, "traceEvents")).read()
    clock = TraceClock(trace)
    rank = natural(trace.distributed_info.get("rank"), MOST_RANKS)
    rank = rank_in_name(path) if rank is None else rank
    not_added = execution_traces.complete(trace, rank)
    yield _process(trace, clock, rank)
    if not_added:
        yield NotKnown(not_added)
    context = Context(trace, clock)
    calls = KinetoCalls(trace, clock, context, rank)
    yield from calls.calls()
    yield DeviceWork(_union(trace.computation, clock), _union(trace.copies, clock))
    steps, spans = device_steps(trace, clock, context)
    yield StepSpans(steps, spans)
    yield from _not_known(calls, trace, context)
    yield from trace.problems()


def _process(trace: KinetoTrace, clock: TraceClock, rank: int | None) -> ImportedProcess:
    info = trace.distributed_info
    worker = _WORKER.fullmatch(trace.path.name)
    host = trace.members.get("host_name")
    versions = {"nccl": info["nccl_version"]} if isinstance(info.get("nccl_version"), str) else {}
    devices = trace.members.get("deviceProperties")
    device = devices[0].get("name") if isinstance(devices, list) and devices and isinstance(devices[0], dict) else None
    return ImportedProcess(
        rank=rank,
        world_size=natural(info.get("world_size"), MOST_RANKS),
        host=host if isinstance(host, str) else worker["host"] if worker is not None else "",
        pid=int(worker["pid"]) if worker is not None else None,
        tool="torch.profiler",
        moment_ns=clock.moment_ns,
        clock_is_wall=clock.is_wall,
        facts={"versions": versions, **({"device": str(device)} if device else {})},
    )


def _union(spans: SpanArrays, clock: TraceClock) -> Spans:
    begin, end, known = clock.spans(spans.begin, spans.duration)
    return union(begin[known], end[known])


def _not_known(calls: KinetoCalls, trace: KinetoTrace, context: Context) -> Iterator[NotKnown]:
    yield from calls.facts_not_known()
    if not len(context.steps):
        yield NotKnown("its steps: the trace has no ProfilerStep annotations")
    if not len(trace.frames.begin):
        yield NotKnown("its call sites: the profiler ran without with_stack=True")
    else:
        yield NotKnown("the line of a call: call sites are the first lines of their functions")
    if not trace.waits:
        yield NotKnown("when the program waits for a call")
