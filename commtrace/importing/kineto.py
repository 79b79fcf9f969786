"""Kineto traces: what torch.profiler writes, one JSON file per rank (`.json`, `.json.gz`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from .enclosing import union
from .events import DeviceWork, Event, ImportedProcess, NotKnown, Problem, Spans, StepSpans
from .json_stream import natural
from .kineto_calls import KinetoCalls
from .kineto_context import Context, device_steps
from .kineto_trace import KinetoTrace, SpanArrays, TraceClock

_MARK: Final = re.compile(rb'"traceEvents"|"ph"\s*:')
_WORKER: Final = re.compile(r"(?P<host>.+)_(?P<pid>\d+)\.\d+\.pt\.trace\.json(\.gz)?")
_RANK: Final = re.compile(r"rank[-_]?(\d{1,6})", re.IGNORECASE)
_MOST_RANKS: Final = 1 << 20


def is_kineto(path: Path, head: bytes) -> bool:
    """Return whether a file with these first bytes is a Kineto trace."""
    return _MARK.search(head) is not None or b'"schemaVersion"' in head


def events(path: Path) -> Iterator[Event]:
    """Yield the process of a trace, its calls, its other work on the device, and what is not known.

    Raises:
        ImportFileError: The file is not a trace, or cannot be read.
    """
    trace = KinetoTrace(path).read()
    clock = TraceClock(trace)
    info = trace.members.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank = _rank(info, path)
    yield _process(trace, clock, info, rank)
    context = Context(trace, clock)
    calls = KinetoCalls(trace, clock, context, rank)
    yield from calls.calls()
    yield DeviceWork(_union(trace.computation, clock), _union(trace.copies, clock))
    steps, spans = device_steps(trace, clock, context)
    yield StepSpans(steps, spans)
    yield from _not_known(calls, trace, context)
    if trace.problem:
        yield Problem(trace.problem, "calls after that are missing", "cut")
    if trace.malformed:
        yield Problem(f"{trace.malformed:,} events lack a field or have one of a wrong type", "they are left out")


def _process(trace: KinetoTrace, clock: TraceClock, info: Mapping[str, Any], rank: int | None) -> ImportedProcess:
    worker = _WORKER.fullmatch(trace.path.name)
    host = trace.members.get("host_name")
    versions = {"nccl": info["nccl_version"]} if isinstance(info.get("nccl_version"), str) else {}
    devices = trace.members.get("deviceProperties")
    device = devices[0].get("name") if isinstance(devices, list) and devices and isinstance(devices[0], dict) else None
    return ImportedProcess(
        rank=rank,
        world_size=natural(info.get("world_size"), _MOST_RANKS),
        host=host if isinstance(host, str) else worker["host"] if worker is not None else "",
        pid=int(worker["pid"]) if worker is not None else None,
        tool="torch.profiler",
        moment_ns=clock.moment_ns,
        clock_is_wall=clock.is_wall,
        facts={"versions": versions, **({"device": str(device)} if device else {})},
    )


def _rank(info: Mapping[str, Any], path: Path) -> int | None:
    """Return the rank that the file states, else the one in its name."""
    rank = natural(info.get("rank"), _MOST_RANKS)
    match = _RANK.search(path.name)
    return rank if rank is not None or match is None else int(match[1])


def _union(spans: SpanArrays, clock: TraceClock) -> Spans:
    begin, end, known = clock.spans(spans.begin, spans.duration)
    return union(begin[known], end[known])


_MEANINGS: Final = {
    "payload": "the payload of {} of its calls: the trace does not record it",
    "own share": "the own share of {} of its all_to_alls: the trace cuts their lists of splits",
    "group": "the group of {} of its calls",
    "call of the host": "what called {} of its communication kernels, which no call of the host launched",
}


def _not_known(calls: KinetoCalls, trace: KinetoTrace, context: Context) -> Iterator[NotKnown]:
    for name, text in _MEANINGS.items():
        if number := calls.not_known[name]:
            yield NotKnown(text.format(f"{number:,}"))
    if not len(context.steps):
        yield NotKnown("its steps: the trace has no ProfilerStep annotations")
    if not len(trace.frames.begin):
        yield NotKnown("its call sites: the profiler ran without with_stack=True")
    else:
        yield NotKnown("the line of a call: call sites are the first lines of their functions")
    if not trace.waits:
        yield NotKnown("when the program waits for a call")
