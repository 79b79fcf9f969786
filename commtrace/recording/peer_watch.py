"""Peer watch: what the other processes of the run on this host end by, as the kernel has it.

A process that is killed, aborts, or calls `os._exit` cannot record its own end, but those that outlive it can. A thread
waits, without using the processor, until one of up to MAX_PEERS of them ends. It then reads the exit status, which the
kernel shows to other processes of the same user until the parent has fetched it, and in newer kernels afterwards. A row
`peer_ends` also proves an order: the peer had ended while this process still ran.

Peers are found by their rings (`recording.ring`). Where the kernel has no pidfd (Linux before 5.3), nothing is watched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import threading
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from commtrace.process_setup.control_groups import group_folders
from commtrace.process_setup.system_files import read_stat, read_text

from . import ring
from .table_lines import TableLines

MAX_PEERS: Final = 16
"""Processes that one process watches: those of the next higher ranks on its host."""
FIRST_SEARCH_SECONDS: Final = 0.1
LONGEST_SEARCH_SECONDS: Final = 60.0
"""Limits of the time between two searches for peers, which doubles each time: ranks may communicate late."""
STOP_SECONDS: Final = 1.0
"""Longest time to wait for the thread, which only a search for peers can delay."""
COUNTER_SECONDS: Final = 1.0
"""Interval between readings of the counter of processes that the kernel ended for lack of memory."""

_KILLS_FILES: Final = {"": "memory.events", "memory": "memory.oom_control"}
"""Controller of a control group -> the file in which it counts the processes ended for lack of memory."""
_GET_INFO: Final = 0xC040FF0B  # PIDFD_GET_INFO: _IOWR(0xFF, 11, struct pidfd_info), 64 bytes
_EXIT_INFO: Final = 1 << 3
_INFO: Final = struct.Struct("<QQ11Ii")


class _Peer(NamedTuple):
    path: Path
    stem: str
    rank: int
    pid: int
    fd: int
    start_ticks: int
    counter: Path | None


class PeerWatch:
    """Watch of the processes that this process records with; its thread ends with the process, or by `stop`."""

    def __init__(self, own_ring: ring.Ring, folder: str, run: str, rank: int, tables: TableLines) -> None:
        """Start the thread.

        Args:
            own_ring: The ring of this process.
            folder: Folder of the rings of this host.
            run: Identity of the run.
            rank: Rank of this process.
            tables: Where rows are added.
        """
        self._folder, self._run, self._rank, self._tables = folder, run, rank, tables
        self._peers: dict[int, _Peer] = {}
        self._counts: dict[Path, tuple[int, int]] = {}  # time of reading and number
        self._seen: set[Path] = set()
        self._lock, self._searching = threading.Lock(), threading.Lock()
        self._stopped = False
        self._thread: threading.Thread | None = None
        if own_ring.path is None or not hasattr(os, "pidfd_open"):
            return
        self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._pipe[0], select.POLLIN)
        thread = threading.Thread(target=self._watch, name="commtrace-peers", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # too many threads
            os.close(self._pipe[0])
            os.close(self._pipe[1])
        else:
            self._thread = thread

    def check(self) -> None:
        """Add rows for peers that have ended by now, also for those whose memory the kernel is still releasing.

        A process has an exit status only after that, which may take long; its files are closed before, among them its
        sockets, which its peers notice, and its ring. In a short run, the thread may not have found all peers yet.
        """
        if self._thread is not None and self._searching.acquire(timeout=STOP_SECONDS):
            try:
                self._search()
            finally:
                self._searching.release()
        poll = select.poll()
        with self._lock:
            peers = [*self._peers.values()]
        for peer in peers:
            poll.register(peer.fd, select.POLLIN)
        self._collect(poll, 0)
        for peer in peers:
            if peer.fd in self._peers and ring.owner_of(peer.path) == 0:
                self._add(peer, None, None)

    def stop(self) -> None:
        """Add the rows of peers that have ended by now, and end the thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self.check()
        self._stopped = True
        os.write(self._pipe[1], b"x")
        thread.join(STOP_SECONDS)
        if not thread.is_alive():
            with self._lock:  # a later `check` must not find descriptors that are other files' by then
                fds = (*self._pipe, *self._peers)
                self._peers.clear()
            for fd in fds:
                os.close(fd)

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the program's threads
        seconds, search_at = FIRST_SEARCH_SECONDS, 0.0
        while not self._stopped:
            try:
                if time.monotonic() >= search_at:
                    with self._searching:
                        self._search()
                    search_at = time.monotonic() + seconds
                    seconds = min(2 * seconds, LONGEST_SEARCH_SECONDS)
                self._read_counters()
                until = search_at - time.monotonic()
                self._collect(self._poll, min(until, COUNTER_SECONDS) if self._counts else until)
            except Exception:  # no memory, no descriptors: the program must go on
                return

    def _search(self) -> None:
        """Watch further peers, up to MAX_PEERS."""
        candidates = []
        for path in ring.other_rings(self._folder):
            if path not in self._seen:
                identity = ring.identity_of(path)
                if identity.get("run") == self._run:
                    candidates.append((_rank_of(identity), path))
                elif identity:
                    self._seen.add(path)
        candidates.sort(key=lambda candidate: (candidate[0] < self._rank, candidate[0]))
        for rank, path in candidates[: MAX_PEERS - len(self._peers)]:
            self._seen.add(path)
            self._follow(path, rank)

    def _follow(self, path: Path, rank: int) -> None:
        identity = ring.identity_of(path)
        stem, pid = str(identity.get("stem", "")), int(identity.get("pid", 0))
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            fd = -1
        # The pid is the peer's, not that of a later process or in another container, if it holds the lock of the ring.
        owner = ring.owner_of(path)
        if owner == pid and fd >= 0:
            stat = read_stat(f"/proc/{pid}")
            peer = _Peer(path, stem, rank, pid, fd, -1 if stat is None else stat.start_ticks, _counter_of(pid))
            with self._lock:
                self._peers[fd] = peer
            self._poll.register(fd, select.POLLIN)
            return
        if fd >= 0:
            os.close(fd)
        if owner == 0 and path.exists():  # it had ended before it was found; a ring is removed after a regular end
            self._add(_Peer(path, stem, rank, pid, -1, 0, None), None, None)

    def _collect(self, poll: select.poll, seconds: float) -> None:
        """Wait until a peer ends, at most for some seconds, and add rows for all that have ended."""
        for fd, _ in poll.poll(max(0, seconds * 1000)):
            with self._lock:  # the main thread may collect at the same time
                peer = self._peers.pop(fd, None)
            if peer is not None:
                moment = time.monotonic_ns()
                status = _exit_status(peer)
                self._poll.unregister(fd)
                os.close(fd)
                self._add(peer, status, self._killed_for_memory(peer, status), moment)

    def _add(self, peer: _Peer, status: int | None, oom_ns: int | None, moment: int | None = None) -> None:
        # A regular end needs no row: its process closes its log.
        if status != 0:
            self._tables.add(
                "peer_ends", stem=peer.stem, rank=peer.rank, pid=peer.pid, mono_ns=moment or time.monotonic_ns(),
                status=status, oom_ns=oom_ns,
            )  # fmt: skip

    def _read_counters(self) -> None:
        for path in {peer.counter for peer in self._peers.values() if peer.counter is not None}:
            self._counts[path] = time.monotonic_ns(), _kills(path)

    def _killed_for_memory(self, peer: _Peer, status: int | None) -> int | None:
        """Return within how many ns before its end the kernel ended a process of the peer's cgroup for lack of memory.

        None: it did not, or that is not known.
        """
        if peer.counter is None or status is None or status & 0x7F != signal.SIGKILL:
            return None
        before, count = self._counts.get(peer.counter, (0, -1))
        return time.monotonic_ns() - before if 0 <= count < _kills(peer.counter) else None


