"""What DeepSpeed's CommsLogger (`comms_logger` of its configuration) prints and returns.

Four forms:

- The table of `deepspeed.comm.log_summary()`, which rank 0 prints, in a text such as a job's output:

    Comm. Op            Message Size        Count               Total Latency(ms)   Avg Latency(ms)     ...
    broadcast
                        2.0 KB              146                 11.12               0.08                ...

- The lines of `"verbose": true`, one per call, in such a text. They count if they have more calls than its tables:

    ... comm op: all_reduce | time (ms): 0.35 | msg size: 2.0 KB | algbw (Gbps): 0.09 | busbw (Gbps): 0.05

- The dictionary that `log_summary(return_dict=True)` returns, as JSON:
  {"summary": {"broadcast": {"2048": {"count": 146, "total_latency_ms": 11.12, ...}}}, "metadata": {"rank": 0, ...}}
- The dictionary of `comms_logger.get_raw_data()`, as JSON:
  {"broadcast": {"2048": [146, [latencies in ms], [bandwidths], [bus bandwidths]]}}

Errors of CommsLogger, and what is done about them:

- Since DeepSpeed 0.18.3, a latency is the sum of all of its operation so far, because the timer is not reset: ten calls
  of 10 ms are recorded as 10, 20, ... 100 ms (`deepspeed/comm/comm.py`, `elapsed(reset=False)`). In raw data and in
  lines of calls, these sums are in the order of the calls, so that differences undo them. In summaries they are added
  up, which cannot be undone: latencies of summaries are left out.
- Bandwidths are computed with the number of ranks of the world for every group, and those of reduce_scatter with n
  times its size in some versions. They are left out.
- The size is that of the tensor argument: one rank's share for all_gather, gather and scatter, so that the payload is
  not known without the group; and 0 for objects, whose size is not known.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from commtrace.errors import ImportFileError
from commtrace.formatting import format_bytes
from commtrace.schema import Clock, State

from .events import MOST_RANKS, Event, ImportedCall, ImportedProcess, ImportedSite, ImportedTotal, NotKnown, Problem
from .file_names import rank_in_name
from .json_lines import Lines
from .json_stream import loads, natural, open_file, read_head
from .operation_names import UNKNOWN_OPERATION, operation_of

_HEADER: Final = re.compile(rb"Comm\. Op\s+Message Size\s+Count\s+Total Latency\(ms\)")
_STRAGGLERS: Final = re.compile(rb"Breakdown with straggler effect|Comm\. Op\s+Message Size\s+Count\s+Total comm lat")
_ROW: Final = re.compile(r"(?P<size>0B|[\d.]+ [KMGTPEZY]?B)\s+(?P<count>\d+)\s+(?P<total>[\d.]+)(\s+[\d.]+){2,3}")
_CALL: Final = re.compile(
    rb"comm op: (?P<record>[^|]{1,200}?(?: \| \[Caller Func: [^\]]*\])?) \| time \(ms\): (?P<ms>[\d.]{1,20}) \| "
    rb"msg size: (?P<size>0B|[\d.]{1,20} [KMGTPEZY]?B) \| algbw \(Gbps\): (?P<bandwidth>[\d.]{1,20})"
)
_NAME: Final = re.compile(r"(?P<name>[A-Za-z_]\w*)(?: \| \[Caller Func: (?P<caller>[^\]]*)\])?")
_RAW: Final = re.compile(rb'\s*\{\s*"[^"]{1,300}"\s*:\s*\{\s*"\d+"\s*:\s*\[\s*\d+\s*,\s*\[')
_UNITS: Final = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")

_LARGEST_FILE: Final = 1 << 28
_LARGEST: Final = 1 << 50
_MOST_CALLS: Final = (1 << 32) - 1
_LONGEST_MS: Final = 1e9

_OPERATIONS: Final = {
    "inference_all_reduce": "all_reduce",
    "log_summary_barrier": "barrier",
    "broadcast_object_list": "broadcast",
    "all_gather_object": "all_gather",
}
"""DeepSpeed's names that are not spellings of an operation."""
_SHARES: Final = ("all_gather", "gather", "scatter")
"""Operations of which CommsLogger records one rank's share."""
_CERTAIN_BITS: Final = 10.0
"""Latencies are cumulative if plain ones would be in this order with a probability of less than 2 ** -10."""


