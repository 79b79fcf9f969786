"""What killed processes left in memory, brought to the log they belong to.

A ring whose lock can be had belongs to no living process. Its records that are not yet on disk become a segment of their
own, its tables are completed, then it is removed. Every step may be repeated: a salvage that is itself killed loses
nothing, and what it wrote already is not counted twice.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from commtrace import identity
from commtrace.ring import LeftRing, Records
from commtrace.schema import RECORD
from commtrace.segments import Segment, read_records, write_all

DEFAULT_SHM = "/dev/shm"


def salvage(log_directory: Path, *, shm: str | None = None, own: Path | None = None) -> list[str]:
    """Bring what dead processes of this host left for `log_directory`. Returns a sentence per ring touched or not.

    `own` is the caller's own ring, which is left alone. Never raises OSError: what cannot be brought stays where it is.
    """
    notes = []
    target = os.path.realpath(log_directory)
    for path in sorted(_rings(shm or os.environ.get("COMMTRACE_SHM") or DEFAULT_SHM, own)):
        try:
            with LeftRing(path) as left:
                if not left.owner_lives and _within(left, target):
                    notes.append(_bring(left))
        except (OSError, ValueError) as error:
            if isinstance(error, PermissionError):
                continue  # somebody else's
            notes.append(f"{path}: records of a process that ended early could not be read or moved: {error}")
    return notes


def _rings(shm: str, own: Path | None) -> Iterator[Path]:
    try:
        yield from (path for path in Path(shm).glob("commtrace-*.ring") if path != own)
    except OSError:
        return


def _within(left: LeftRing, target: str) -> bool:
    directory = os.path.realpath(str(left.identity["directory"]))
    folder = os.path.join(directory, str(left.identity["run"]), str(left.identity["host"]))
    # Asked for a whole log directory, for one run of it, or for one host's folder.
    return target == directory or (folder + os.sep).startswith(target + os.sep)


def _bring(left: LeftRing) -> str:
    folder = Path(left.identity["directory"]) / left.identity["run"] / left.identity["host"]
    stem = str(left.identity["stem"])
    folder.mkdir(parents=True, exist_ok=True)
    records = _not_on_disk(left, folder, stem)
    _complete_tables(left, folder / f"{stem}.jsonl", len(records))
    if len(records):
        _write_segment(records, folder / f"{stem}.salvaged.npy")
    left.remove()
    return f"{stem} on {left.identity['host']}: {len(records)} records of a process that ended early were recovered"


def _not_on_disk(left: LeftRing, folder: Path, stem: str) -> Records:
    """The process may have died between writing records and clearing their slots: those are on disk already."""
    capacity = int(left.identity["capacity"])
    recent = [read_records(path)[-capacity:] for path in sorted(folder.glob(f"{stem}.*.npy*"))[-3:]]
    known = {record.tobytes() for records in recent for record in records}
    return left.records[[record.tobytes() not in known for record in left.records]] if known else left.records


def _complete_tables(left: LeftRing, path: Path, records: int) -> None:
    # The memory's copy is ahead of the file's, unless memory was short. A cut last line is one that nothing refers to.
    held = max(left.tables(), path.read_bytes() if path.exists() else b"", key=len)
    lines = held[: held.rfind(b"\n") + 1]
    stats = {**left.counters, "table": "stats"} if left.counters else None
    note = {"table": "salvage", "records": records, "host": identity.host(), "unix_ns": time.time_ns()}
    data = lines + b"".join(_line(row) for row in (stats, note) if row)
    partial = path.with_name(path.name + ".salvage")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)
    os.replace(partial, path)


def _line(row: dict[str, object]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _write_segment(records: Records, path: Path) -> None:
    # Unlike a recording process, a salvage may find its own earlier attempt.
    path.with_name(path.name + ".open").unlink(missing_ok=True)
    segment = Segment(path)
    segment.append(np.ascontiguousarray(records, RECORD))
    segment.close()
