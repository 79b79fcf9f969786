"""The command line that the MPI workloads have in common, and what it sets up."""

from __future__ import annotations

import argparse
from typing import IO, Any

import torch

from commtrace.launchers import local_rank

from .errors import TransportError
from .mpi_transport import MpiTransport
from .stopwatch import Stopwatch
from .torch_transport import TorchTransport, init_process_group
from .transports import Transport

TRANSPORTS = ("mpi", "mpi-cuda-aware", "nccl", "gloo")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Parser(argparse.ArgumentParser):
    """A parser that speaks on rank 0 only: help and errors are not repeated by every rank."""

    def __init__(self, rank: int, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)
        self._speaks = rank == 0

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if self._speaks:
            super()._print_message(message, file)


def positive(text: str) -> int:
    """A number from 1."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def natural(text: str) -> int:
    """A number from 0."""
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def probability(text: str) -> float:
    """A number from 0, below 1."""
    number = float(text)
    if not 0.0 <= number < 1.0:
        raise ValueError
    return number


def add_common(parser: argparse.ArgumentParser, iterations: int, dropout: float) -> None:
    """Options of every MPI workload."""
    add = parser.add_argument
    add("--dropout", type=probability, default=dropout, metavar="P", help="probability (default: %(default)s)")
    add("--iterations", type=positive, default=iterations, metavar="N", help="timed iterations (default: %(default)s)")
    add("--warmup", type=natural, default=1, metavar="N", help="iterations before them (default: %(default)s)")
    add("--forward-only", action="store_true", help="no backward pass")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="(default: %(default)s)")
    add("--transport", choices=TRANSPORTS, default="mpi", help="how tensors travel (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), help="(default: cuda where there is one)")
    add("--threads", type=positive, default=1, metavar="N", help="of each rank's computation (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of parameters, input and dropout (default: %(default)s)")
    add("--check", action="store_true", help="compare result and gradients with those of one process (not timed)")
    add("--json", metavar="FILE", help="write what was measured")


def choose_device(name: str | None, rank: int) -> torch.device:
    """The device of this rank: GPUs of a host are dealt out by the launcher's local rank."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TransportError("--device cuda: torch finds no CUDA device here")
    launched = local_rank()
    device = torch.device("cuda", (rank if launched is None else launched) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def make_transport(name: str, comm: Any, device: torch.device) -> Transport:
    """The transport between all ranks of an MPI communicator. Raises TransportError where it cannot be had."""
    on_gpu = device.type == "cuda"
    if name in ("nccl", "mpi-cuda-aware") and not on_gpu:
        raise TransportError(f"--transport {name} moves what is on a GPU; use mpi or gloo with --device cpu")
    watch = Stopwatch(device)
    if name.startswith("mpi"):
        return MpiTransport(comm, watch, staged=on_gpu and name == "mpi")
    init_process_group(comm, name)
    return TorchTransport(None, watch, staged=on_gpu and name == "gloo")