def is_comms_logger(path: Path, head: bytes) -> bool:
    """Return whether a file with these first bytes has a summary, calls or raw data of CommsLogger."""
    return _is_text(head) or b'"busbw_avg_gbps"' in head or _RAW.match(head) is not None


def _is_text(head: bytes) -> bool:
    """Return whether these bytes have lines that CommsLogger prints."""
    return _HEADER.search(head) is not None or _CALL.search(head) is not None


class _LoggedSize(NamedTuple):
    """Operation as CommsLogger names it, with its caller if it logs callers, and size in bytes."""

    record: str
    size: int


@dataclass
class _LoggedCalls:
    """Calls of one operation and size.

    Attributes:
        count: Number of calls.
        total_ms: Sum of what CommsLogger calls their latencies.
        is_exact: Whether the size is not rounded.
        latencies_ms: What CommsLogger calls their latencies, if it lists them.
        bandwidths: Its bandwidths of them, in the order in which it lists them.
    """

    count: int
    total_ms: float = 0.0
    is_exact: bool = True
    latencies_ms: list[float] = field(default_factory=list)
    bandwidths: list[float] = field(default_factory=list)


@dataclass
class _LoggedFile:
    """What a file has: entries, how many of its items are none, and what it says of its process."""

    entries: dict[_LoggedSize, _LoggedCalls] = field(default_factory=dict)
    unusable: int = 0
    summaries: int = 0
    is_raw: bool = False
    """Whether it lists the latency of each call."""
    is_rounded: bool = False
    """Whether these latencies are rounded to 0.01 ms."""
    rank: int | None = None
    world_size: int | None = None
    cut: str = ""


def events(path: Path) -> Iterator[Event]:
    """Yield the process of a file, its calls, and what is not known.

    Raises:
        ImportFileError: The file cannot be read, or has no summary and no raw data of CommsLogger.
    """
    with _errors_of(path):
        head = read_head(path, 1 << 16)
    is_json = head.lstrip()[:1] == b"{" and not _is_text(head)
    logged = _read_json(path) if is_json else _read_text(path)
    if not logged.entries:
        raise ImportFileError(
            f"{path}: no call of DeepSpeed's CommsLogger in it; the output of deepspeed.comm.log_summary() is needed, "
            'or that of "verbose": true, or as JSON what log_summary(return_dict=True) or comms_logger.get_raw_data() '
            "returns"
        )
    yield ImportedProcess(logged.rank, world_size=logged.world_size, tool="DeepSpeed CommsLogger", clock_is_wall=False)
    is_cumulative = _is_cumulative(logged.entries) if logged.is_raw else None
    durations = _durations(logged.entries, is_cumulative)
    for key, entry in logged.entries.items():
        call = _call(key)
        yield ImportedTotal(call, entry.count, entry.is_exact, to_completion_ns=durations.get(key, ()))
    yield from _not_known(logged, is_cumulative)
    if logged.cut:
        yield Problem(logged.cut, "what follows is missing", "cut")
    if logged.unusable:
        yield Problem(f"{logged.unusable:,} of its rows lack a number or have an impossible one", "they are left out")


def _call(key: _LoggedSize) -> ImportedCall:
    name, caller = _record_name(key.record)
    op = _operation(name)
    payload = 0 if op == "barrier" else None if op in (*_SHARES, UNKNOWN_OPERATION) or not key.size else key.size
    # Without the group, nothing tells which part of an all_to_all or reduce_scatter is the rank's own.
    return ImportedCall(
        kind=(op, name, "torch", "", ""),
        payload=payload,
        local=None if op in ("all_to_all", "reduce_scatter") else 0,
        clock=Clock.WAIT,
        state=State.UNOBSERVABLE,
        site=ImportedSite(function=caller) if caller else None,
    )


