"""Results of `commtrace bench`, and their file: one JSON document.

{
  "format": "commtrace-network", "version": 1,
  "through": "torch", "backend": "gloo",
  "versions": {"python": "3.11.7", "commtrace": "0.1.0", "torch": "2.13.0"},
  "hosts": [{"host": "node17", "ranks": 2}],
  "machine": {"cpu": "AMD EPYC 7763", "cores": 2, "system": "Linux 6.1"},      the host of rank 0
  "environment": {"NCCL_ALGO": "Ring"},     variables that choose transports
  "date": "2026-11-21", "traced": false, "seconds": 0.2,
  "rows": [{"op": "all_reduce", "ranks": 2, "hosts": 1, "payload_bytes": 4, "calls": 400, "rounds": 10,
            "min_us": 101.2, ...}, ...],    the fields of `measuring.BenchRow`
  "fits": [{"op": "all_reduce", ...}]       the fits of the rows, for other programs; not read by commtrace
}
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from commtrace import identity
from commtrace.formatting import format_plural
from commtrace.output_files import atomic_write
from commtrace.process_setup.processor_limits import usable_cores
from commtrace.process_setup.variables import read_transport_variables

from . import NetworkError
from .bench_plan import BenchPlan
from .benchmark_tables import BenchmarkTables, is_benchmark_table, read_tables
from .fit import Fit, fit_operations
from .measuring import BenchRow

FORMAT, VERSION = "commtrace-network", 1


@dataclass(frozen=True)
class BenchResults:
    """Results of a measurement; the fields are those of the file.

    `traced`: commtrace was recording, so that every time includes its cost. Where `through` is neither "torch" nor
    "mpi4py", it is the benchmark that printed the results (`benchmark_tables`), and what it does not state is empty.
    """

    through: str
    backend: str
    versions: Mapping[str, str]
    hosts: Sequence[Mapping[str, Any]]
    machine: Mapping[str, Any]
    environment: Mapping[str, str]
    date: str
    traced: bool
    seconds: float
    rows: tuple[BenchRow, ...]

    @staticmethod
    def from_measurement(
        plan: BenchPlan, hosts: Sequence[str], library_versions: Mapping[str, str], rows: Sequence[BenchRow]
    ) -> BenchResults:
        """Return results that this process, rank 0, has just measured; `hosts` has the host of each rank."""
        return BenchResults(
            plan.through,
            plan.backend if plan.through == "torch" else "mpi",
            {**identity.versions(), **library_versions},
            [{"host": host, "ranks": ranks} for host, ranks in Counter(hosts).items()],
            {"cpu": _cpu_model(), "cores": usable_cores(), "system": f"{platform.system()} {platform.release()}"},
            read_transport_variables(),
            time.strftime("%Y-%m-%d"),
            os.environ.get("COMMTRACE", "0") not in ("", "0"),
            plan.seconds,
            tuple(rows),
        )

    @property
    def is_own(self) -> bool:
        """Whether `commtrace bench` measured the results."""
        return self.through in ("torch", "mpi4py")

    @staticmethod
    def from_tables(tables: BenchmarkTables) -> BenchResults:
        """Return the results of other benchmarks."""
        device = {"device": ", ".join(sorted(tables.devices))} if tables.devices else {}
        return BenchResults(
            " and ".join(sorted(tables.programs)), " and ".join(sorted(tables.libraries)), tables.versions,
            tables.hosts, device, {}, "", False, 0.0, tuple(tables.rows.values()),
        )  # fmt: skip

    @cached_property
    def fits(self) -> tuple[Fit, ...]:
        """One fit for each operation and group."""
        return fit_operations(self.rows)

    @property
    def title(self) -> str:
        """What was measured: "gloo through torch, 2 ranks on 1 host"."""
        ranks = sum(int(host["ranks"]) for host in self.hosts)
        name = self.versions.get("mpi", "MPI") if self.through == "mpi4py" else self.backend
        return f"{name} through {self.through}, {ranks} ranks on {format_plural(len(self.hosts), 'host')}"


def write_results(results: BenchResults, path: Path, *, force: bool = False) -> None:
    """Write the file of `results`. Raises OutputError if the file exists (without `force`) or cannot be written."""
    fits = [asdict(fit) for fit in results.fits]
    document: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(results), "fits": fits}
    for row in document["rows"]:
        for name, value in row.items():
            if isinstance(value, float):
                row[name] = float(f"{value:.6g}")  # further digits are noise
    with atomic_write(path, force=force) as part:
        part.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_results(path: Path) -> BenchResults:
    """Read a file of `write_results`, or the tables of other benchmarks in a file or directory.

    Raises:
        NetworkError: The file cannot be read, or is none of these.
    """
    if is_other_benchmark(path):
        return BenchResults.from_tables(read_tables(path))
    document = read_json_object(path)
    if document.get("format") != FORMAT:
        raise NetworkError(f"{path}: not written by commtrace bench (its format is not {FORMAT!r})")
    if document.get("version") != VERSION:
        raise NetworkError(f"{path}: version {document.get('version')!r} of the format; this commtrace reads {VERSION}")
    try:
        values = {field.name: document[field.name] for field in fields(BenchResults)}
        return BenchResults(**{**values, "rows": tuple(BenchRow(**row) for row in document["rows"])})
    except (KeyError, TypeError, ValueError) as error:
        raise NetworkError(f"{path}: damaged ({type(error).__name__}: {error}); measure again") from error


def is_other_benchmark(path: Path) -> bool:
    """Return whether a path is a table of nccl-tests or the OSU micro-benchmarks, or a directory."""
    with contextlib.suppress(OSError):
        return path.is_dir() or is_benchmark_table(path)
    return False


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Raises:
        NetworkError: The file cannot be read, or holds something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NetworkError(f"{path}: cannot be read ({error.strerror}); commtrace bench writes such a file") from error
    except ValueError as error:
        raise NetworkError(
            f"{path}: not JSON ({error}), and no table of nccl-tests or the OSU micro-benchmarks; commtrace bench "
            "writes a file that can be used"
        ) from error
    if not isinstance(document, dict):
        raise NetworkError(f"{path}: an object of keys and values is expected, but this is {document!r:.40}")
    return document


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        if match := re.search(r"^model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match[1].strip()
    return platform.machine()
