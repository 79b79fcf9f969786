"""What a measurement shall be: which operations and sizes, through which library, among how many ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from . import NetworkError
from .operations import ELEMENT_BYTES, OPERATIONS

THROUGH: Final = ("torch", "mpi4py")
BACKENDS: Final = ("gloo", "mpi", "nccl")
LARGEST: Final = 64 << 20


@dataclass(frozen=True)
class BenchPlan:
    """All ranks have the same."""

    through: str = "torch"
    backend: str = "gloo"
    """Of torch.distributed."""
    operations: tuple[str, ...] = OPERATIONS
    min_bytes: int = ELEMENT_BYTES
    max_bytes: int = LARGEST
    group_sizes: tuple[int, ...] = ()
    """Beside that of all ranks."""
    seconds: float = 0.2
    """For one operation and size, warm-up not counted; a large message may take longer."""
    timeout_s: float = 300.0
    """After which a call that does not end is an error."""
    out: str = "network.json"
    force: bool = False
    form: str = "auto"
    """nccl, osu, or auto: as the library's people print it."""
    width: int = 80

    def to_json(self) -> str:
        """For a process that is started."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> BenchPlan:
        """The reverse of `to_json`."""
        row = json.loads(text)
        for name in ("operations", "group_sizes"):
            row[name] = tuple(row[name])
        return BenchPlan(**row)

    def groups(self, world: int) -> list[int]:
        """Sizes of the groups that are measured, ascending. Raises NetworkError for one that there cannot be."""
        if world < 2:
            raise NetworkError(
                "there is one rank, and nothing to measure; give --nproc 2, or start under torchrun, srun or mpiexec"
            )
        for size in self.group_sizes:
            if not 2 <= size <= world:
                raise NetworkError(
                    f"--group-sizes: a group of {size} among {world} ranks; give numbers from 2 to {world}"
                )
        return sorted({*self.group_sizes, world})


def select_operations(names: Sequence[str]) -> tuple[str, ...]:
    """Operations by name, in the order of OPERATIONS. Raises NetworkError for an unknown one."""
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown:
        raise NetworkError(f"--operations: no operation {', '.join(unknown)}; there are {', '.join(OPERATIONS)}")
    return tuple(op for op in OPERATIONS if op in names)
