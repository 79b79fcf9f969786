"""Recovery of records that killed processes left in shared memory.

A ring whose lock is free belongs to no live process. Its records that are not on disk yet become a separate segment,
its tables are completed, then it is removed. Every step can be repeated: a recovery that is itself killed loses
nothing, and does not count records twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace import identity
from commtrace.rank_ranges import rank_ranges, select_steps
from commtrace.schema import RECORD, WITHOUT_RECORD, Records
from commtrace.summary_format import TABLES

from . import ring
from .kept_records import in_flight, write_kept
from .ring import RingContent
from .segment_writer import EMPTY, HEADER_BYTES, read_rows, write_segment
from .summary_files import append_rows, count_calls, table_path

DEFAULT_SHM: Final = "/dev/shm"
STALE_SECONDS: Final = 60

# Fields that never change after a call has begun. They identify it: a thread begins one call at a time.
_KEY_FIELDS: Final = ["t_begin", "thread", "kind", "group", "seq"]

_recovering: Final = threading.Lock()  # the lock on a ring does not exclude other threads of the process


class Recovery(NamedTuple):
    """What became of the records that a dead process left in shared memory.

    Attributes:
        ring: The file in shared memory.
        stem: First part of the names of the process's files in the log.
        host: Its host.
        records: Number of its records that are in the log now.
        error: Why they could not be moved there; "" if they were.
    """

    ring: Path
    stem: str
    host: str
    records: int = 0
    error: str = ""


def recover_records(log_directory: Path, *, shm: str | None = None) -> list[Recovery]:
    """Move records that dead processes of this host left in shared memory to their log.

    Never raises OSError: records that cannot be moved stay in shared memory.

    Args:
        log_directory: The log directory (COMMTRACE), or the folder of a run or host in it.
        shm: Folder of the rings. None: COMMTRACE_SHM, or /dev/shm.

    Returns:
        What became of the records of each ring.
    """
    folder = shm or os.environ.get("COMMTRACE_SHM") or DEFAULT_SHM
    target = os.path.realpath(log_directory)
    with _recovering:
        recoveries = [_recover_ring(path, target) for path in ring.other_rings(folder)]
        _remove_unfinished(folder)
    return [recovery for recovery in recoveries if recovery is not None]


def copy_rings(log_directory: Path, most_records: int | None = None) -> dict[Path, RingContent]:
    """Copy the rings of processes of this host that belong to a log, live or killed, without changing them.

    Args:
        log_directory: The log.
        most_records: Number of records of all live processes to copy: the newest of each, and besides those of calls in
            flight. None: all.

    Returns:
        The copies by the path of each process's tables in the log, which may be missing.
    """
    target = os.path.realpath(log_directory)
    copies: dict[Path, RingContent] = {}
    paths = ring.other_rings(os.environ.get("COMMTRACE_SHM") or DEFAULT_SHM)
    paths = [path for path in paths if _belongs_to(ring.identity_of(path), target)]
    for path in paths:
        if (copy := ring.copy_ring(path)) is not None:
            if most_records is not None and copy.is_alive and not copy.kept_count:
                copy = _newest(copy, most_records // len(paths))
            names = (str(copy.identity[name]) for name in ("run", "host"))
            folder = Path(os.path.realpath(copy.identity["directory"]), *names)
            with contextlib.suppress(OSError):
                if copy.is_alive or _made_calls(copy, folder):
                    stem = copy.identity["stem"] if copy.is_alive else _stem(copy, folder)
                    copies[folder / f"{stem}.jsonl"] = copy
    return copies


def _newest(content: RingContent, count: int) -> RingContent:
    """Return a copy of a ring with `count` of its records, the newest, and those of calls in flight."""
    begins = content.records["t_begin"]
    if (rest := len(begins) - count) <= 0:
        return content
    wanted = in_flight(content.records)
    wanted[np.argpartition(begins, rest)[rest:]] = True
    return content._replace(records=content.records[wanted], left_out=int((~wanted).sum()))


def _recover_ring(path: Path, target: str) -> Recovery | None:
    # Lock only rings of this log: a recovery of another log would take a locked ring for a live process's.
    identity_of_ring = ring.identity_of(path)
    if not _belongs_to(identity_of_ring, target):
        return None
    try:
        with ring.lock_dead(path) as content:
            return None if content is None else _move_to_log(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not path.exists():
            return None  # its process, or another recovery, removed it meanwhile
        return Recovery(path, str(identity_of_ring["stem"]), str(identity_of_ring["host"]), error=str(error))


def _belongs_to(identity_of_ring: dict[str, Any], target: str) -> bool:
    names = [str(identity_of_ring.get(name, "")) for name in ("run", "host", "stem")]
    if not all(name == os.path.basename(name) and name.strip(".") for name in names):
        return False  # a path in a name would lead out of the log directory
    directory = os.path.realpath(str(identity_of_ring.get("directory", "")))
    # The target is a log directory, a run in it, or the folder of one host.
    return target in (directory, os.path.join(directory, names[0]), os.path.join(directory, *names[:2]))


def _move_to_log(content: RingContent) -> Recovery | None:
    host = str(content.identity["host"])
    folder = Path(content.identity["directory"]) / content.identity["run"] / host
    if not _made_calls(content, folder):
        ring.remove_files(content.path)
        return None
    folder.mkdir(parents=True, exist_ok=True)
    stem = _stem(content, folder)
    recovered = folder / f"{stem}.salvaged.npy"
    # Left by an earlier attempt; its records must not count as being on disk.
    (folder / (recovered.name + ".open")).unlink(missing_ok=True)
    # A process may die between writing records and freeing their slots: take only those that no segment has.
    recent = _last_records(folder, stem, content.capacity)
    snapshot = content.snapshot
    records, kept, left_out = split_kept(content)
    is_summary = content.identity.get("mode") == "summary"
    records = records[~are_among(records, recent)]
    if len(records) and not recovered.exists():
        write_segment(recovered, records)
    for table, dtype in TABLES.items() if is_summary else ():
        path = table_path(folder, stem, table)
        rows = len(read_rows(path, dtype))
        # Fewer if the file was removed meanwhile; all if the snapshot was, which is written before any row.
        written = min(snapshot.written[table], rows) if snapshot.calls else rows
        append_rows(path, dtype, written, snapshot.rows[table])
    write_kept(folder, stem, kept)
    number = _count_records(recovered)
    _complete_tables(content, folder, stem, number, left_out)
    ring.remove_files(content.path)
    return Recovery(content.path, stem, host, number)


def _made_calls(content: RingContent, folder: Path) -> bool:
    """Return whether a process wrote anything. It may be killed before its first call."""
    return (
        len(content.records) > 0 or b"\n" in content.tables or (folder / f"{content.identity['stem']}.jsonl").exists()
    )


def _stem(content: RingContent, folder: Path) -> str:
    """Return the stem of the process's files, or a new one if it has no files and another process uses the name."""
    stem = str(content.identity["stem"])
    path, ours = folder / f"{stem}.jsonl", content.tables.partition(b"\n")[0]
    if not path.exists() or not ours:
        return stem
    with open(path, "rb") as file:
        theirs = file.readline().rstrip(b"\n")
    if theirs in (b"", ours):
        return stem
    head, _, pid = stem.rpartition("-")
    return f"{head}-{content.path.stem.rpartition('-')[2]}-{pid}"


