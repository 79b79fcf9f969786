"""What killed processes left in memory, brought to the log they belong to.

A ring whose lock can be had belongs to no living process. Its records that are not yet on disk become a segment of
their own, its tables are completed, then it is removed. Every step may be repeated: a salvage that is itself killed
loses nothing, and what it wrote already is not counted twice.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace import identity
from commtrace.schema import RECORD, Records

from . import ring
from .ring import OrphanedRing
from .segment_writer import EMPTY, HEADER_BYTES, WrittenSegment, read_records, write_all

DEFAULT_SHM: Final = "/dev/shm"
STALE_SECONDS: Final = 60

# What never changes after a call has begun. A thread begins one call at a time.
_WHICH: Final = ["t_begin", "thread", "kind", "group", "seq"]

_one_at_a_time: Final = threading.Lock()  # the lock on a ring does not keep threads of one process apart


def recover_records(log_directory: Path, *, shm: str | None = None) -> list[str]:
    """Bring what dead processes of this host left for `log_directory`: what COMMTRACE named, or a folder in it.

    Returns a sentence per ring. Never raises OSError: what cannot be brought stays where it is.
    """
    notes = []
    folder = shm or os.environ.get("COMMTRACE_SHM") or DEFAULT_SHM
    target = os.path.realpath(log_directory)
    with _one_at_a_time:
        for path in ring.other_rings(folder):
            note = _look_at(path, target)
            if note:
                notes.append(note)
        _remove_unfinished(folder)
    return notes


def _look_at(path: Path, target: str) -> str:
    # Only rings of this log are locked, however briefly: another log's salvage would take them for a living process's.
    if not _within(ring.identity_of(path), target):
        return ""
    try:
        left = OrphanedRing(path)
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # somebody else's, or not what it is called
    with left:
        if not left.dead:
            return ""
        try:
            return _bring(left)
        except (OSError, ValueError) as error:
            return f"{path}: records of a process that ended early could not be moved to the log: {error}"


def _within(whose: dict[str, Any], target: str) -> bool:
    names = [str(whose.get(name, "")) for name in ("run", "host", "stem")]
    if not all(name == os.path.basename(name) and name.strip(".") for name in names):
        return False  # whoever wrote that wants to write elsewhere
    directory = os.path.realpath(str(whose.get("directory", "")))
    # Asked for a whole log directory, for one run of it, or for one host's folder.
    return target in (directory, os.path.join(directory, names[0]), os.path.join(directory, *names[:2]))


def _bring(left: OrphanedRing) -> str:
    host = str(left.identity["host"])
    folder = Path(left.identity["directory"]) / left.identity["run"] / host
    if _made_no_call(left, folder):
        left.remove()
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    stem = _stem(left, folder)
    salvaged = folder / f"{stem}.salvaged.npy"
    # An earlier attempt's, which must not be taken for something that is safe.
    (folder / (salvaged.name + ".open")).unlink(missing_ok=True)
    records = _not_on_disk(left, folder, stem)
    if len(records) and not salvaged.exists():
        _write_segment(records, salvaged)
    number = _records_in(salvaged)
    _complete_tables(left, folder, stem, number)
    left.remove()
    return f"{stem} on {host}: {number} records of a process that ended early were recovered"


def _made_no_call(left: OrphanedRing, folder: Path) -> bool:
    """The process was killed while it began to record, before it could say who it is."""
    if len(left.records) or b"\n" in left.tables():
        return False
    return not (folder / f"{left.identity['stem']}.jsonl").exists()


def _stem(left: OrphanedRing, folder: Path) -> str:
    """As the process called its files, unless it did not come to make them and the name is another's by now."""
    stem = str(left.identity["stem"])
    theirs, ours = _first_line(folder / f"{stem}.jsonl"), left.tables().partition(b"\n")[0]
    if not theirs or not ours or theirs == ours:
        return stem
    head, _, pid = stem.rpartition("-")
    return f"{head}-{left.path.stem.rpartition('-')[2]}-{pid}"


def _first_line(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.readline().rstrip(b"\n")
    except FileNotFoundError:
        return b""


def _not_on_disk(left: OrphanedRing, folder: Path, stem: str) -> Records:
    """The process may have died between writing records and clearing their slots: those are on disk already."""
    recent = _last_records(folder, stem, int(left.identity["capacity"]))
    return left.records[~np.isin(_which(left.records), _which(recent))]


def _last_records(folder: Path, stem: str, count: int) -> Records:
    """At least the last `count` records of a process."""
    found: list[Records] = [EMPTY]
    for path in sorted(folder.glob(f"{stem}.*.npy*"), reverse=True):
        found.append(read_records(path))
        if path.suffixes[-2:] != [".salvaged", ".npy"]:
            count -= len(found[-1])
        if count <= 0:
            break
    return np.concatenate(found)


def _which(records: Records) -> npt.NDArray[Any]:
    """A sortable value per record that no two calls of a process share."""
    packed = np.zeros(len(records), [(name, RECORD[name].newbyteorder(">")) for name in _WHICH])
    for name in _WHICH:
        packed[name] = records[name]
    return packed.view(f"S{packed.itemsize}")


def _records_in(path: Path) -> int:
    try:
        return max(0, path.stat().st_size - HEADER_BYTES) // RECORD.itemsize
    except FileNotFoundError:
        return 0


def _complete_tables(left: OrphanedRing, folder: Path, stem: str, salvaged: int) -> None:
    path = folder / f"{stem}.jsonl"
    # The memory's copy is ahead of the file's, unless memory was short. A cut last line is one that nothing refers to.
    held = max(left.tables(), path.read_bytes() if path.exists() else b"", key=len)
    lines = held[: held.rfind(b"\n") + 1]
    if b'{"table": "salvage"' in lines:
        return
    on_disk = sum(map(_records_in, folder.glob(f"{stem}.*.npy*")))
    counters = {"removed": 0, "lost": 0, **left.counters, "dropped": left.dropped}
    counters["calls"] = on_disk + sum(counters[name] for name in ("dropped", "removed", "lost"))
    note = {"records": salvaged, "host": identity.host(), "unix_ns": time.time_ns()}
    _replace(path, lines + _line("stats", counters) + _line("salvage", note))


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".salvage")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)
    os.replace(partial, path)


def _line(table: str, row: dict[str, object]) -> bytes:
    return json.dumps({"table": table, **row}).encode() + b"\n"


def _write_segment(records: Records, path: Path) -> None:
    segment = WrittenSegment(path)
    try:
        segment.append(np.ascontiguousarray(records, RECORD))
        segment.close()
    except OSError:
        segment.abandon()
        raise


def _remove_unfinished(folder: str) -> None:
    """Of processes that were killed while they made their ring."""
    for path in Path(folder).glob("commtrace-*.new"):
        try:
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
                path.with_suffix(".jsonl").unlink(missing_ok=True)
        except OSError:
            continue
