"""Results of nccl-tests (or rccl-tests) and of the OSU micro-benchmarks (OMB): the tables that they print.

nccl-tests' JSON files (`-J`) have the same values, and are read as such tables (`nccl_tests_json`).

A text may have several tables, one after the other, and other lines between them. nccl-tests names its ranks and hosts:

    # nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 ...
    #  Rank  0 Group  0 Pid  12345 on     node1 device  0 [0x07] NVIDIA A100-SXM4-40GB
    #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
               8             2     float     sum      -1    28.10    0.00    0.00      0    27.50    0.00    0.00      0

It names the operation only in newer versions ("Collective test starting: all_reduce_perf"). Else, it follows from a
command in the text or the name of the file, or from the columns. OMB names the operation, and neither ranks nor hosts:
they follow from a launch command in the text, or from a line "# ranks: 16, hosts: 2".

    # OSU MPI Allreduce Latency Test v7.3
    # Size       Avg Latency(us)
    4                       1.05

- nccl-tests' size is the payload. OMB's is that of one rank's share for allgather, alltoall, gather and scatter.
- nccl-tests' time is the mean over the ranks of one round of calls (out of place), and so is OMB's.
- sendrecv_perf exchanges messages in a ring of all ranks. It is no ping-pong, and left out.

Sources: NVIDIA/nccl-tests, src/common.cu and doc/PERFORMANCE.md; OMB, util/osu_util_mpi.c and its collectives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from commtrace.volume import busbw_factor

from . import NetworkError
from .bench_operations import BARRIER, PING_PONG, WINDOW
from .measuring import BenchRow
from .nccl_tests_json import is_nccl_tests_json, table_lines

_HEAD: Final = 1 << 16
"""Number of first bytes of a file in which a table, or what a benchmark prints before it, begins."""
_LARGEST_FILE: Final = 64 << 20
_MOST_RANKS: Final = 1 << 20
_LONGEST_US: Final = 1e12

_NCCL_START: Final = re.compile(r"#\s*(nThread\s|Collective test starting)")
_NCCL_ITERATIONS: Final = re.compile(r"(?<!warmup )(?<!agg )\biters: (\d+)")
_NCCL_RANK: Final = re.compile(
    r"#\s+Rank\s+\d+\s+(?:Group\s+(?P<group>\d+)\s+)?Pid\s+\d+\s+on\s+(?P<host>\S+)\s+device"
)
_NCCL_HEAD: Final = re.compile(r"#\s+size\s+count\s+type\s")
_NCCL_OPERATION: Final = re.compile(
    r"Collective test starting: (?P<started>\w+)_perf|"
    r"\b(?P<command>all_?(?:reduce|gather|to_?all)v?|reduce_?scatter|broadcast|reduce|gather|scatter|sendrecv|hypercube)"
    r"_perf\b"
)
_FILE_NAME: Final = re.compile(r"all_?(?:reduce|gather|to_?all)|reduce_?scatter|broadcast|reduce|gather|scatter")
_NCCL_NAMES: Final = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
    "broadcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter",
}  # fmt: skip
_NCCL_BY_COLUMNS: Final = {
    ("sum", "-1"): ("all_reduce", "reduce_scatter"), ("sum", "0"): ("reduce",), ("none", "0"): ("broadcast",),
}  # fmt: skip
"""Operations by reduction and root, where busbw / algbw tells them apart."""
_RATIO_ERROR: Final = 0.03
"""Relative error of busbw / algbw: both are rounded to two decimals."""

_OMB_TITLE: Final = re.compile(
    r"#\s*(?:OSU|OMB)\s(?:Python\s)?(?P<library>MPI|NCCL|RCCL|XCCL)\S*\s(?P<name>.{1,60}?) Test\b"
)
_OMB_HEAD: Final = re.compile(r"#\s*(Size\s+)?(Avg )?(Latency|Lat|Bandwidth)\s?\(")
_OMB_NAMES: Final = {
    "Allreduce Latency": "all_reduce", "Allgather Latency": "all_gather", "Alltoall Latency": "all_to_all",
    "All-to-All Personalized Exchange Latency": "all_to_all", "Reduce_scatter Latency": "reduce_scatter",
    "Broadcast Latency": "broadcast", "Bcast Latency": "broadcast", "Reduce Latency": "reduce",
    "Gather Latency": "gather", "Scatter Latency": "scatter", "Barrier Latency": BARRIER,
    "Latency": PING_PONG, "Bandwidth": WINDOW,
}  # fmt: skip
_OMB_SHARES: Final = ("all_gather", "all_to_all", "gather", "scatter")
"""Operations whose size in OMB is that of one rank's share."""

