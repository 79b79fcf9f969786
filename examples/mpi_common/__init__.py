"""What the MPI workloads share: ways to move tensors between ranks, with gradients, and what it took.

* `transports`: MPI, and torch.distributed in its place, behind one interface
* `collectives`: the same, differentiable
* `dropout`: masks that do not depend on how a tensor is divided
* `stopwatch`: seconds by part of the iteration
* `outcome`: what a run measured, gathered on rank 0
* `tables`: times by rank count, and what stops the scaling
* `program`, `options`: how a workload starts and ends, and its command line
* `launch`, `scaling`: `mpiexec` on this machine, for several numbers of ranks
"""

from __future__ import annotations

from .errors import ExampleError, ShapeError, TransportError

__all__ = ["ExampleError", "ShapeError", "TransportError"]