def _record_name(record: str) -> tuple[str, str]:
    """Return the name of an operation and the function that called it ("" where it is not logged)."""
    match = _NAME.fullmatch(record)
    return (match["name"], match["caller"] or "") if match is not None else (record[:80], "")


def _operation(name: str) -> str:
    return _OPERATIONS.get(name) or operation_of(name) or UNKNOWN_OPERATION


# ---- reading ---------------------------------------------------------------------------------------------------------


def _read_text(path: Path) -> _LoggedFile:
    """Read the tables in a text. Later summaries have all calls of earlier ones, unless the log was reset between."""
    logged, tables, lines = _LoggedFile(), [], Lines(path)
    table: dict[_LoggedSize, _LoggedCalls] | None = None
    prefix, record, before = b"", "", ""
    calls: dict[_LoggedSize, _LoggedCalls] = {}
    for _, line in lines:
        if called := _CALL.search(line):
            logged.unusable += not _add_call(calls, called)
            continue
        if match := _HEADER.search(line):
            table, prefix, record, before = {}, line[: match.start()], "", ""
            tables.append(table)
        elif _STRAGGLERS.search(line):
            table = None
        if table is None or match:
            continue
        text = line.removeprefix(prefix.strip()).strip().decode("utf-8", "replace")
        row = _ROW.fullmatch(text)
        if row is None:
            before = text if _NAME.fullmatch(text) else ""
            if before and _operation(_record_name(before)[0]) != UNKNOWN_OPERATION:
                record = before
            continue
        record, before = before or record, ""
        size, count, total = _size(row["size"]), int(row["count"][:20]), _number(row["total"])
        if not record or size is None or total is None or not 0 < count <= _MOST_CALLS:
            logged.unusable += 1
            continue
        table[_LoggedSize(record, size)] = _LoggedCalls(count, total, is_exact=_is_exact(row["size"]))
    logged.summaries, logged.cut, logged.rank = len(tables), lines.problem, 0
    logged.entries = _joined(tables)
    if _count(calls) > _count(logged.entries):
        logged.entries, logged.is_raw, logged.is_rounded = calls, True, True
    return logged


def _count(entries: Mapping[_LoggedSize, _LoggedCalls]) -> int:
    return sum(entry.count for entry in entries.values())


def _add_call(calls: dict[_LoggedSize, _LoggedCalls], line: re.Match[bytes]) -> bool:
    """Add the call of a line. Return whether its numbers are usable."""
    text = {name: value.decode("utf-8", "replace") for name, value in line.groupdict().items()}
    size, latency, bandwidth = _size(text["size"]), _latency_ms(text["ms"]), _number(text["bandwidth"])
    if size is None or latency is None or bandwidth is None:
        return False
    key = _LoggedSize(text["record"], size)
    entry = calls.setdefault(key, _LoggedCalls(0, is_exact=_is_exact(text["size"])))
    entry.count, entry.total_ms = entry.count + 1, entry.total_ms + latency
    entry.latencies_ms.append(latency)
    entry.bandwidths.append(bandwidth)
    return True


def _joined(tables: Sequence[dict[_LoggedSize, _LoggedCalls]]) -> dict[_LoggedSize, _LoggedCalls]:
    """Return the entries of consecutive summaries. One that continues the one before it replaces it."""
    kept: list[dict[_LoggedSize, _LoggedCalls]] = []
    for table in tables:
        if kept and _continues(table, kept[-1]):
            kept[-1] = table
        else:
            kept.append(table)
    entries: dict[_LoggedSize, _LoggedCalls] = {}
    for table in kept:
        for key, entry in table.items():
            known = entries.setdefault(key, _LoggedCalls(0, is_exact=entry.is_exact))
            known.count, known.total_ms = min(_MOST_CALLS, known.count + entry.count), known.total_ms + entry.total_ms
    return entries


def _continues(table: Mapping[_LoggedSize, _LoggedCalls], earlier: Mapping[_LoggedSize, _LoggedCalls]) -> bool:
    """Return whether a summary has all calls of an earlier one: no count and no sum of latencies is smaller."""
    return all(
        key in table and table[key].count >= entry.count and table[key].total_ms >= entry.total_ms
        for key, entry in earlier.items()
    )