_STATED: Final = re.compile(r"#\s*ranks:\s*(\d+)(?:,?\s*hosts:\s*(\d+))?")
_LAUNCH: Final = re.compile(r"\b(?P<launcher>mpirun(?:_rsh)?|mpiexec(?:\.hydra)?|srun)\s.*")
_LAUNCH_RANKS: Final = re.compile(r"\s(?:-np|-n|--np|--ntasks)[ =]?(\d+)\b")
_SLURM_HOSTS: Final = re.compile(r"\s(?:-N|--nodes)[ =]?(\d+)\b")
_SLURM_PER_HOST: Final = re.compile(r"\s--ntasks-per-node[ =](\d+)\b")
_MPI_PER_HOST: Final = re.compile(r"\s(?:--?ppn|--?npernode|-perhost|-N|--?map-by ppr:)[ =]?(\d+)\b")
_DATA: Final = re.compile(r"\d+(\.\d*)?(\s|$)")
_VERSIONS: Final = (
    ("nccl-tests", re.compile(r"nccl-tests version (\S+)")),
    ("nccl", re.compile(r"NCCL version (\d[\w.+]*)")),
    ("OMB", re.compile(r"# (?:OSU|OMB)\b.* Test v?(\d[\w.]*)")),
)


def is_benchmark_table(path: Path) -> bool:
    """Return whether a file begins as the output of nccl-tests or OMB does. Raises OSError."""
    with open(path, "rb") as file:
        head = file.read(_HEAD).decode("utf-8", "replace")
    if head.lstrip()[:1] == "{":
        return is_nccl_tests_json(head)
    return any(pattern.search(head) for pattern in (_NCCL_HEAD, _NCCL_START, _OMB_TITLE))


@dataclass
class BenchmarkTables:
    """What the tables of some files have.

    Attributes:
        rows: The first row of each operation, number of ranks, number of hosts, and payload.
        hosts: The hosts of the largest benchmark, each with its number of ranks.
        versions: Versions by program or library.
        devices: Names of the devices.
        programs: The benchmarks.
        libraries: What they measured, such as "MPI".
    """

    rows: dict[tuple[str, int, int, int], BenchRow] = field(default_factory=dict)
    hosts: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    devices: set[str] = field(default_factory=set)
    programs: set[str] = field(default_factory=set)
    libraries: set[str] = field(default_factory=set)

    def add(self, row: BenchRow, hosts: Sequence[dict[str, Any]]) -> None:
        """Add a row and the hosts that it was measured on."""
        self.rows.setdefault((row.op, row.ranks, row.hosts, row.payload_bytes), row)
        if sum(host["ranks"] for host in hosts) > sum(host["ranks"] for host in self.hosts):
            self.hosts = [*hosts]


def read_tables(path: Path) -> BenchmarkTables:
    """Read the tables of a file, or of all such files in a directory.

    Raises:
        NetworkError: A file cannot be read, or has no table, or one without ranks, hosts or operation.
    """
    tables = BenchmarkTables()
    try:
        files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
        for file in files:
            if file == path or is_benchmark_table(file):
                _TableFile(file, tables).read()
    except OSError as error:
        raise NetworkError(f"{path}: cannot be read ({error.strerror})") from error
    if not tables.rows:
        raise NetworkError(
            f"{path}: no table of nccl-tests or the OSU micro-benchmarks with an operation that commtrace predicts; "
            "save the whole output of all_reduce_perf or osu_allreduce, for example"
        )
    return tables


class _NcclRow(NamedTuple):
    """A row of nccl-tests: line, payload in bytes, microseconds, bandwidths, and its reduction, root and check."""

    line: int
    size: int
    time_us: float
    algbw: float
    busbw: float
    redop: str
    root: str
    wrong: int | None


