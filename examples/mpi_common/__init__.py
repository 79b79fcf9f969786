"""Shared code of the MPI examples: transports, differentiable collectives, options, and the scaling command.

* `transports`: MPI or torch.distributed behind one interface (`mpi_transport`, `torch_transport`)
* `collectives`: the same operations, differentiable
* `dropout`: masks that do not depend on how a tensor is divided
* `iterations`: the loop, its results, and the comparison with one process
* `expected_calls`: the calls that theory expects
* `program`, `options`: start, end and command line of an example
* `scaling`: traced runs on several numbers of ranks, compared by `commtrace scaling`
"""

from __future__ import annotations

from .errors import ExampleError, ShapeError, TransportError

__all__ = ["ExampleError", "ShapeError", "TransportError"]
