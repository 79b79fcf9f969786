"""The plan of a measurement: which operations and sizes, through which library, among how many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import NetworkError
from .bench_operations import BENCH_OPERATIONS, ELEMENT_BYTES


@dataclass(frozen=True)
class BenchPlan:
    """What to measure; the same on all ranks."""

    through: str = "torch"  # the library, "torch" or "mpi4py"
    backend: str = "gloo"  # backend of torch.distributed: "gloo", "mpi" or "nccl"
    operations: Sequence[str] = BENCH_OPERATIONS  # names, in the order of BENCH_OPERATIONS
    min_bytes: int = ELEMENT_BYTES  # smallest payload
    max_bytes: int = 64 << 20  # largest payload
    group_sizes: Sequence[int] = ()  # sizes of groups to measure in addition to all ranks
    seconds: float = 0.2  # time for one operation and size, without warm-up; a large message may take longer
    timeout: float = 300.0  # seconds after which an incomplete call is an error
    out: str = "network.json"  # file for the results
    force: bool = False  # whether `out` may be replaced
    form: str = "auto"  # form of the tables: "nccl", "osu" or "auto"
    width: int = 80  # output width in characters

    def groups(self, world_size: int) -> list[int]:
        """Return the sizes of the groups to measure, ascending.

        Raises:
            NetworkError: There is only one rank, or a group has fewer than two ranks or more than the job.
        """
        if world_size < 2:
            raise NetworkError(
                "there is only one rank: nothing to measure; give --nproc 2, or start under torchrun, srun or mpiexec"
            )
        for size in self.group_sizes:
            if not 2 <= size <= world_size:
                raise NetworkError(
                    f"--group-sizes: a group of {size} among {world_size} ranks; give numbers from 2 to {world_size}"
                )
        return sorted({*self.group_sizes, world_size})


def select_operations(names: Sequence[str]) -> tuple[str, ...]:
    """Return the operations of these names, in the order of BENCH_OPERATIONS.

    Raises:
        NetworkError: A name is not in BENCH_OPERATIONS.
    """
    if unknown := [name for name in names if name not in BENCH_OPERATIONS]:
        raise NetworkError(
            f"--operations: no operation {', '.join(unknown)}; choose from {', '.join(BENCH_OPERATIONS)}"
        )
    return tuple(op for op in BENCH_OPERATIONS if op in names)