def _last_records(folder: Path, stem: str, count: int) -> Records:
    """Return at least the last `count` records in the segments of a process."""
    blocks: list[Records] = [EMPTY]
    for path in sorted(folder.glob(f"{stem}.*.npy*"), reverse=True):
        blocks.append(read_rows(path))
        if path.suffixes[-2:] != [".salvaged", ".npy"]:
            count -= len(blocks[-1])
        if count <= 0:
            break
    return np.concatenate(blocks)


def are_among(records: Records, others: Records) -> npt.NDArray[np.bool_]:
    """Return whether each record is of a call that other records of the same process have, shape (n,)."""
    found: npt.NDArray[np.bool_] = np.isin(records["t_begin"], others["t_begin"])
    if found.any():  # mostly few: comparing all keys would take far longer
        near = others[np.isin(others["t_begin"], records["t_begin"])]
        found[found] = np.isin(record_keys(records[found]), record_keys(near))
    return found


def record_keys(records: Records) -> npt.NDArray[Any]:
    """Return a sortable key for each record, shape (n,), different for any two calls of a process."""
    packed = np.zeros(len(records), [(name, RECORD[name].newbyteorder(">")) for name in _KEY_FIELDS])
    for name in _KEY_FIELDS:
        packed[name] = records[name]
    return packed.view(f"S{packed.itemsize}")


