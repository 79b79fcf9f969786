"""Stacks: what the threads of a process do while it makes no progress.

A process makes progress when it begins a call, or returns from the call that it is in. If it makes none for longer than
its rhythm, whether a call is open or not, the drain thread writes the Python stacks of all threads to the log (table
`stacks`), again each time the pause has doubled. No signal is sent and no thread is stopped: the drain thread copies
the stacks while it has the interpreter's lock, which takes about a millisecond. If another thread keeps the lock, the
drain thread takes no turn, and readers see that from the ring (`Ring.alive`).
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from contextlib import suppress
from itertools import islice
from types import FrameType
from typing import Any, Final, NamedTuple

from commtrace.library_frames import is_of_commtrace
from commtrace.process_setup.system_files import list_folder, read_stat, read_text
from commtrace.schema import Flag, State
from commtrace.settings import Settings

from .slots import Slots
from .table_lines import TableLines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_THREADS: Final = 64
"""Threads that are written."""
MAX_PROCESSES: Final = 64
"""Processes whose child processes are looked at."""
MAX_FRAMES: Final = 64
"""Frames that are written of a thread, from the innermost one."""
RETURN_CHECK_SECONDS: Final = 0.5
"""Pause from which on a return from a call counts as progress: noticing it takes a look at all slots."""
_BEGUN: Final = int(State.BEGUN)
_RETURNED: Final = int(State.RETURNED)
_ASYNC: Final = int(Flag.ASYNC)

_SYSTEM_CALLS: Final = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 7: "poll", 16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv",
        20: "writev", 23: "select", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom",
        46: "sendmsg", 47: "recvmsg", 61: "wait4", 73: "flock", 74: "fsync", 75: "fdatasync", 202: "futex",
        230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 270: "pselect6", 271: "ppoll",
        281: "epoll_pwait", 288: "accept4",
    },
    "aarch64": {
        22: "epoll_pwait", 29: "ioctl", 32: "flock", 56: "openat", 63: "read", 64: "write", 65: "readv", 66: "writev",
        67: "pread64", 68: "pwrite64", 72: "pselect6", 73: "ppoll", 82: "fsync", 83: "fdatasync", 95: "waitid",
        98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 202: "accept", 203: "connect", 206: "sendto",
        207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 242: "accept4", 260: "wait4",
    },
}  # fmt: skip
"""Machine -> names of the system calls in which a thread may be blocked, by number."""


class StackSampler:
    """Stack samples of one process. Only the drain thread uses it."""

    def __init__(self, settings: Settings, slots: Slots, tables: TableLines) -> None:
        """Take no sample yet.

        Args:
            settings: `stall_seconds` and `stall_factor` define the pause after which samples are taken.
            slots: The slots of the process, which show whether it is in a call.
            tables: Gets the samples.
        """
        self._minimum_ns, self._factor = int(settings.stall_seconds * 1e9), settings.stall_factor
        self._slots, self._tables = slots, tables
        self._calls, self._is_in_call = 0, False
        self._since_ns = time.monotonic_ns()
        self._longest_ns = self._due_ns = 0
        self._usage: dict[int, _Usage] | None = None
        self._usage_at_ns, self._children = 0, _Children(0, {}, {}, wait_for_storage=False)
        self._begin_pause(self._since_ns)

    def turn(self, calls: int, *, is_late: bool = False) -> bool:
        """Take a sample if one is due.

        Args:
            calls: Number of calls begun so far.
            is_late: Whether the turn comes late: the process may have been stopped. A pause begins anew, and the one
                before it belongs to no rhythm.

        Returns:
            Whether a sample was taken.
        """
        now = time.monotonic_ns()
        pause = now - self._since_ns
        if is_late:
            self._calls = calls
            self._begin_pause(now)
        elif calls != self._calls or (pause >= RETURN_CHECK_SECONDS * 1e9 and self._has_returned()):
            self._longest_ns = max(self._longest_ns, pause)
            self._calls = calls
            self._begin_pause(now)
        elif self._minimum_ns and pause >= self._due_ns:
            if self._usage is None:  # the usage is that of the drain thread's next pause
                self._usage, self._usage_at_ns, self._children = _usages(), now, _children()
            else:
                self._write(now, pause)
                self._usage, self._due_ns = None, 2 * pause
                return True
        return False

    def _begin_pause(self, now: int) -> None:
        self._since_ns, self._usage, self._is_in_call = now, None, False
        self._due_ns = max(self._minimum_ns, int(self._factor * self._longest_ns))

    def _has_returned(self) -> bool:
        """Return whether the process has left the call that it was in.

        torch returns from a synchronous call before it waits for its end: until then, the process is in it.
        """
        records = self._slots.ring.records
        returned = (records["state"] == _RETURNED) & (records["flags"] & _ASYNC == 0)
        was_in_call, self._is_in_call = self._is_in_call, bool(((records["state"] == _BEGUN) | returned).any())
        return was_in_call and not self._is_in_call

    def _write(self, now: int, pause: int) -> None:
        threads = [*islice(_threads(self._usage or {}), MAX_THREADS)]
        children_ns, children_use_storage = _children().since(self._children)
        self._tables.add(
            "stacks", mono_ns=now, calls=self._calls, pause_ns=pause, in_call=self._is_in_call,
            window_ns=now - self._usage_at_ns, children_cpu_ns=children_ns, children_use_storage=children_use_storage,
            threads=threads,
        )  # fmt: skip


def _threads(usage: dict[int, _Usage]) -> Iterator[dict[str, Any]]:
    """Yield what is known of each thread that runs Python code, the main thread first.

    Args:
        usage: What each thread had used at the begin of the window.
    """
    own, main = threading.get_ident(), threading.main_thread().ident
    # Not `threading.enumerate`, which takes a lock that the program may hold.
    known: dict[int, threading.Thread] = {**getattr(threading, "_active", {})}
    frames = sys._current_frames()
    frames.pop(own, None)
    for ident in sorted(frames, key=lambda ident: ident != main):
        thread, native = known.get(ident), 0
        if thread is not None:
            native = os.getpid() if ident == main else thread.native_id or 0
        before, now = usage.get(native), _usage(native)
        yield {
            "name": "" if thread is None else thread.name,
            "main": ident == main,
            "state": "" if (stat := read_stat(f"/proc/self/task/{native}")) is None else stat.state,
            "system_call": _system_call(native),
            "cpu_ns": None if before is None else now.cpu_ns - before.cpu_ns,
            "storage_bytes": None if before is None else now.storage_bytes - before.storage_bytes,
            "frames": [*islice(_frames(frames[ident]), MAX_FRAMES)],
        }


def _frames(frame: FrameType | None) -> Iterator[list[str | int]]:
    """Yield file, line and function of a frame and those that called it, the innermost first, except this package's."""
    while frame is not None:
        code = frame.f_code
        if not is_of_commtrace(code.co_filename):
            function = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
            yield [code.co_filename, frame.f_lineno or 0, function]
        frame = frame.f_back


