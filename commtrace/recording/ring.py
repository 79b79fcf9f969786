"""Ring: the records of one process that are not on disk yet, in memory that outlives the process.

A ring is a file under /dev/shm, mapped into the process. Writing a record is a store to memory, and when the process is
killed, the ring remains for the next commtrace on that host (`commtrace.recording.recovery`). It is never a file on
shared storage: a mapped page that cannot be backed kills the process with SIGBUS. The space is reserved when the ring
is made, which tmpfs honours. If there is no room, the ring is in private memory and cannot be recovered.

    offset 0        identity, twice: checksum and JSON (pid, log directory, stem of the log's files ...)
    offset 8160     monotonic ns of the last turn of the process's drain thread, and the kernel's id of that thread
    offset 8176     monotonic ns of the last turn that came late: the process had been stopped, the interpreter's lock
                    kept, or the turn before had waited for storage
    offset 8192     the last counters, twice
    offset 16352    how many kept records were begun and completed, since the start
    offset 16368    monotonic ns at which the process was last known to be alive
    offset 16376    number of calls that found the ring full
    offset 16384    the records, 96 bytes each; a record whose state byte is not 0 is complete and not on disk yet;
                    then the kept records, if any: a circular buffer of the last ones that the drain thread took, on
                    disk or not (`Ring.keep`)

The two copies are written alternately, because the process may be killed in the middle of a store. The process's tables
are beside the ring, under the same name with `.jsonl`. A lock on the ring shows that its process is alive. It is a
POSIX lock: forked children do not inherit it, and it is not tied to pids, which containers reuse. Such a lock does not
exclude its own process, and is released as soon as that process closes any descriptor of the file: a process must never
open its own ring again. The ring of another process may be copied (`copy_ring`), which takes no lock and writes
nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from commtrace.process_setup.system_files import read_stat
from commtrace.schema import RECORD, Records
from commtrace.settings import Settings

from .summary_files import Snapshot, read_snapshot

IDENTITY_AT: Final = 0
TURN_AT: Final = 8160
LATE_TURN_AT: Final = 8176
COUNTERS_AT: Final = 8192
KEPT_AT: Final = 16352
ALIVE_AT: Final = 16368
DROPPED_AT: Final = 16376
RECORDS_AT: Final = 16384
COPY_BYTES: Final = 4080
"""Size of one of the two copies of identity or counters."""
RING_FORMAT: Final = "commtrace-ring"
LOCK_TIMEOUT_SECONDS: Final = 5.0
"""Seconds to wait for another process that recovers the same ring."""

_NUMBER: Final = struct.Struct("<Q")
_TWO_NUMBERS: Final = struct.Struct("<2Q")
_THREE_NUMBERS: Final = struct.Struct("<3Q")
_own_rings: Final[set[Path]] = set()


class Ring:
    """A fixed number of record slots. `buffer` is all its memory, `records` an array of shape (capacity,) in it."""

    def __init__(self, capacity: int, path: Path | None, identity: dict[str, Any], kept: int = 0) -> None:
        """Create the file `path`; None: private memory. Raises OSError or ValueError if creation fails.

        Args:
            capacity: Number of slots.
            path: The file.
            identity: Identity of the ring's process.
            kept: Number of records that `keep` has room for.
        """
        self.capacity = capacity
        self.path: Path | None = path
        self._fd = self._tables_fd = -1
        self._turns = {IDENTITY_AT: 0, COUNTERS_AT: 0}
        size = RECORDS_AT + (capacity + kept) * RECORD.itemsize
        if path is None:
            self.buffer: mmap.mmap | bytearray = mmap.mmap(-1, size)
        else:
            self._create(path, size, identity)
        self.records: Records = np.frombuffer(self.buffer, RECORD, capacity, RECORDS_AT)
        self._kept: Records = np.frombuffer(self.buffer, RECORD, kept, RECORDS_AT + self.records.nbytes)
        self.kept_count = 0
        """Number of records kept since the start, including overwritten ones."""
        _NUMBER.pack_into(self.buffer, TURN_AT, time.monotonic_ns())  # that of the drain thread's start

    def _create(self, path: Path, size: int, identity: dict[str, Any]) -> None:
        # Under another name until it is locked and has its identity: otherwise it would look like a dead process's.
        unfinished = path.with_suffix(".new")
        try:
            self._fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._fd, 0, size)
            self.buffer = mmap.mmap(self._fd, size)
            self.describe(identity)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._tables_fd = os.open(path.with_suffix(".jsonl"), flags, 0o600)
            _own_rings.add(path)
            os.rename(unfinished, path)
        except BaseException:
            self.remove()
            unfinished.unlink(missing_ok=True)
            raise

    def describe(self, identity: dict[str, Any]) -> None:
        """Write the identity of the ring's process. Raises ValueError if it does not fit."""
        if not self._put(IDENTITY_AT, {"format": RING_FORMAT, "capacity": self.capacity, **identity}):
            raise ValueError(f"the identity of a ring does not fit into {COPY_BYTES} bytes")

    def count(self, counters: dict[str, Any]) -> None:
        """Write the counters, for recovery."""
        if not self._put(COUNTERS_AT, counters):  # error messages are too long; the numbers always fit
            self._put(COUNTERS_AT, {name: value for name, value in counters.items() if isinstance(value, int)})

    @property
    def dropped(self) -> int:
        """Number of calls that found the ring full. It accounts for missing records, and is written at once."""
        return int(_NUMBER.unpack_from(self.buffer, DROPPED_AT)[0])

    @dropped.setter
    def dropped(self, calls: int) -> None:
        _NUMBER.pack_into(self.buffer, DROPPED_AT, calls)

    def alive(self) -> None:
        """Record that the process is alive. Nothing else shows when a killed process ended."""
        _NUMBER.pack_into(self.buffer, ALIVE_AT, time.monotonic_ns())

    def turn(self, *, is_late: bool = False) -> None:
        """Record that the drain thread takes a turn. Nothing else shows that it does not get the interpreter's lock.

        Args:
            is_late: Whether the turn before it was longer ago than it should be: the process had been stopped, another
                thread had kept the lock, or that turn had waited for storage.
        """
        self.alive()
        now = time.monotonic_ns()
        if is_late:
            _NUMBER.pack_into(self.buffer, LATE_TURN_AT, now)  # first: readers trust a process that takes turns
        _TWO_NUMBERS.pack_into(self.buffer, TURN_AT, now, threading.get_native_id())

    def keep(self, records: Records) -> None:
        """Write records over the oldest kept ones; only the last of them if there is no room for all."""
        last = records[-len(self._kept) :] if len(self._kept) else records[:0]
        if len(last):
            begun = self.kept_count + len(records)
            at = np.arange(begun - len(last), begun) % len(self._kept)
            _NUMBER.pack_into(self.buffer, KEPT_AT, begun)  # what is overwritten is not valid from here on
            self._kept[at] = last
            _NUMBER.pack_into(self.buffer, KEPT_AT + 8, begun)
            self.kept_count = begun

    def kept(self) -> Records:
        """Return a copy of the kept records, the oldest first."""
        return _kept_in(self._kept, self.kept_count, self.kept_count)

    def _put(self, start: int, value: dict[str, Any]) -> bool:
        turn = self._turns[start] + 1
        text = json.dumps({"turn": turn, **value}).encode()
        data = b"%08x %s" % (zlib.crc32(text), text)
        if len(data) > COPY_BYTES:
            return False
        at = start + turn % 2 * COPY_BYTES
        self.buffer[at : at + COPY_BYTES] = data.ljust(COPY_BYTES)
        self._turns[start] = turn
        return True

    def keep_table_line(self, line: bytes) -> None:
        """Write a copy of a table line for recovery; the drain thread writes it to the log."""
        if self._tables_fd >= 0:
            try:
                complete = os.write(self._tables_fd, line) == len(line)
            except OSError:
                complete = False
            if not complete:  # no room: recovery then finds the tables up to here
                os.close(self._tables_fd)
                self._tables_fd = -1

    def forked(self) -> None:
        """Detach a forked child from the parent's ring. Closes nothing: a descriptor may be another file's by now."""
        self.buffer = bytearray(len(self.buffer))
        self._fd = self._tables_fd = -1
        self.path = None

    def remove(self) -> None:
        """Remove the ring's files; everything in them is on disk."""
        path, self.path = self.path, None
        if path is not None:
            remove_files(path)
            _own_rings.discard(path)
        for fd in (self._fd, self._tables_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._tables_fd = -1


def make_ring(capacity: int, folder: str, name: str, identity: dict[str, Any], kept: int = 0) -> Ring:
    """Make a ring in `folder` (memory-backed), or in private memory if that has no room. Arguments are as in `Ring`."""
    try:
        return Ring(capacity, Path(folder) / f"commtrace-{name}.ring", identity, kept)
    except (OSError, ValueError):
        return Ring(capacity, None, identity, kept)


def _kept_in(slots: Records, begun: int, completed: int) -> Records:
    """Return the kept records in slots, the oldest first, without those that were being overwritten."""
    return slots[np.arange(max(0, begun - len(slots)), completed) % max(1, len(slots))]


def remove_files(path: Path) -> None:
    """Remove a ring and the files beside it."""
    for suffix in (".ring", ".jsonl", ".cells", ".cells.new"):
        path.with_suffix(suffix).unlink(missing_ok=True)


def other_rings(folder: str) -> list[Path]:
    """Return the rings in `folder` that are not this process's."""
    return sorted(path for path in Path(folder).glob("commtrace-*.ring") if path not in _own_rings)


Silence: TypeAlias = Literal["", "late", "stopped", "resumed", "lock", "storage"]
"""Why the drain thread of a live process takes no turns.

    ""         it does
    "late"     its turn is overdue, not for long enough to tell why, or the process has just been stopped
    "stopped"  the process is stopped
    "resumed"  it had been, and goes on
    "lock"     another thread keeps the interpreter's lock
    "storage"  it waits for the log's storage, and the program's own threads go on
"""


class RingContent(NamedTuple):
    """Content of the ring of another process at one moment."""

    path: Path
    alive_ns: int
    """Monotonic ns at which the process was last known to be alive."""
    identity: dict[str, Any]
    counters: dict[str, Any]
    records: Records
    """Records that did not change while they were read. A live process was writing the others."""
    tables: bytes
    """Its tables as JSON lines; the last line may be truncated."""
    kept: Records
    """The last records that the drain thread took, the oldest first; empty if none are kept."""
    kept_count: int
    """Number of records kept since the start, including overwritten ones."""
    snapshot: Snapshot
    """What its summary had not written, read before `kept`."""
    is_alive: bool = False
    """Whether its process was running."""
    turn_ns: int = 0
    """Monotonic ns of the last turn of its drain thread: long ago if it is stopped, another thread keeps the GIL, or
    storage does not answer."""
    late_turn_ns: int = 0
    """Monotonic ns of the last turn that came late: the process had been stopped, the lock kept, or the turn before had
    waited for storage. 0: none did."""
    drain_thread: int = 0
    """The kernel's id of that thread; 0: it has taken no turn."""
    process_state: str = ""
    """The kernel's letter for the state of a live process just before it was copied (`system_files.Stat`)."""
    silence: Silence = ""
    """Found by readers (`commtrace.reading.live_processes`)."""
    left_out: int = 0
    """Number of records of a live process that were left out of `records`, for lack of memory."""

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return int(self.identity["capacity"])

    @property
    def silent_ns(self) -> int:
        """Time since the next turn of the drain thread was due, ns; 0 if that is not known."""
        pause_ms = self.identity.get("drain_ms", Settings.drain_ms)  # rings of earlier versions lack it
        is_known = self.turn_ns and isinstance(pause_ms, int)
        return max(0, self.alive_ns - self.turn_ns - pause_ms * 1_000_000) if is_known else 0


@contextlib.contextmanager
def lock_dead(path: Path) -> Iterator[RingContent | None]:
    """Yield the ring of a dead process, holding its lock; None if the process is alive, or another recovery took it.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a ring.
    """
    with _opened(path, os.O_RDWR) as fd:
        # Take the lock before reading: from then on no process writes. A file without a name was removed by its
        # process, or by another recovery, since it was found.
        yield _read(path, fd) if _lock_if_dead(fd) and os.fstat(fd).st_nlink > 0 else None


def copy_ring(path: Path) -> RingContent | None:
    """Copy the ring of another process, without taking its lock and without writing.

    Returns:
        The copy; None if the file cannot be read, or was removed because its records are in the log.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), _opened(path, os.O_RDONLY) as fd:
        stat = read_stat(f"/proc/{_holder(fd) or 0}")
        now, content = time.monotonic_ns(), _read(path, fd)
        if _holder(fd) in (content.identity.get("pid"), None):
            return content._replace(alive_ns=now, is_alive=True, process_state="" if stat is None else stat.state)
        return content if os.fstat(fd).st_nlink > 0 else None
    return None


def identity_of(path: Path) -> dict[str, Any]:
    """Return the identity of a ring's process without taking the lock; {} if the file is not a readable ring."""
    with contextlib.suppress(OSError, ValueError), _opened(path, os.O_RDONLY) as fd:
        return _identity(os.pread(fd, COUNTERS_AT, 0))
    return {}


def read_turn(path: Path) -> int | None:
    """Return the monotonic ns of the last turn of a process's drain thread; None if its ring is gone."""
    with contextlib.suppress(OSError, struct.error), _opened(path, os.O_RDONLY) as fd:
        return int(_NUMBER.unpack(os.pread(fd, _NUMBER.size, TURN_AT))[0])
    return None


def owner_of(path: Path) -> int | None:
    """Return the pid of the process that holds a ring's lock; 0: it has ended; None: not known."""
    with contextlib.suppress(OSError), _opened(path, os.O_RDONLY) as fd:
        return _holder(fd)
    return None


@contextlib.contextmanager
def _opened(path: Path, mode: int) -> Iterator[int]:
    fd = os.open(path, mode | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # do not block on a pipe
    try:
        yield fd
    finally:
        os.close(fd)


def _read(path: Path, fd: int) -> RingContent:
    snapshot, size = read_snapshot(path), os.fstat(fd).st_size
    # A record that is being written may mix the fields of two calls, whatever its state. The two reads differ there.
    first, data = os.pread(fd, size, 0), os.pread(fd, size, 0)
    begun, _ = _TWO_NUMBERS.unpack(os.pread(fd, _TWO_NUMBERS.size, KEPT_AT))
    identity, counters = _identity(data), _latest(data, COUNTERS_AT)
    before, after = (np.frombuffer(copy, RECORD, int(identity["capacity"]), RECORDS_AT) for copy in (first, data))
    records = after[(after["state"] != 0) & (before.view(_BYTES) == after.view(_BYTES))]
    alive_ns, counters["dropped"] = _TWO_NUMBERS.unpack_from(data, ALIVE_AT)
    _, kept_count = _TWO_NUMBERS.unpack_from(data, KEPT_AT)
    kept = _kept_in(np.frombuffer(data, RECORD, -1, RECORDS_AT + after.nbytes), begun, kept_count)
    tables = b""
    with contextlib.suppress(OSError):
        tables = path.with_suffix(".jsonl").read_bytes()
    turn_ns, thread, late_ns = _THREE_NUMBERS.unpack_from(data, TURN_AT)
    return RingContent(
        path, alive_ns, identity, counters, records, tables, kept, kept_count, snapshot, turn_ns=turn_ns,
        late_turn_ns=late_ns, drain_thread=thread,
    )  # fmt: skip


def _identity(data: bytes) -> dict[str, Any]:
    identity = _latest(data, IDENTITY_AT)
    if identity.get("format") != RING_FORMAT:
        raise ValueError("not a commtrace ring")
    return identity


def _latest(data: bytes, start: int) -> dict[str, Any]:
    """Return the later of the intact copies; {} if none is intact."""
    copies: list[dict[str, Any]] = [{}]
    for at in (start, start + COPY_BYTES):
        checksum, _, text = data[at : at + COPY_BYTES].rstrip(b"\0 ").partition(b" ")
        if checksum == b"%08x" % zlib.crc32(text):
            copies.append(json.loads(text))
    return max(copies, key=lambda copy: int(copy.pop("turn", 0)))


_BYTES: Final = np.dtype((np.void, RECORD.itemsize))


def _lock_if_dead(fd: int) -> bool:
    """Take the lock unless the ring's own process holds it. Waits for another recovery, which holds it briefly."""
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while not _lock(fd):
        holder = _holder(fd)
        owner = _latest(os.pread(fd, COUNTERS_AT, 0), IDENTITY_AT).get("pid")
        if holder in (owner, None) or time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _holder(fd: int) -> int | None:
    """Return the pid of the process that holds the lock. 0: none any more; None: one in another pid namespace."""
    query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, query))
    if kind == fcntl.F_UNLCK:
        return 0
    return int(pid) or None


_FLOCK: Final = "hhqqi4x"  # struct flock of Linux on 64 bits: type, whence, start, length, process


def _lock(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