def _count_records(path: Path) -> int:
    try:
        return max(0, path.stat().st_size - HEADER_BYTES) // RECORD.itemsize
    except FileNotFoundError:
        return 0


def split_kept(content: RingContent) -> tuple[Records, Records, int]:
    """Split the records of a ring by where they belong.

    Returns:
        The records for the log, all kept records, and the number of newly kept ones whose step is not selected.
    """
    records, kept = content.records, content.kept
    new = records[~are_among(records, kept)]
    if content.identity.get("mode") == "summary":
        # Kept records are in the summary, except those after the snapshot.
        records = np.concatenate([kept[max(0, len(kept) - (content.kept_count - content.snapshot.calls)) :], new])
    selected = select_steps(records["step"], rank_ranges(str(content.identity.get("steps", ""))))
    left_out = ~(selected | in_flight(records))
    kept = np.concatenate([kept, new[~in_flight(new)]]) if content.kept_count else kept
    return records[~left_out], kept, int(are_among(records[left_out], new).sum())


def final_counters(content: RingContent, *, on_disk: int, left_out: int, summarized: int) -> dict[str, Any]:
    """Return the row `stats` of a process that was killed.

    Args:
        content: Its ring.
        on_disk: Number of records in its segments and in `content`.
        left_out: Number of records whose step is not selected, which are in `content` only.
        summarized: Number of calls in its summary.
    """
    counters = {**dict.fromkeys(WITHOUT_RECORD, 0), "not_selected": 0, **content.counters}
    counters["not_selected"] += left_out
    if content.identity.get("mode") == "summary":  # kept records were overwritten before they were summarized
        counters["lost"] += max(0, content.kept_count - content.snapshot.calls - len(content.kept))
    counters["summarized"] = summarized
    # The counters did not change between their last write and the last turn of the drain thread.
    counters["mono_ns"] = max(int(counters.get("mono_ns", 0)), content.alive_ns)
    counters["calls"] = on_disk + sum(counters[name] for name in (*WITHOUT_RECORD, "not_selected", "summarized"))
    return counters


def _complete_tables(content: RingContent, folder: Path, stem: str, recovered: int, left_out: int) -> None:
    path = folder / f"{stem}.jsonl"
    # The copy in memory is ahead of the file, unless memory was full. No record refers to a truncated last line.
    longest = max(content.tables, path.read_bytes() if path.exists() else b"", key=len)
    lines = longest[: longest.rfind(b"\n") + 1]
    if b'{"table": "salvage"' in lines:
        return
    tables = (read_rows(table_path(folder, stem, name), TABLES[name]) for name in ("cells", "steps"))
    counters = final_counters(
        content,
        on_disk=sum(map(_count_records, folder.glob(f"{stem}.*.npy*"))),
        left_out=left_out,
        summarized=count_calls(*tables),
    )
    note = {"table": "salvage", "records": recovered, "host": identity.host(), "unix_ns": time.time_ns()}
    added = [json.dumps(row).encode() + b"\n" for row in ({"table": "stats", **counters}, note)]
    partial = path.with_name(path.name + ".salvage")
    partial.write_bytes(lines + b"".join(added))
    os.replace(partial, path)


def _remove_unfinished(folder: str) -> None:
    """Remove unfinished rings of processes that were killed while making them."""
    for path in Path(folder).glob("commtrace-*.new"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
                path.with_suffix(".jsonl").unlink(missing_ok=True)