def _read_json(path: Path) -> _LoggedFile:
    with _errors_of(path), open_file(path) as file:
        data = file.read(_LARGEST_FILE + 1)
    if len(data) > _LARGEST_FILE:
        raise ImportFileError(f"{path}: larger than {_LARGEST_FILE >> 20} MiB; save the data more often, after a reset")
    try:
        document = loads(data)
    except ValueError as error:
        raise ImportFileError(f"{path}: not JSON ({error}); save what DeepSpeed returns with json.dump") from error
    document = document if isinstance(document, dict) else {}
    logged = _LoggedFile(rank=rank_in_name(path), is_raw="summary" not in document)
    metadata, records = document.get("metadata"), document if logged.is_raw else document["summary"]
    if isinstance(metadata, dict):
        rank, world_size = (natural(metadata.get(name), MOST_RANKS) for name in ("rank", "world_size"))
        logged.rank = rank if rank is not None else logged.rank
        logged.world_size = world_size or None
    for record, sizes in records.items() if isinstance(records, dict) else ():
        for size, content in sizes.items() if isinstance(sizes, dict) else ():
            entry = _raw_entry(content) if logged.is_raw else _summary_entry(content)
            if entry is None or not re.fullmatch(r"\d{1,15}", size):
                logged.unusable += 1
            else:
                logged.entries[_LoggedSize(str(record), int(size))] = entry
        logged.unusable += not isinstance(sizes, dict)
    return logged


def _summary_entry(content: Any) -> _LoggedCalls | None:
    count = natural(content.get("count")) if isinstance(content, dict) else None
    return _LoggedCalls(count) if count is not None and 0 < count <= _MOST_CALLS else None


def _raw_entry(content: Any) -> _LoggedCalls | None:
    match content:
        case [int(count), list(latencies), list(bandwidths), *_] if 0 < count <= _MOST_CALLS:
            known_ms = [ms for value in latencies if (ms := _latency_ms(value)) is not None]
            return _LoggedCalls(count, latencies_ms=known_ms if len(known_ms) == count else [], bandwidths=bandwidths)
    return None


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Raise what reading a file raises as an ImportFileError."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise ImportFileError(f"{path}: cannot be read ({error})") from error


def _size(text: str) -> int | None:
    """Return the bytes in a text of DeepSpeed's `convert_size`, such as "678.86 MB"; None for an impossible one."""
    if text == "0B":
        return 0
    number, unit = text.split()
    value = _number(number)
    size = value * 1024 ** _UNITS.index(unit) if value is not None else math.inf
    return round(size) if size < _LARGEST else None


def _number(value: Any) -> float | None:
    """Return a number, or the number in a text; None if it is none, negative or impossibly large."""
    try:
        number = float(value) if type(value) in (int, float, str) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if 0 <= number < _LARGEST else None


def _latency_ms(value: Any) -> float | None:
    """Return a latency; None for an impossible one."""
    number = _number(value)
    return number if number is not None and number < _LONGEST_MS else None


def _is_exact(size: str) -> bool:
    """Return whether a text of `convert_size` is not rounded."""
    return size.endswith((" B", "0B"))


# ---- latencies -------------------------------------------------------------------------------------------------------


def _is_cumulative(entries: Mapping[_LoggedSize, _LoggedCalls]) -> bool | None:
    """Return whether the latencies of raw data are sums of all before; None if the data do not tell.

    Sums ascend. Lists of latencies that ascend by chance are improbable, unless some version of DeepSpeed has sorted
    them: it then sorted the bandwidths too, and these no longer descend where the latencies ascend.
    """
    bits = 0.0
    for entry in entries.values():
        latencies = entry.latencies_ms
        if any(later < earlier for earlier, later in pairwise(latencies)):
            return False
        bandwidths = [number for value in entry.bandwidths if (number := _number(value)) is not None]
        descends = all(later <= earlier for earlier, later in pairwise(bandwidths))
        if len(bandwidths) == len(latencies) and descends and len({*bandwidths}) > 1:
            bits += math.lgamma(len(latencies) + 1) / math.log(2)
    calls = Counter[str]()
    for key, entry in entries.items():
        calls[key.record] += entry.count
    if max(calls.values(), default=0) == 1:  # a sum of one latency is the latency
        return False
    return True if bits >= _CERTAIN_BITS else None


