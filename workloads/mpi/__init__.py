"""What the MPI workloads share: ways to move tensors between ranks, with gradients, and what it took.

    transports     MPI, and torch.distributed in its place, behind one interface
    collectives    the same, differentiable
    dropout        masks that do not depend on how a tensor is divided
    stopwatch      seconds by part of the iteration
    launch         `mpiexec` on this machine
    outcome        what a run measured, gathered on rank 0
    tables         times by rank count, and what stops the scaling
"""

from __future__ import annotations

from .errors import ShapeError, TransportError, WorkloadError

__all__ = ["ShapeError", "TransportError", "WorkloadError"]
