"""Dumps of PyTorch's NCCL flight recorder, one file per rank: the last calls of a process that hangs or was stopped.

`TORCH_NCCL_TRACE_BUFFER_SIZE` records them, `TORCH_NCCL_DEBUG_INFO_TEMP_FILE` names the files, which are pickles;
`_dump_nccl_trace_json` returns JSON. Pickles may come from strangers: only containers, numbers and texts are read.

The end of a call is when a watchdog looked, not when the call ended. The ring holds the last 2,000 calls by default.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from commtrace.errors import ImportFileError
from commtrace.library_frames import is_wrapper, path_below_packages
from commtrace.schema import Clock, Flag, State

from . import plain_pickle
from .events import MOST_RANKS, Event, ImportedCall, ImportedGroup, ImportedProcess, ImportedSite, NotKnown, Problem
from .json_stream import loads, natural, open_file
from .kineto_sizes import StatedSize, TraceGroups, size_of
from .operation_names import element_type, operation_of

_LARGEST: Final = 1 << 29
_END: Final = 1 << 62
"""Numbers in a dump are below this one: times and numbers of calls fit into 64 bits."""
_RANK: Final = re.compile(r"(\d{1,6})(\.json|\.pkl|\.pickle)?(\.gz)?$")
_MESSAGE: Final = re.compile(r"(?P<op>send|recv) (?P<own>\d{1,7})(->|<-)(?P<peer>\d{1,7})")


def is_flight_recorder(path: Path, head: bytes) -> bool:
    """Return whether a file with these first bytes is a dump of the flight recorder."""
    text = head.lstrip()
    if text.startswith(b"{"):
        return b'"traceEvents"' not in head and (
            b'"pg_config"' in head or b'"nccl_version"' in head or b'"profiling_name"' in head
        )
    return head.startswith(b"\x80") and (b"pg_config" in head or b"profiling_name" in head or b"entries" in head)


def events(path: Path) -> Iterator[Event]:
    """Yield the process of a dump, its calls, and what is not known.

    Raises:
        ImportFileError: The file is not a dump, or cannot be read.
    """
    dump = _load(path)
    rows = dump.get("entries")
    entries = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    groups = _groups(dump.get("pg_config"))
    moments = [moment for row in entries for name in _TIMES if (moment := _time(row, name))]
    alive_ns = max([int(os.stat(path).st_mtime * 1e9), *moments])
    match = _RANK.search(path.name)
    rank = natural(dump.get("rank"), MOST_RANKS)
    rank = int(match[1]) if rank is None and match is not None else rank
    ranks = {rank for group in groups.values() for rank in group.ranks}
    version = dump.get("nccl_version")
    yield ImportedProcess(
        rank=rank,
        world_size=max(ranks) + 1 if ranks else None,
        tool="NCCL flight recorder",
        moment_ns=moments[0] if moments else alive_ns,
        alive_ns=alive_ns,
        facts={"versions": {"nccl": version}} if isinstance(version, str) else {},
    )
    malformed = 0
    for row in entries:
        try:
            call = _call(row, groups, rank)
        except (KeyError, TypeError, ValueError, IndexError, ArithmeticError):
            malformed += 1
            continue
        if call is not None:
            yield call
    yield NotKnown("when the calls ended: a watchdog looked from time to time, so that an end is at or before its time")
    yield NotKnown("when the dump was written: the time of its file is taken")
    yield NotKnown("calls before those in the recorder's ring, and the steps of calls")
    if malformed or len(entries) < len(rows if isinstance(rows, list) else ()):
        yield Problem(f"{malformed:,} entries lack a field or have one of a wrong type", "they are left out")


_TIMES: Final = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")


def _load(path: Path) -> dict[str, Any]:
    try:
        with open_file(path) as file:
            data = file.read(_LARGEST + 1)
    except (OSError, EOFError) as error:
        raise ImportFileError(f"{path}: cannot be read ({error})") from error
    if len(data) > _LARGEST:
        raise ImportFileError(f"{path}: larger than {_LARGEST >> 20} MiB, so it is no dump of the flight recorder")
    try:
        dump = loads(data) if data.lstrip()[:1] == b"{" else plain_pickle.load(data)
    except (ValueError, pickle.UnpicklingError) as error:
        raise ImportFileError(f"{path}: not a dump of the flight recorder ({error})") from error
    if not isinstance(dump, dict):
        raise ImportFileError(f"{path}: not a dump of the flight recorder (no dictionary)")
    return dump


def _groups(config: Any) -> dict[str, ImportedGroup]:
    """Return the process groups by name."""
    rows = [row for row in config.values() if isinstance(row, dict)] if isinstance(config, dict) else []
    named = [
        {"pg_name": _text(row.get("name")), "pg_desc": _text(row.get("desc")), "ranks": row.get("ranks")}
        for row in rows
    ]
    return TraceGroups({"pg_config": named}).by_name


def _call(row: Mapping[str, Any], groups: Mapping[str, ImportedGroup], rank: int | None) -> ImportedCall | None:
    """Return the call of an entry; None for one that is no call, such as the mark of a coalesced group."""
    name = _text(row["profiling_name"]).partition(":")[2]
    message = _MESSAGE.fullmatch(name)
    op = operation_of("barrier" if name.endswith("_barrier") else message["op"] if message is not None else name)
    if not op:
        return None
    listed = row.get("process_group")
    group = groups.get(_text(listed[0])) if isinstance(listed, (list, tuple)) and listed else None
    size = _size(op, row, group, rank)
    completed = _time(row, "time_discovered_completed_ns")
    is_over = row["state"] == "completed"
    return ImportedCall(
        kind=(op, name, "torch", size.dtype, ""),
        group=group,
        payload=size.payload,
        local=size.local,
        seq=None if row.get("is_p2p") else natural(row.get("collective_seq_id"), _END),
        t_begin=_time(row, "time_created_ns"),
        t_return=_time(row, "time_created_ns") if is_over else 0,
        t_end=completed if is_over else 0,
        peer=_peer(message, group),
        clock=Clock.TEST if is_over and completed else Clock.NONE,
        flags=int(size.flags | (Flag.COALESCED if "coalesced" in name else 0)),
        state=State.COMPLETE if is_over else State.BEGUN,
        site=_site(row.get("frames")),
    )


def _size(op: str, row: Mapping[str, Any], group: ImportedGroup | None, rank: int | None) -> StatedSize:
    # On ranks other than the root, a scatter has no input.
    widths = [element_type(_text(name)) for name in row.get("input_dtypes") or row.get("output_dtypes") or ()]
    if op != "barrier" and (len({*widths}) != 1 or not widths[0][1]):
        return StatedSize()
    dtype, width = widths[0] if widths else ("", 0)
    sent, received = (
        sum(prod(int(length) for length in shape) for shape in row.get(f"{name}_sizes") or ()) * width
        for name in ("input", "output")
    )
    ranks = len(group.ranks) if group is not None else 0
    position = group.ranks.index(rank) if group is not None and rank in group.ranks else -1
    if op == "all_to_all":  # entries do not have the splits
        return StatedSize(sent, None, 0, dtype)
    if op == "all_gather" and ranks > 1 and received <= sent:
        # gloo's entries of coalesced all_gathers have one rank's part as output.
        return StatedSize(dtype=dtype)
    return size_of(op, sent, received, [[], []], ranks, position, dtype)


def _peer(message: re.Match[str] | None, group: ImportedGroup | None) -> int:
    """Return the global rank of the other end of a message: names have positions in the group."""
    if message is None or group is None or int(message["peer"]) >= len(group.ranks):
        return -1
    return group.ranks[int(message["peer"])]


def _site(frames: Any) -> ImportedSite | None:
    """Return the innermost Python line outside wrappers."""
    for frame in frames if isinstance(frames, list) else ():
        if isinstance(frame, dict) and _text(frame.get("filename")).endswith(".py"):
            file, function = _text(frame["filename"]), _text(frame.get("name"))
            if not is_wrapper(path_below_packages(file) or file, function):
                return ImportedSite(file, natural(frame.get("line"), _END) or 0, function)
    return None


def _time(row: Mapping[str, Any], name: str) -> int:
    return natural(row.get(name), _END) or 0


def _text(value: Any) -> str:
    """Return a name, which may be a number; "" for anything else."""
    return value if isinstance(value, str) else str(value) if type(value) is int and abs(value) < _END else ""
