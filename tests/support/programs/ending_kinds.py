"""A program whose ranks end in the way that its first argument names: KIND BAD_RANK SEED TRANSPORT [REPORT].

TRANSPORT is "torch" (gloo, under any launcher) or "mpi" (mpi4py). In step 2, BAD_RANK ends, after a random delay; the
others communicate on, or with KIND "cleanup" sleep until their launcher ends them. With REPORT, a directory, it
installs hooks of its own, and each writes its calls there.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

KIND, BAD_RANK, SEED, TRANSPORT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
RANK, SIZE = (int(next(os.environ[name] for name in names if name in os.environ)) for names in (NAMES, SIZES))
STEPS, BAD_STEP = 5, 2


def own_hooks(directory: Path) -> None:
    """Install the hooks of the program, which write their calls to files."""

    def write(hook: str, *values: object) -> None:
        with open(directory / f"{hook}-{RANK}", "a") as file:
            print(*values, file=file)

    sys.excepthook = lambda kind, error, trace: write("sys", kind.__name__, error, trace.tb_lineno if trace else None)
    threading.excepthook = lambda args: write("threading", args.exc_type.__name__, args.exc_value, len(args))
    faulthandler.enable(open(directory / f"fault-{RANK}", "w"))


def torch_step() -> Callable[[], Any]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", rank=RANK, world_size=SIZE)
    torch.manual_seed(0)
    bad_forward = KIND == "forward"

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            return x * x

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            if KIND == "autograd" and RANK == BAD_RANK and step_number == BAD_STEP:
                raise ArithmeticError("bad gradient")
            return gradient

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            if bad_forward and RANK == BAD_RANK:
                raise LookupError("bad forward")
            apply: Any = Square.apply
            return apply(self.linear(x))

    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def mpi_step() -> Callable[[], Any]:
    import numpy as np
    from mpi4py import MPI

    values = np.ones(4)

    def step() -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, values)

    return step


def out_of_memory() -> None:
    import numpy as np

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
    np.ones(1 << 28)


def limit_memory() -> None:
    """Move this process to a control group of its own, with 1 GiB; `ending_runs` removes it."""
    folder = next(Path(path) for path in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup") if os.path.isdir(path))
    group = folder / f"commtrace-test-{os.getpid()}"
    group.mkdir()
    limit = next(group / name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists())
    limit.write_text(str(1 << 30))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def beyond_limit() -> None:
    import numpy as np

    np.ones(1 << 28)


class Items:
    """A data set whose third item does not exist."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise OverflowError("bad item")
        return index


def worker() -> None:
    from torch.utils.data import DataLoader

    for _ in DataLoader(Items(), num_workers=1):  # type: ignore[arg-type]
        pass


def thread() -> None:
    def run() -> None:
        raise ValueError("bad thread")

    started = threading.Thread(target=run)
    started.start()
    started.join()


def raise_(error: BaseException) -> None:
    raise error


def handled(action: Callable[[], object]) -> None:
    def handler(*_: object) -> None:
        action()

    signal.signal(signal.SIGTERM, handler)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def mpi_abort() -> None:
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(7)


ACTIONS: dict[str, Callable[[], object]] = {
    "all": lambda: raise_(TypeError("bad everywhere")),
    "one": lambda: raise_(RuntimeError("bad rank")),
    "cleanup": lambda: raise_(RuntimeError("bad rank")),
    "worker": worker,
    "thread": thread,
    "autograd": lambda: None,
    "forward": lambda: None,
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(4),
    "abort": lambda: ctypes.CDLL(None).abort(),
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "sigterm_exit": lambda: handled(lambda: sys.exit(17)),
    "sigterm_raise": lambda: handled(lambda: raise_(InterruptedError("stopped"))),
    "sigint": lambda: os.kill(os.getpid(), signal.SIGINT),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "memory": out_of_memory,
    "killed for memory": beyond_limit,
    "mpi_abort": mpi_abort,
}
step_number = -1


def main() -> None:
    global step_number
    if len(sys.argv) > 5:
        own_hooks(Path(sys.argv[5]))
    if KIND == "killed for memory" and RANK == BAD_RANK:
        limit_memory()
    draw = random.Random(1000 * SEED + RANK)
    step = torch_step() if TRANSPORT == "torch" else mpi_step()
    for step_number in range(STEPS):
        if step_number == BAD_STEP:
            time.sleep(draw.random() * 0.2)
            if RANK == BAD_RANK or KIND == "all":
                ACTIONS[KIND]()
            elif KIND == "cleanup":
                time.sleep(60)
        step()


if __name__ == "__main__":
    main()
