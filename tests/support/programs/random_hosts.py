"""A rank of a random program on a host whose clock a test sets: collectives and messages over gloo or MPI.

python random_hosts.py gloo|mpi SECONDS SEED FOLDER PORT

Each rank writes readings of its own clock to FOLDER/clock-RANK.json, each with readings of the machine's clock before
and after, by a system call that a preloaded library does not change. Before that, ranks 0 and 1 measure half of a round
trip over TCP, which rank 0 writes to FOLDER/half-round-trip.json in nanoseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Protocol

_CLOCK_GETTIME, _MONOTONIC = 228, 1  # on x86-64
ROUND_TRIPS = 300


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def kernel_monotonic_ns() -> int:
    """Return CLOCK_MONOTONIC of this time namespace, unchanged by a preloaded library."""
    spec = _TimeSpec()
    ctypes.CDLL(None).syscall(_CLOCK_GETTIME, _MONOTONIC, ctypes.byref(spec))
    return int(spec.seconds) * 10**9 + int(spec.nanoseconds)


class Library(Protocol):
    """Calls that the random program makes."""

    rank: int
    size: int

    def all_reduce(self) -> None: ...
    def barrier(self) -> None: ...
    def broadcast(self, root: int) -> None: ...
    def send(self, target: int) -> None: ...
    def recv(self, source: int) -> None: ...
    def close(self) -> None: ...


def gloo() -> Library:
    """Return the calls of torch.distributed."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.ones(256)

    class Gloo:
        rank, size = dist.get_rank(), dist.get_world_size()

        def all_reduce(self) -> None:
            dist.all_reduce(tensor)

        def barrier(self) -> None:
            dist.barrier()

        def broadcast(self, root: int) -> None:
            dist.broadcast(tensor, root)

        def send(self, target: int) -> None:
            dist.send(tensor, target)

        def recv(self, source: int) -> None:
            dist.recv(tensor, source)

        def close(self) -> None:
            dist.destroy_process_group()

    return Gloo()


def mpi() -> Library:
    """Return the calls of mpi4py."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    given: Any = np.ones(256)
    taken: Any = np.ones(256)

    class Mpi:
        rank, size = world.Get_rank(), world.Get_size()

        def all_reduce(self) -> None:
            world.Allreduce(given, taken)

        def barrier(self) -> None:
            world.Barrier()

        def broadcast(self, root: int) -> None:
            world.Bcast(given, root)

        def send(self, target: int) -> None:
            world.Send(given, target)

        def recv(self, source: int) -> None:
            world.Recv(taken, source)

        def close(self) -> None:
            pass  # mpi4py finalizes

    return Mpi()


def half_round_trip_ns(library: Library, port: int) -> int:
    """Return the median of half of a round trip of one byte over TCP between ranks 0 and 1."""
    if library.rank == 0:
        with socket.create_server(("127.0.0.1", port)) as server:
            library.send(1)  # rank 1 connects when it has this
            with server.accept()[0] as peer:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                times = []
                for _ in range(ROUND_TRIPS):
                    begin = kernel_monotonic_ns()
                    peer.sendall(b".")
                    peer.recv(1)
                    times.append(kernel_monotonic_ns() - begin)
                return round(statistics.median(times) / 2)
    library.recv(0)
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUND_TRIPS):
            peer.sendall(peer.recv(1))
    return 0


def main() -> None:
    """Run the random program."""
    backend, seconds, seed, folder, port = sys.argv[1:]
    library = {"gloo": gloo, "mpi": mpi}[backend]()
    if library.rank < 2:
        half = half_round_trip_ns(library, int(port))
        if library.rank == 0:
            Path(folder, "half-round-trip.json").write_text(json.dumps(half))
    choices, pauses = random.Random(seed), random.Random(library.rank)
    pairs = []
    calls = round(float(seconds) / 0.005)
    for number in range(calls):
        if number == calls // 2 and "CLOCK_STEP_MS" in os.environ:
            ctypes.CDLL(None).clock_jump()
        time.sleep(pauses.expovariate(1 / 0.004))
        operation = choices.randrange(4)
        source, target = choices.sample(range(library.size), 2)
        if operation == 0:
            library.all_reduce()
        elif operation == 1:
            library.barrier()
        elif operation == 2:
            library.broadcast(source)
        elif library.rank == source:
            library.send(target)
        elif library.rank == target:
            library.recv(source)
        before = kernel_monotonic_ns()
        own = time.monotonic_ns()
        pairs.append((own, before, kernel_monotonic_ns()))
    Path(folder, f"clock-{library.rank}.json").write_text(json.dumps(pairs))
    library.close()


if __name__ == "__main__":
    main()