@dataclass
class _Benchmark:
    """What a text says of the benchmark whose table follows."""

    ranks: int = 0
    hosts: int = 0
    calls: int | None = None
    members: list[tuple[str, str]] = field(default_factory=list)
    """Group and host of each rank, of nccl-tests."""
    prefix: str = ""
    """What a launcher puts before each line."""
    heads: list[str] = field(default_factory=list)
    """Columns of its table; empty: no table has begun."""
    is_omb: bool = False
    command: str = ""
    """Name of nccl-tests' program; "": not known."""
    op: str = ""
    """Operation of OMB; "": none that is predicted."""
    rows: list[_NcclRow] = field(default_factory=list)
    """Rows of nccl-tests, until the table ends."""


class _TableFile:
    """A file that is read line by line."""

    def __init__(self, path: Path, tables: BenchmarkTables) -> None:
        self._path, self._tables = path, tables
        self._benchmark = _Benchmark()
        name = _FILE_NAME.search(path.name.lower())
        self._command = name[0] if name is not None else ""
        """Name of nccl-tests' last program in the text; before the first, what the file's name has of one."""
        self._line = 0

    def read(self) -> None:
        """Add the rows of the file. Raises NetworkError, OSError."""
        if self._path.stat().st_size > _LARGEST_FILE:
            raise NetworkError(f"{self._path}: larger than {_LARGEST_FILE >> 20} MiB; give only the benchmark's output")
        text = self._path.read_text("utf-8", "replace")
        lines = table_lines(self._path, text) if is_nccl_tests_json(text) else text.splitlines()
        for number, line in enumerate(lines, 1):
            self._line = number
            self._read_line(line)
        self._finish_nccl()

    def _read_line(self, line: str) -> None:
        benchmark = self._benchmark
        text = line.removeprefix(benchmark.prefix).strip()
        if benchmark.heads and _DATA.match(text):
            self._read_row(text)
            return
        for name, pattern in _VERSIONS:
            if match := pattern.search(line):
                self._tables.versions[name] = match[1][:40]
        if match := _NCCL_RANK.search(line):
            if benchmark.heads:
                benchmark = self._begin()
            benchmark.members.append((match["group"] or "0", match["host"]))
            self._tables.devices.add(line.rpartition("]")[2].strip()[:80])
        elif match := _OMB_TITLE.search(line):
            benchmark = self._begin()
            benchmark.is_omb, benchmark.prefix = True, line[: match.start()]
            benchmark.op = _OMB_NAMES.get(match["name"], "")
            self._tables.libraries |= {match["library"]} if benchmark.op else set()
        elif benchmark.is_omb and _OMB_HEAD.search(line):
            benchmark.heads = re.split(r"\s{2,}|(?<=\))\s", text.lstrip("# "))
        elif match := _NCCL_HEAD.search(line):
            benchmark = self._begin() if benchmark.heads or benchmark.is_omb else benchmark
            benchmark.prefix, benchmark.heads = line[: match.start()], line[match.start() :].lstrip("# ").split()
            benchmark.command = self._command
        elif match := _STATED.search(line):
            benchmark.ranks, benchmark.hosts = int(match[1][:9]), int((match[2] or "0")[:9])
        else:
            self._read_command(line)

    def _begin(self) -> _Benchmark:
        """Begin a benchmark; what a line or a launch command said of ranks and hosts stays."""
        self._finish_nccl()
        before = self._benchmark
        self._benchmark = _Benchmark(ranks=before.ranks, hosts=before.hosts, prefix=before.prefix)
        return self._benchmark

    def _read_command(self, line: str) -> None:
        """Take what a line says of the benchmark that begins or is started."""
        benchmark = self._benchmark
        if _NCCL_START.search(line):
            benchmark = self._begin() if benchmark.heads or benchmark.is_omb else benchmark
            iterations = _NCCL_ITERATIONS.search(line)
            benchmark.calls = int(iterations[1][:9]) if iterations is not None else benchmark.calls
        if match := _LAUNCH.search(line):
            benchmark.ranks, benchmark.hosts = _launched(match["launcher"], match[0]) or (
                benchmark.ranks,
                benchmark.hosts,
            )
        if match := _NCCL_OPERATION.search(line):
            self._command = match["started"] or match["command"]

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _read_row(self, text: str) -> None:
        values = text.split()
        if not self._benchmark.is_omb:
            self._benchmark.rows.append(self._nccl_row(values, text))
            return
        for row in self._omb_row(values, text):
            self._tables.add(row, self._hosts(row))

    def _nccl_row(self, values: Sequence[str], text: str) -> _NcclRow:
        """Return a row by the heads of its columns; those of times and bandwidths in place come second."""
        heads = self._benchmark.heads
        if not {"time", "algbw", "busbw"} <= {*heads} or len(values) <= heads.index("busbw"):
            raise self._error(f"a row of {len(heads)} values is expected, but this is {text!r:.60}")
        by_head = {head: values[heads.index(head)] for head in heads if heads.index(head) < len(values)}
        wrong = by_head.get("#wrong", "")
        time_us, algbw, busbw = (self._positive(by_head[head]) for head in ("time", "algbw", "busbw"))
        return _NcclRow(
            self._line, self._whole(by_head["size"]), time_us, algbw, busbw, by_head.get("redop", ""),
            by_head.get("root", "-1"), int(wrong[:18]) if wrong.isdigit() and wrong.isascii() else None,
        )  # fmt: skip

    def _finish_nccl(self) -> None:
        """Add the rows of a table of nccl-tests. Raises NetworkError."""
        benchmark = self._benchmark
        if not benchmark.rows:
            return
        self._line = benchmark.rows[0].line
        ranks, hosts = self._nccl_ranks()
        try:
            op = _nccl_operation(benchmark.command, max(benchmark.rows, key=lambda row: row.size), ranks)
        except ValueError as error:
            raise self._error(str(error)) from error
        for row in benchmark.rows if op else ():
            if row.size and row.time_us:
                bench_row = _row(op, ranks, hosts, row.size, row.time_us, benchmark.calls, wrong=row.wrong)
                self._tables.add(bench_row, self._hosts(bench_row))
        self._tables.programs.add("nccl-tests")
        self._tables.libraries.add("NCCL")
        benchmark.rows = []

    def _nccl_ranks(self) -> tuple[int, int]:
        """Return the ranks and hosts of a communicator."""
        hosts = self._hosts_of_group()
        if len(hosts) > 1:
            return len(hosts), len({*hosts})
        if self._benchmark.ranks and self._benchmark.hosts and not hosts:
            return self._checked(self._benchmark.ranks, self._benchmark.hosts)
        raise self._error(
            "it does not name two or more ranks: the lines '#  Rank  0 Group  0 Pid ...' that nccl-tests prints before "
            "the table are needed, or a line '# ranks: 8, hosts: 1'"
        )

    def _hosts_of_group(self) -> list[str]:
        """Return the host of each rank that nccl-tests names; with NCCL_TESTS_SPLIT, those of the first group."""
        members = self._benchmark.members
        return [host for group, host in members if group == members[0][0]]

    def _omb_row(self, values: Sequence[str], text: str) -> Iterator[BenchRow]:
        benchmark, heads = self._benchmark, [head.lower() for head in self._benchmark.heads]
        if not benchmark.op:
            return
        if len(values) < len(heads):
            raise self._error(f"a row of {len(heads)} values is expected, but this is {text!r:.60}")
        by_head = dict(zip(heads, values, strict=False))

        def value(*starts: str) -> str | None:
            return next((text for head, text in by_head.items() if head.startswith(starts)), None)

        stated = value("avg", "latency", "lat", "bandwidth")
        if stated is None:
            raise self._error(f"no column of latencies or bandwidths, but {', '.join(benchmark.heads)!r:.60}")
        size, number = self._whole(by_head.get("size", "0")), self._positive(stated)
        ranks, hosts = self._omb_ranks()
        payload = size * ranks if benchmark.op in _OMB_SHARES else size
        time_us = size / number if benchmark.op == WINDOW and number else number
        least, most, calls = (value(start) for start in ("min", "max", "iterations"))
        self._tables.programs.add("OSU micro-benchmarks")
        if time_us:
            yield _row(
                benchmark.op, ranks, hosts, payload, time_us, self._whole(calls) if calls is not None else None,
                rank_min_us=self._positive(least) if least is not None else None,
                rank_max_us=self._positive(most) if most is not None else None,
            )  # fmt: skip

    def _omb_ranks(self) -> tuple[int, int]:
        benchmark, is_pair = self._benchmark, self._benchmark.op in (PING_PONG, WINDOW)
        if not benchmark.hosts or not benchmark.ranks:
            raise self._error(
                "OMB does not print the number of ranks and hosts; put a line '# ranks: 16, hosts: 2' before the "
                "table, or the launch command, if it states both"
            )
        ranks, hosts = self._checked(benchmark.ranks, benchmark.hosts)
        return (2, min(hosts, 2)) if is_pair else (ranks, hosts)

    # ---- values ------------------------------------------------------------------------------------------------------

    def _hosts(self, row: BenchRow) -> list[dict[str, Any]]:
        """Return the hosts of a row with their numbers of ranks."""
        if hosts := self._hosts_of_group():
            return [{"host": host, "ranks": hosts.count(host)} for host in dict.fromkeys(hosts)]
        return [
            {"host": f"host {number}", "ranks": len(range(number, row.ranks, row.hosts))} for number in range(row.hosts)
        ]

    def _checked(self, ranks: int, hosts: int) -> tuple[int, int]:
        if not 2 <= ranks <= _MOST_RANKS or not 1 <= hosts <= ranks:
            raise self._error(f"{ranks:,} ranks on {hosts:,} hosts are impossible; correct the line that states them")
        return ranks, hosts

    def _whole(self, text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 15:
            raise self._error(f"{text!r:.40} is no number of bytes or calls; remove the line, or measure again")
        return int(text)

    def _positive(self, text: str) -> float:
        number = float(text) if re.fullmatch(r"[0-9]{1,20}(\.[0-9]{0,20})?(e[+-]?[0-9]{1,2})?", text) else math.nan
        if not 0 <= number < _LONGEST_US:
            raise self._error(f"{text!r:.40} is no time or bandwidth; remove the line, or measure again")
        return number

    def _error(self, problem: str) -> NetworkError:
        return NetworkError(f"{self._path}: line {self._line:,}: {problem}")


def _nccl_operation(command: str, largest: _NcclRow, ranks: int) -> str:
    """Return the operation of a table of nccl-tests; "" for one that is not predicted.

    The ratio of busbw to algbw contradicts a wrong name of a file, and tells the operation if nothing names it.

    Args:
        command: Name of the program without "_perf"; "": not known.
        largest: The row of the largest size.
        ranks: Number of ranks.

    Raises:
        ValueError: The operation is not known; the message says what to do.
    """
    stated = command.lower().replace("_", "")
    if stated and stated not in _NCCL_NAMES:
        return ""
    ratio = largest.busbw / largest.algbw if largest.algbw >= 1 else None
    by_columns = _NCCL_BY_COLUMNS.get((largest.redop, largest.root), ())
    near = [
        op for op in ((_NCCL_NAMES[stated],) if stated else by_columns)
        if ratio is None or abs(ratio - float(busbw_factor(op, ranks) or 0)) <= _RATIO_ERROR * ratio
    ]  # fmt: skip
    if len(near) == 1:
        return near[0]
    if stated:
        raise ValueError(
            f"the bandwidths of this table are not those of {_NCCL_NAMES[stated]} among {ranks:,} ranks; put its "
            "command, such as 'all_gather_perf', and all lines '#  Rank ...' before the table"
        )
    raise ValueError(
        "neither the text nor the name of the file has the operation of this table; put its command, such as "
        "'all_gather_perf', into a line before the table"
    )


def _launched(launcher: str, command: str) -> tuple[int, int] | None:
    """Return the ranks and hosts that a launch command states, 0 hosts if it does not; None without ranks.

    `-N` is the number of hosts for srun, and that of ranks per host for Open MPI.
    """
    is_slurm = launcher == "srun"

    def number(pattern: re.Pattern[str]) -> int:
        match = pattern.search(command)
        return int(match[1][:9]) if match is not None else 0

    ranks, hosts = number(_LAUNCH_RANKS), number(_SLURM_HOSTS) if is_slurm else 0
    per_host = number(_SLURM_PER_HOST if is_slurm else _MPI_PER_HOST)
    ranks = ranks or hosts * per_host
    return (ranks, hosts or (math.ceil(ranks / per_host) if per_host else 0)) if ranks else None


def _row(
    op: str, ranks: int, hosts: int, payload: int, time_us: float, calls: int | None, *, wrong: int | None = None,
    rank_min_us: float | None = None, rank_max_us: float | None = None,
) -> BenchRow:  # fmt: skip
    """Return the row of one round of calls."""
    of_round = (time_us,) * 4
    return BenchRow(op, ranks, hosts, payload, calls, 1, *of_round, time_us, rank_min_us, rank_max_us, wrong)