class _Usage(NamedTuple):
    """What a thread has used since it began; 0 where that is not known.

    Attributes:
        cpu_ns: Time for which it was on a processor, or ready for one that was busy, ns.
        storage_bytes: Bytes that it read from storage, or changed in files that are on storage.
    """

    cpu_ns: int
    storage_bytes: int


def _usages() -> dict[int, _Usage]:
    """Return the usage of each thread of the process."""
    return {int(thread): _usage(int(thread)) for thread in list_folder("/proc/self/task")}


def _usage(thread: int) -> _Usage:
    folder = f"/proc/self/task/{thread}"
    return _Usage(sum(_schedule(folder)), _storage_bytes(folder))


class _Children(NamedTuple):
    """What the processes do that this one has started, and that those have started.

    Attributes:
        cpu_ns: Time for which they were on a processor, also of those that have ended, ns.
        ready_ns: Time for which each process was ready for one that was busy; those that have ended are missing.
        storage_bytes: Bytes that each one read from storage, or changed in files that are on storage.
        wait_for_storage: Whether one of them waits for storage at the moment.
    """

    cpu_ns: int
    ready_ns: dict[int, int]
    storage_bytes: dict[int, int]
    wait_for_storage: bool

    def since(self, before: _Children) -> tuple[int, bool]:
        """Return the time since an earlier look on a processor, or ready for one, ns, and whether they used storage."""
        ready_ns = _growth(self.ready_ns, before.ready_ns)
        uses_storage = self.wait_for_storage or _growth(self.storage_bytes, before.storage_bytes) > 0
        return max(0, self.cpu_ns - before.cpu_ns) + ready_ns, uses_storage


def _growth(now: dict[int, int], before: dict[int, int]) -> int:
    return sum(max(0, value - before.get(pid, 0)) for pid, value in now.items())


def _children() -> _Children:
    own, pids = read_stat("/proc/self"), [os.getpid()]
    for pid in islice(pids, MAX_PROCESSES):  # grows meanwhile
        for thread in list_folder(f"/proc/{pid}/task"):
            pids += map(int, read_text(f"/proc/{pid}/task/{thread}/children").split())
    stats = [stat for pid in pids[1:] if (stat := read_stat(f"/proc/{pid}")) is not None]
    ticks = (0 if own is None else own.ended_ticks) + sum(stat.cpu_ticks + stat.ended_ticks for stat in stats)
    examined = pids[1:MAX_PROCESSES]
    return _Children(
        ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK"),
        {pid: _ready_ns(pid) for pid in examined},
        {pid: _storage_bytes(f"/proc/{pid}") for pid in examined},
        wait_for_storage=any(stat.state == "D" for stat in stats),
    )


def _ready_ns(pid: int) -> int:
    """Return for how long the threads of a process were ready for a processor that was busy, ns."""
    folder = f"/proc/{pid}/task"
    return sum(_schedule(f"{folder}/{thread}")[1] for thread in list_folder(folder))


def _schedule(folder: str) -> tuple[int, int]:
    """Return for how long a thread was on a processor, and ready for one, ns; 0: not known."""
    with suppress(ValueError):
        running, ready, _ = read_text(folder, "schedstat").split()
        return int(running), int(ready)
    return 0, 0


def _storage_bytes(folder: str) -> int:
    """Return the bytes that a process or thread read from storage, or changed in files on storage; 0: not known."""
    with suppress(ValueError, KeyError):
        counts = dict(line.split(": ") for line in read_text(folder, "io").splitlines())
        return int(counts["read_bytes"]) + int(counts["write_bytes"])
    return 0


def _system_call(thread: int) -> str:
    """Return the name of the system call that a thread is in; "" if it is in none, or that is not known."""
    with suppress(ValueError, IndexError):
        number = int(read_text(f"/proc/self/task/{thread}/syscall").split()[0])
        return _SYSTEM_CALLS.get(platform.machine(), {}).get(number, "")
    return ""
