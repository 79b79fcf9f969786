"""Reports of mpiP (`app.NPROCS.PID.1.mpiP`): statistics of MPI calls by call site and rank, one text for all ranks.

    @ mpiP
    @ MPI Task Assignment      : 0 node1
    @--- Callsites: 9 ---------------------------------------------------------
     ID Lev File/Address        Line Parent_Funct             MPI_Call
      1   0 sweep-mpi.c           24 main                     Allreduce
      9   0 0x405c08                 [unknown]                Isend
    @--- Callsite Time statistics (all, milliseconds): 62 ---------------------
    Name              Site Rank  Count      Max     Mean      Min   App%   MPI%
    Allreduce            1    0    247    0.077    0.013    0.004   0.02   0.03
    Allreduce            1    *    988    0.082    0.012    0.004   0.02   0.03
    @--- Callsite Message Sent statistics (all, sent bytes) -------------------
    Name              Site Rank   Count       Max      Mean       Min       Sum
    Allreduce            1    0     247         8         8         8      1976

It has maximum, mean and minimum of times and sizes, and no single calls: the log is a summary without times. The lines
with rank "*" are sums over ranks. Sizes of several calls are a mean, and have four digits. The bytes that mpiP counts
are the payload for allreduce, reduce, bcast and sends; of other collectives, they depend on the communicator, which it
does not record.

Source: LLNL/mpiP, report.c and doc/mpiP.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from commtrace.errors import ImportFileError
from commtrace.schema import State

from .events import Event, ImportedCall, ImportedProcess, ImportedSite, ImportedTotal, NotKnown, Problem
from .json_lines import Lines
from .operation_names import operation_of

_ASSIGNMENT: Final = re.compile(r"@ MPI Task Assignment\s*:\s*(\d{1,7})\s+(\S+)")
_VERSION: Final = re.compile(r"@ Version\s*:\s*(\S+)")
_SECTION: Final = re.compile(r"@--- (?P<title>\D+?)\s*(?:\(|:|-{3}|$)")
_SITE: Final = re.compile(
    r"(?P<id>\d{1,9})\s+(?P<level>\d{1,4})\s+(?P<file>\S+)\s+(?:(?P<line>\d{1,9})\s+)?(?P<function>\S+)(?:\s+(?P<call>\w+))?"
)
_TIME: Final = re.compile(
    r"(?P<name>\w+)\s+(?P<site>\d{1,9})\s+(?P<rank>\d{1,7}|\*)\s+(?P<count>\d{1,18})(\s+[\d.e+-]+){3}.*"
)
_SENT: Final = re.compile(
    r"(?P<name>\w+)\s+(?P<site>\d{1,9})\s+(?P<rank>\d{1,7}|\*)\s+(?P<count>\d{1,18})\s+(?P<max>\S+)\s+\S+\s+(?P<min>\S+)\s+"
    r"(?P<sum>\S+)"
)
_TITLES: Final = {
    "Callsites": "sites", "Callsite Time statistics": "times", "Callsite Message Sent statistics": "sent",
}  # fmt: skip
_PAYLOADS: Final = ("all_reduce", "reduce", "broadcast", "send")
"""Operations whose sent bytes are the payload."""
_MOST_ENTRIES: Final = 1 << 22
_MOST_CALLS: Final = (1 << 32) - 1
_LARGEST: Final = 1 << 50


def is_mpip(path: Path, head: bytes) -> bool:
    """Return whether a file with these first bytes is a report of mpiP."""
    return head.lstrip().startswith(b"@ mpiP") or b"\n@--- Callsite" in head


@dataclass
class _SiteCalls:
    """Calls of one rank at one call site, and of those with a size: number, sum of bytes, and whether all are equal."""

    name: str
    count: int
    sized: int = 0
    sum_bytes: float = 0.0
    is_equal: bool = True


@dataclass
class _Report:
    """What a report has."""

    hosts: dict[int, str] = field(default_factory=dict)
    sites: dict[int, ImportedSite] = field(default_factory=dict)
    calls: dict[tuple[int, int, str], _SiteCalls] = field(default_factory=dict)
    """By rank, number of the call site and name of the function."""
    version: str = ""
    unusable: int = 0
    problem: str = ""


def events(path: Path) -> Iterator[Event]:
    """Yield the processes of a report, their calls, and what is not known.

    Raises:
        ImportFileError: The file cannot be read, or has no statistics by rank.
    """
    report = _read(path)
    if not report.calls:
        raise ImportFileError(
            f"{path}: no 'Callsite Time statistics' of ranks in it; record without -c in MPIP, which leaves them out"
        )
    by_rank: dict[int, list[tuple[int, _SiteCalls]]] = {}
    for (rank, site, _), calls in report.calls.items():
        by_rank.setdefault(rank, []).append((site, calls))
    others = {calls.name for calls in report.calls.values() if not _operation(calls.name)}
    for rank, entries in by_rank.items():
        yield ImportedProcess(
            rank, world_size=len(report.hosts) or None, host=report.hosts.get(rank, ""), tool="mpiP",
            clock_is_wall=False, facts={"versions": {"mpiP": report.version}} if report.version else {},
        )  # fmt: skip
        for site, calls in entries:
            if op := _operation(calls.name):
                yield from _totals(op, calls, report.sites.get(site))
        yield from _not_known(others)
    if report.problem:
        yield Problem(report.problem, "what follows is missing", "cut")
    if report.unusable:
        yield Problem(
            f"{report.unusable:,} lines of its tables lack a number or have an impossible one", "they are left out"
        )


def _totals(op: str, calls: _SiteCalls, site: ImportedSite | None) -> Iterator[ImportedTotal]:
    """Yield the calls of a rank at a call site: those with a size, and the others."""
    kind = (op, calls.name, "mpi", "", "")
    sized = min(calls.sized, calls.count) if op in _PAYLOADS else 0
    if sized:
        payload = round(calls.sum_bytes / calls.sized)
        is_exact = calls.is_equal and payload < 10_000  # larger numbers are rounded to four digits
        yield ImportedTotal(
            ImportedCall(kind, payload=payload, state=State.UNOBSERVABLE, site=site), sized, is_exact
        )  # fmt: skip
    if calls.count > sized:
        payload_of_others = 0 if op == "barrier" else None
        call = ImportedCall(kind, payload=payload_of_others, state=State.UNOBSERVABLE, site=site)
        yield ImportedTotal(call, calls.count - sized)


def _operation(name: str) -> str:
    """Return the operation of an MPI function, without "MPI_"; "" for one that is no communication, such as Wait."""
    plain = name.lower()
    if plain in ("ssend", "bsend", "rsend", "issend", "ibsend", "irsend"):
        return "send"
    for candidate in (
        plain,
        plain.removeprefix("i"),
        plain.removesuffix("v"),
        plain.removeprefix("i").removesuffix("v"),
    ):
        if op := operation_of(candidate):
            return op
    return ""


def _read(path: Path) -> _Report:
    report, section, lines = _Report(), "", Lines(path)
    for _, raw in lines:
        line = raw.decode("utf-8", "replace")
        if line.startswith("@"):
            title = _SECTION.match(line)
            section = _TITLES.get(title["title"].strip(), "") if title is not None else section
            if match := _ASSIGNMENT.match(line):
                report.hosts[int(match[1])] = match[2][:200]
            elif match := _VERSION.match(line):
                report.version = match[1][:40]
        elif section and line[0].isalnum() and not line.startswith(("ID ", "Name ")):
            report.unusable += not _READERS[section](report, line)
        if len(report.calls) > _MOST_ENTRIES:
            report.problem = f"more than {_MOST_ENTRIES:,} pairs of call site and rank"
            return report
    report.problem = lines.problem
    return report


def _read_site(report: _Report, line: str) -> bool:
    match = _SITE.fullmatch(line)
    if match is None:
        return False
    if match["level"] == "0":
        is_address = match["file"].startswith("0x")
        function = "" if match["function"] == "[unknown]" else match["function"]
        file = "" if is_address else match["file"]
        report.sites[int(match["id"])] = ImportedSite(file, int(match["line"] or 0), function or match["file"])
    return True


def _read_times(report: _Report, line: str) -> bool:
    match = _TIME.fullmatch(line)
    if match is None or (match["rank"] != "*" and not 0 < int(match["count"]) <= _MOST_CALLS):
        return False
    if match["rank"] != "*":
        name = match["name"]
        report.calls[int(match["rank"]), int(match["site"]), name] = _SiteCalls(name, int(match["count"]))
    return True


def _read_sent(report: _Report, line: str) -> bool:
    match = _SENT.fullmatch(line)
    if match is None:
        return False
    if match["rank"] == "*":
        return True
    calls = report.calls.get((int(match["rank"]), int(match["site"]), match["name"]))
    try:
        total = float(match["sum"])
    except ValueError:
        return False
    count = int(match["count"])
    if calls is None or not 0 < count <= _MOST_CALLS or not 0 <= total / count < _LARGEST:
        return False
    calls.sized, calls.sum_bytes, calls.is_equal = count, total, match["max"] == match["min"]
    return True


_READERS: Final = {"sites": _read_site, "times": _read_times, "sent": _read_sent}


def _not_known(others: set[str]) -> Iterator[NotKnown]:
    yield NotKnown("times of single calls: mpiP has their maximum, mean and minimum by call site and rank")
    yield NotKnown("the communicators of its calls, and with them wire bytes, and the payload of other collectives")
    yield NotKnown("exact sizes: mpiP has means by call site and rank, of four digits, and none of receives")
    yield NotKnown("when its calls were, their order, steps, element types and peers")
    if others:
        yield NotKnown(f"its calls of {', '.join(sorted(others)[:8])}, for which commtrace has no operation")