def _durations(entries: Mapping[_LoggedSize, _LoggedCalls], is_cumulative: bool | None) -> dict[_LoggedSize, list[int]]:
    """Return the durations of the calls in ns, where they are known.

    A timer counts all sizes of an operation together. The difference between its first value and 0 is not the
    duration of the first call if the log, but not the timer, was reset before, so it is left out.
    """
    if is_cumulative is None:
        return {}
    if not is_cumulative:
        return {key: [round(ms * 1e6) for ms in entry.latencies_ms] for key, entry in entries.items()}
    durations: dict[_LoggedSize, list[int]] = {key: [] for key in entries}
    for record in {key.record for key in entries}:
        of_record = {key: entry for key, entry in entries.items() if key.record == record}
        if not all(entry.latencies_ms for entry in of_record.values()):
            continue
        sums = sorted((ms, key) for key, entry in of_record.items() for ms in entry.latencies_ms)
        for (before, _), (after, key) in pairwise(sums):
            durations[key].append(round((after - before) * 1e6))
    return durations


# ---- what is not known -----------------------------------------------------------------------------------------------


def _not_known(logged: _LoggedFile, is_cumulative: bool | None) -> Iterator[NotKnown]:
    if not logged.is_raw:
        yield NotKnown(
            "how long its calls took: since DeepSpeed 0.18.3, latencies of a summary are sums of sums, which cannot be "
            "undone; comms_logger.get_raw_data() has latencies that can"
        )
    elif is_cumulative is None:
        yield NotKnown("how long its calls took: the data do not tell whether latencies are sums of all calls before")
    elif is_cumulative:
        yield NotKnown(
            "how long the first call of each operation took: DeepSpeed records sums of all latencies so far, of which "
            "the log has the differences"
        )
    if logged.is_rounded:
        yield NotKnown("how long its calls took to less than 0.01 ms, to which CommsLogger rounds what it prints")
    yield NotKnown(
        "the groups of its calls, and with them wire bytes and bandwidths: CommsLogger takes the world for each group, "
        "so its bandwidths are left out"
    )
    shares = {key: entry for key, entry in logged.entries.items() if _call(key).kind[0] in _SHARES and key.size}
    if shares:
        total = sum(key.size * entry.count for key, entry in shares.items())
        operations = ", ".join(sorted({_call(key).kind[0] for key in shares}))
        calls = sum(entry.count for entry in shares.values())
        yield NotKnown(
            f"the payload of its {calls:,} calls of {operations}: their sizes in the file, {format_bytes(total)} in "
            "all, are of one rank's share"
        )
    unknown = Counter[str]()
    for key, entry in logged.entries.items():
        op, name, *_ = _call(key).kind
        if op == UNKNOWN_OPERATION or (not key.size and op != "barrier"):
            unknown[name] += entry.count
    if unknown:
        yield NotKnown(f"the payload of its {sum(unknown.values()):,} calls of {', '.join(sorted(unknown)[:5])}")
    if any(not entry.is_exact for entry in logged.entries.values()):
        yield NotKnown("exact sizes: the table rounds them to two decimals of KB, MB or GB")
    if logged.summaries > 1:
        yield NotKnown(
            f"which of the {logged.summaries:,} summaries in the file have the same calls: one without a smaller count "
            "than the one before is taken as its continuation"
        )
    yield NotKnown("when its calls were, their order, steps, element types and peers")
    yield NotKnown(
        "calls that did not go through deepspeed.comm: those of torch.distributed, DDP, tensor parallelism of other "
        "libraries and compiled programs, and those before the logger was configured"
    )
