"""python what_if_mpi.py [NAME=VALUE ...]: a training with mpi4py whose network or late rank is changed.

In each step, a message goes to the next rank and one comes back, gradients of several sizes are all_reduced one after
the other, and parameters are broadcast. Values: steps; backward_ms: what computing the gradients takes for each MiB, in
which the rank sleeps; late (a rank), late_ms.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Final

import numpy as np
from mpi4py import MPI

import commtrace

GRADIENTS_KIB: Final = (128, 512, 1024, 2048, 4096, 256)
PARAMETERS_KIB: Final = 2048
ACTIVATIONS_KIB: Final = 512
OPTIONS: dict[str, Any] = {"steps": 20, "backward_ms": 10.0, "late": -1, "late_ms": 0.0}
for argument in sys.argv[1:]:
    name, _, value = argument.partition("=")
    OPTIONS[name] = type(OPTIONS[name])(value)


def buffer(kib: int) -> Any:
    """Return a buffer of float32."""
    return np.ones(kib * 256, np.float32)


def main() -> None:
    """Train."""
    group = MPI.COMM_WORLD
    gradients = [buffer(kib) for kib in GRADIENTS_KIB]
    parameters, activations = buffer(PARAMETERS_KIB), buffer(ACTIVATIONS_KIB)
    for _ in range(OPTIONS["steps"]):
        if group.rank == OPTIONS["late"]:
            time.sleep(OPTIONS["late_ms"] / 1000)
        if group.rank < 2:
            forth, back = (group.Send, group.Recv) if group.rank == 0 else (group.Recv, group.Send)
            forth(activations, 1 - group.rank)
            back(activations, 1 - group.rank)
        for gradient in gradients:
            time.sleep(OPTIONS["backward_ms"] / 1000 * gradient.nbytes / (1 << 20))
            group.Allreduce(MPI.IN_PLACE, gradient)
        group.Bcast(parameters)
        commtrace.step()


if __name__ == "__main__":
    main()
