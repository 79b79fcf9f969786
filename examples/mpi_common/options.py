"""Options that the MPI examples share, and the device and transport that they choose."""

from __future__ import annotations

import argparse
from typing import IO, Any

import torch

from commtrace.commands.option_types import non_negative_integer, positive_integer
from commtrace.launchers import launcher_value

from .errors import TransportError
from .mpi_transport import MpiTransport
from .torch_transport import TorchTransport, init_process_group
from .transports import Transport

TRANSPORTS = ("mpi", "mpi-cuda-aware", "nccl", "gloo")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Parser(argparse.ArgumentParser):
    """An argument parser that prints help and errors on rank 0 only."""

    def __init__(self, rank: int, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)
        self._prints = rank == 0

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if self._prints:
            super()._print_message(message, file)


def probability(text: str) -> float:
    """Parse a number from 0, below 1."""
    number = float(text)
    if not 0.0 <= number < 1.0:
        raise ValueError
    return number


def add_common(parser: argparse.ArgumentParser, iterations: int, dropout: float) -> None:
    """Add the options of every MPI example."""
    add = parser.add_argument
    add("--dropout", type=probability, default=dropout, metavar="P", help="probability (default: %(default)s)")
    add(
        "--iterations", type=positive_integer, default=iterations, metavar="N", help="iterations (default: %(default)s)"
    )
    add(
        "--warmup",
        type=non_negative_integer,
        default=1,
        metavar="N",
        help="warm-up iterations before them (default: %(default)s)",
    )
    add("--forward-only", action="store_true", help="no backward pass")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="(default: %(default)s)")
    add("--transport", choices=TRANSPORTS, default="mpi", help="how tensors are sent (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), help="(default: cuda if available)")
    add("--threads", type=positive_integer, default=1, metavar="N", help="threads of each rank (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of parameters, input and dropout (default: %(default)s)")
    add(
        "--check",
        action="store_true",
        help="after the last iteration, compare results and gradients with those of one process",
    )


def choose_device(name: str | None, rank: int) -> torch.device:
    """Return the device of this rank; the launcher's local rank chooses among the GPUs of a host."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TransportError("--device cuda: torch finds no CUDA device here")
    launched = launcher_value("local_rank")
    device = torch.device("cuda", (rank if launched is None else launched) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def make_transport(name: str, comm: Any, device: torch.device) -> Transport:
    """Create the transport between all ranks of an MPI communicator. Raises TransportError if it is not available."""
    on_gpu = device.type == "cuda"
    if name in ("nccl", "mpi-cuda-aware") and not on_gpu:
        raise TransportError(f"--transport {name} needs tensors on a GPU; use mpi or gloo with --device cpu")
    if name.startswith("mpi"):
        return MpiTransport(comm, staged=on_gpu and name == "mpi")
    init_process_group(comm, name)
    return TorchTransport(None, staged=on_gpu and name == "gloo")