def _rank_of(identity: dict[str, Any]) -> int:
    digits = str(identity.get("stem", "")).removeprefix("rank").partition("-")[0]
    return int(digits) if digits.isdecimal() else -1


def _exit_status(peer: _Peer) -> int | None:
    """Return the status of a process that has ended, as `os.waitpid` has it; None if it is not known."""
    stat = read_stat(f"/proc/{peer.pid}")
    if stat is not None and stat.state in "ZX" and stat.start_ticks == peer.start_ticks:
        return stat.exit_status
    with contextlib.suppress(OSError):  # the parent was faster: newer kernels keep the status with the descriptor
        buffer = bytearray(_INFO.pack(_EXIT_INFO, *[0] * 13))
        fcntl.ioctl(peer.fd, _GET_INFO, buffer)
        mask, *_, status = _INFO.unpack(buffer)
        if mask & _EXIT_INFO:
            return int(status)
    return None


def _counter_of(pid: int) -> Path | None:
    """Return the file in which a control group of a process counts the processes ended for lack of memory."""
    for controller, folders in group_folders(f"/proc/{pid}/cgroup"):
        for folder in folders if controller in _KILLS_FILES else ():
            file = Path(folder, _KILLS_FILES[controller])
            if _kills(file) >= 0:
                return file
    return None


def _kills(path: Path) -> int:
    """Return the number of processes of a cgroup that were ended for lack of memory; -1 if it cannot be read."""
    words = read_text(path).split()
    try:
        return int(words[words.index("oom_kill") + 1])
    except (ValueError, IndexError):
        return -1
