"""Predictions of `commtrace whatif` beside what happened: real jobs of gloo and MPI before and after one change.

Links are network namespaces whose only interface is limited by a token bucket filter (tc-tbf(8)); this needs root. A
prediction reads only the log of the first run, and equal runs for its interval. Of networks, and of sizes of buckets,
each ordered pair counts. Predictions of networks and late ranks are printed before the second run. MPI is Open MPI; if
it is not what `mpiexec` starts, put its launcher into MPIEXEC and its library into MPI4PY_LIBMPI:

    export MPIEXEC="prterun --personality ompi --map-by :oversubscribe --bind-to none"
    sudo -E python benchmarks/what_if_pairs.py --out pairs.json    # an hour
    python benchmarks/what_if_pairs.py --show pairs.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

from layout_pairs import links, run
from mpi_groups import launcher

from commtrace.analyses.what_if.changed_run import DoesNotApplyError, replayed_run
from commtrace.analyses.what_if.changes import changed_run
from commtrace.analyses.what_if.predictions import median_step_ns, variation_of_runs, what_if
from commtrace.network.mpiexec import mpiexec_variables
from commtrace.run import open_run

TRAINING: Final = Path(__file__).with_name("what_if_training.py")
OVERLAPPING: Final = Path(__file__).with_name("what_if_overlap.py")
OF_MPI: Final = Path(__file__).with_name("what_if_mpi.py")
MPI: Final = "mpi"
MPI_VARIABLES: Final = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}
"""Messages between ranks of Open MPI pass the link, not the memory of the host."""
RATES: Final = ("100mbit", "200mbit", "300mbit", "500mbit", "1gbit")
"""Networks. From 2 Gbit/s on, two cores limit transfers, and no longer the link."""
STRAGGLER_RATE: Final = "500mbit"
STEPS: Final = ("steps=20",)
SCHEMES: Final = ("ddp", "zero1", "fsdp2", MPI)
RANKS: Final = 2
LATE: Final = (10.0, 20.0, 30.0, 50.0, 80.0, 120.0, 200.0)
BUCKETS_MB: Final = (1, 2, 4, 16)
"""Limits of buckets. All gradients fit into one of 16 MiB, from which nothing is predicted."""
BUCKET_JOBS: Final = (("300mbit", 0.0), ("1gbit", 0.0), ("4gbit", 0.0), ("1gbit", 15.0), ("4gbit", 15.0))
"""Network, and ms that backward sleeps for each MiB of gradients."""
REPETITIONS: Final = 3
WIDTHS: Final = "widths=512,512,1024,512,256,1024,512,512,256,512"
"""Layers of 0.5 to 2 MiB, 10.5 MiB together."""
BLOCKING_RATES: Final = ("300mbit", "1gbit")
SMALL: Final = "layers=40 width=128"
"""Layers of 66 kB: latency is much of their transfers."""
BLOCKING_LAYERS: Final = {WIDTHS: (0.25, 2.0, 4.0, 16.0), SMALL: (0.0625, 0.25, 1.0, 4.0)}
"""Layers -> limits of messages, MiB: the first one is less than any layer has."""
BLOCKING_OPTIONS: Final = {"zero2": "bucket_mb", "fsdp2": "unit_mb"}
"""Scheme -> the option with this limit. Units of FSDP2 are those of one layer, which are combined."""
BLOCKING_RUNS: Final = 2
DTYPE_RATES: Final = ("300mbit", "1gbit")
DTYPE_BACKWARD_MS: Final = (0.0, 15.0)
DTYPE_SCHEMES: Final = ("ddp", "fsdp2")
DTYPE_RUNS: Final = 2
OVERLAP_JOBS: Final = (
    ("buckets", 2, "200mbit", (), "overlap"),
    ("buckets", 2, "800mbit", (), "overlap"),
    ("fsdp2", 2, "200mbit", (), "overlap=all_gather"),
    ("fsdp2", 2, "200mbit", ("forward_ms=90",), "overlap=all_gather"),
    ("buckets", 4, "400mbit", (), "overlap"),
    ("fsdp2", 4, "400mbit", (), "overlap=all_gather"),
)
"""Scheme, ranks, network, options and change of the program that overlaps its communication, or does not. FSDP2 over
gloo gathers parameters in the background, but does not reduce gradients there."""
WORLD_SIZES: Final = {"buckets": (2, 4, 8), "fsdp2": (2, 4)}
WORLD_SIZE_RATE: Final = "200mbit"
WORLD_SIZE_NETWORK: Final = "25MB/s+200us"
"""Description of links of that rate; the latency is a guess."""


@dataclass(frozen=True)
class Case:
    """A pair of runs: the prediction from the first one, and the second one. Times in ns."""

    kind: str
    name: str
    change: str
    before_ns: float
    predicted_ns: float
    low_ns: float
    high_ns: float
    measured_ns: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_ns / self.measured_ns - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measured step lies in the interval."""
        return self.low_ns <= self.measured_ns <= self.high_ns


@contextlib.contextmanager
def link(rate: str) -> Iterator[list[str]]:
    """Yield the prefix of a command that runs where all bytes between processes pass one link of this rate."""
    name = f"whatif-{os.getpid()}"
    inside = ["ip", "netns", "exec", name]
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run([*inside, "ip", "link", "set", "lo", "mtu", "9000", "up"], check=True)
        shape = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        subprocess.run([*inside, *shape], check=True)
        yield inside
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def train(
    inside: Sequence[str], log: Path, scheme: str, *options: str, program: Path = TRAINING, ranks: int = RANKS
) -> None:
    """Record a training, unless that was done before."""
    if log.exists():
        return
    environment = {**os.environ, "COMMTRACE": str(log), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if scheme == MPI:
        launch = [*launcher(ranks), sys.executable, str(OF_MPI), *options]
        environment |= mpiexec_variables(ranks) | MPI_VARIABLES
    else:
        launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-port=29611"]
        launch += [str(program), scheme, *options]
    log.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([*inside, "timeout", "300", *launch], check=True, env=environment, capture_output=True)


def bench(inside: Sequence[str], out: Path, scheme: str = "") -> None:
    """Measure the network as a scheme uses it, unless that was done before."""
    if out.exists():
        return
    launch: list[str] = []
    own = ["--nproc", str(RANKS), "--operations", "all_reduce,all_gather,reduce_scatter,broadcast,barrier"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if scheme == MPI:
        launch, own = launcher(RANKS), ["--through", "mpi4py", "--operations", "all_reduce,broadcast,send_recv,barrier"]
        environment |= mpiexec_variables(RANKS) | MPI_VARIABLES
    options = ["--max-bytes", "8m", "--seconds", "0.2", "--out", str(out), "--force"]
    command = [*inside, "timeout", "300", *launch, sys.executable, "-m", "commtrace.cli", "bench", *own, *options]
    subprocess.run(command, check=True, capture_output=True, env=environment)


def announce(name: str, log: Path, change: str) -> None:
    """Print the prediction of a change of a run."""
    ns = what_if(changed_run(replayed_run(open_run(log)), change.split()))["step_ns"].iloc[-1]
    print(f"predicted: {name}: {ns / 1e6:.1f} ms", file=sys.stderr, flush=True)


def predicted(kind: str, name: str, log: Path, change: str, after: Path, equal: Sequence[Path] = ()) -> Case:
    """Return the prediction of a change of one run, and the measured step of another one.

    Args:
        kind: Kind of the change.
        name: Name of the case.
        log: The run before the change.
        change: The changes, divided by blanks.
        after: The run after it.
        equal: Runs that are equal among themselves, for the variation between runs.
    """
    variation = variation_of_runs([replayed_run(open_run(path)) for path in equal])
    table = what_if(changed_run(replayed_run(open_run(log)), change.split()), variation=variation)
    row = table.iloc[-1]
    before, step, low, high = map(float, (table["step_ns"].iloc[0], row.step_ns, row.low_ns, row.high_ns))
    measured = replayed_run(open_run(after)).replay
    return Case(kind, name, change, before, step, low, high, float(median_step_ns(measured, measured.delays)))


def equal_runs(folder: Path, scheme: str) -> list[Path]:
    """Return the logs of runs of a scheme that differ in nothing."""
    return [folder / f"{scheme}-{number}" for number in range(len(LATE))]


def networks(folder: Path, schemes: Sequence[str] = SCHEMES) -> Iterator[Case]:
    """Yield a case for each ordered pair of networks and scheme. Predictions are printed before the second runs.

    The networks are used from the slowest to the fastest, and back: the second run of a slower one is made there.
    """
    ways = [("up", at, RATES[:at]) for at in range(len(RATES))]
    ways += [("down", at, RATES[at + 1 :]) for at in reversed(range(len(RATES) - 1))]
    pairs = []
    for way, at, others in ways:
        with link(RATES[at]) as inside:
            for scheme in schemes:
                bench(inside, measured := folder / _bench_file(RATES[at], scheme), scheme)
                log = folder / way / RATES[at] / scheme
                for before in others:
                    recorded, name = folder / "up" / before / scheme, f"{scheme}, {before} to {RATES[at]}"
                    change = f"network={measured},{folder / _bench_file(before, scheme)}"
                    announce(name, recorded, change)
                    pairs.append((name, recorded, change, log, equal_runs(folder, scheme)))
                train(inside, log, scheme, *STEPS)
    for pair in pairs:
        yield predicted("network", *pair)


def _bench_file(rate: str, scheme: str) -> str:
    return f"{rate}-mpi.json" if scheme == MPI else f"{rate}.json"


def stragglers(folder: Path, schemes: Sequence[str] = SCHEMES) -> Iterator[Case]:
    """Yield a case for each scheme and late rank, without it, and a control: a run predicted from an equal one.

    Predictions are printed before the second runs.
    """
    change = "without-straggler=worst"
    with link(STRAGGLER_RATE) as inside:
        for scheme in schemes:
            equal = equal_runs(folder, scheme)
            logs = {late_ms: folder / f"{scheme}-late-{late_ms:g}" for late_ms in LATE}
            for (late_ms, log), after in zip(logs.items(), equal, strict=True):
                train(inside, log, scheme, *STEPS, "late=1", f"late_ms={late_ms}")
                announce(f"{scheme}, {late_ms:g} ms", log, change)
                train(inside, after, scheme, *STEPS)
            for (late_ms, log), after in zip(logs.items(), equal, strict=True):
                others = [path for path in equal if path != after]
                yield predicted("straggler", f"{scheme}, {late_ms:g} ms", log, change, after, others)
            for before, after in itertools.pairwise(equal):
                others = [path for path in equal if path != after]
                yield predicted(
                    "control", f"{scheme}, {before.name} and {after.name}", before, "compute=1x", after, others
                )


def buckets(folder: Path) -> Iterator[Case]:
    """Yield cases for each ordered pair of sizes of buckets: transfers fitted to the run, or to a measured network."""
    for rate, backward_ms in BUCKET_JOBS:
        options = [*STEPS, "samples=128", WIDTHS, f"backward_ms={backward_ms}"]
        with link(rate) as inside:
            bench(inside, folder / f"{rate}.json")
            for number, size in itertools.product(range(REPETITIONS), BUCKETS_MB):
                log = _bucket_run(folder, rate, backward_ms, size, number)
                train(inside, log, "ddp", f"bucket_mb={size}", *options)
    for job, (before, after) in itertools.product(BUCKET_JOBS, itertools.permutations(BUCKETS_MB, 2)):
        if before == BUCKETS_MB[-1]:
            continue
        file = folder / f"{job[0]}.json"
        equal = [_bucket_run(folder, *job, before, number) for number in range(REPETITIONS)]
        for number, log in enumerate(equal):
            name = f"{_bucket_job(*job)}, {before} MB to {after} MB"
            measured = _bucket_run(folder, *job, after, number)
            yield predicted("bucket", name, log, f"bucket={after}MB", measured, equal)
            yield predicted("bucket, bench", name, log, f"network={file},{file} bucket={after}MB", measured, equal)
    for job, size in itertools.product(BUCKET_JOBS, BUCKETS_MB):
        logs = [_bucket_run(folder, *job, size, number) for number in range(REPETITIONS)]
        for first, second in itertools.pairwise(logs):
            others = [log for log in logs if log != second]
            yield predicted("bucket, control", f"{_bucket_job(*job)}, {size} MB", first, "compute=1x", second, others)


def blocking_buckets(folder: Path) -> Iterator[Case]:
    """Yield cases of buckets whose calls block their rank: transfers from the run alone, or a measured network."""
    jobs = itertools.product(BLOCKING_RATES, BLOCKING_OPTIONS.items(), BLOCKING_LAYERS.items())
    for rate, (scheme, option), (layers, sizes) in jobs:
        job = ", ".join([scheme, rate, *(["small layers"] if layers == SMALL else [])])
        logs = folder / f"blocking-{job.replace(', ', '-').replace(' ', '-')}"
        runs = {size: [logs / f"{size:g}mb-{number}" for number in range(BLOCKING_RUNS)] for size in sizes}
        with link(rate) as inside:
            bench(inside, file := folder / f"{rate}.json")
            for number, size in itertools.product(range(BLOCKING_RUNS), sizes):
                train(inside, runs[size][number], scheme, f"{option}={size}", *STEPS, "samples=128", *layers.split())
        for before, after in itertools.permutations(sizes, 2):
            if scheme == "fsdp2" and before != sizes[0]:
                continue
            name, change = f"{job}, {before:g} MB to {after:g} MB", f"bucket={after}MB"
            for log, measured in zip(runs[before], runs[after], strict=True):
                with contextlib.suppress(DoesNotApplyError):  # messages of one size do not show the latency
                    yield predicted("blocking", name, log, change, measured, runs[before])
                change_on_bench = f"network={file},{file} {change}"
                yield predicted("blocking, bench", name, log, change_on_bench, measured, runs[before])
        for size, (first, second) in runs.items():
            yield predicted("blocking, control", f"{job}, {size:g} MB", first, "compute=1x", second, runs[size])


def dtypes(folder: Path) -> Iterator[Case]:
    """Yield cases for messages in bfloat16: transfers from the run alone, or from a measured network."""
    for rate, backward_ms, scheme in itertools.product(DTYPE_RATES, DTYPE_BACKWARD_MS, DTYPE_SCHEMES):
        jobs = folder / f"dtypes-{rate}-{backward_ms:g}-{scheme}"
        runs = {sent: [jobs / f"{sent}-{number}" for number in range(DTYPE_RUNS)] for sent in ("float32", "bfloat16")}
        with link(rate) as inside:
            bench(inside, folder / f"{rate}.json")
            for number, sent in itertools.product(range(DTYPE_RUNS), runs):
                options = ["steps=25", f"sent={sent}", "samples=16", WIDTHS, f"backward_ms={backward_ms}"]
                train(inside, runs[sent][number], scheme, *options)
        name, file = f"{scheme}, {rate}, backward {'long' if backward_ms else 'short'}", folder / f"{rate}.json"
        for before, after in zip(runs["float32"], runs["bfloat16"], strict=True):
            yield predicted("dtype", name, before, "dtype=bf16", after, runs["float32"])
            yield predicted("dtype, bench", name, before, f"network={file},{file} dtype=bf16", after, runs["float32"])
        first, second, *_ = runs["float32"]
        yield predicted("dtype, control", name, first, "compute=1x", second, runs["float32"])


def overlaps(folder: Path) -> Iterator[Case]:
    """Yield a case for each job: synchronous, then in the background. Predictions are printed before the second run."""
    for scheme, ranks, rate, options, change in OVERLAP_JOBS:
        name = ", ".join([scheme, f"{ranks} ranks", rate, *options])
        logs = [folder / f"overlap-{name.replace(', ', '-')}-{background}" for background in (0, 1)]
        with link(rate) as inside:
            for background, log in enumerate(logs):
                own = [f"background={background}", *options]
                train(inside, log, scheme, *own, program=OVERLAPPING, ranks=ranks)
                if not background:
                    announce(name, log, change)
        yield predicted("overlap", name, logs[0], change, logs[1])


def world_sizes(folder: Path) -> Iterator[Case]:
    """Yield cases for other numbers of ranks, each behind a link of its own. Predictions precede the runs they are of.

    Transfers follow from the run alone, or from a described network with the bandwidth of the links.
    """
    for scheme, sizes in WORLD_SIZES.items():
        logs = {ranks: folder / f"ranks-{scheme}-{ranks}" for ranks in sizes}
        for ranks, log in logs.items():
            if not log.exists():
                with links(WORLD_SIZE_RATE, ranks) as inside:
                    run(inside, [sys.executable, str(OVERLAPPING), scheme, "steps=8"], log)
            for more in sizes:
                if more > ranks:
                    for change in _world_size_changes(more).values():
                        announce(f"{scheme}, {ranks} to {more}, {change}", log, change)
        for before, after in itertools.permutations(sizes, 2):
            for kind, change in _world_size_changes(after).items():
                yield predicted(kind, f"{scheme}, {before} to {after} ranks", logs[before], change, logs[after])


def _world_size_changes(ranks: int) -> dict[str, str]:
    network = WORLD_SIZE_NETWORK
    return {"ranks": f"world-size={ranks}", "ranks, network": f"network={network},{network} world-size={ranks}"}


def _bucket_job(rate: str, backward_ms: float) -> str:
    return f"{rate}, backward {'long' if backward_ms else 'short'}"


def _bucket_run(folder: Path, rate: str, backward_ms: float, size: int, number: int) -> Path:
    return folder / f"buckets-{rate}{'-long' * bool(backward_ms)}" / f"{size}mb-{number}"


_KINDS: Final = {
    "straggler": stragglers,  # has the equal runs of the next one
    "network": networks,
    "bucket": buckets,
    "blocking": blocking_buckets,
    "dtype": dtypes,
    "overlap": overlaps,
    "ranks": world_sizes,
}


def main() -> None:
    """Run all pairs, print them, misses first, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("pairs.json"))
    parser.add_argument("--kind", choices=[*_KINDS], action="append")
    parser.add_argument("--scheme", choices=SCHEMES, action="append", help="of networks and late ranks")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--show", type=Path, help="print the results in a file again, and measure nothing")
    options = parser.parse_args()
    if options.show is not None:
        print(*tables([Case(**case) for case in json.loads(options.show.read_text())]), sep="\n")
        return
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    kinds = {
        kind: partial(make, schemes=options.scheme or SCHEMES) if make in (stragglers, networks) else make
        for kind, make in _KINDS.items()
    }  # fmt: skip
    cases = [case for kind in options.kind or _KINDS for case in kinds[kind](folder)]
    options.out.write_text(json.dumps([asdict(case) for case in cases], indent=1))
    print(*tables(cases), sep="\n")


def tables(cases: Sequence[Case]) -> Iterator[str]:
    """Yield the results as tables in Markdown, the largest errors first; times in ms."""
    yield from ("| kind | cases | median error | 90 % within | in the interval |", "| --- " * 5 + "|")
    for kind in dict.fromkeys(case.kind for case in cases):
        own = [case for case in cases if case.kind == kind]
        errors = sorted(abs(case.error) for case in own)
        ninth = errors[math.ceil(0.9 * len(errors)) - 1]
        inside = sum(case.is_inside for case in own) if not any(math.isnan(case.low_ns) for case in own) else "-"
        yield f"| {kind} | {len(own)} | {statistics.median(errors):.1%} | {ninth:.1%} | {inside} |"
    yield from ("", "| kind | case | before | predicted | interval | measured | error |", "| --- " * 7 + "|")
    for case in sorted(cases, key=lambda case: -abs(case.error)):
        ns = case.before_ns, case.predicted_ns, case.low_ns, case.high_ns, case.measured_ns
        before, step, low, high, measured = (f"{time / 1e6:.1f}" for time in ns)
        interval = f"{low} to {high}{'' if case.is_inside else ', outside'}" if not math.isnan(case.low_ns) else "-"
        yield f"| {case.kind} | {case.name} | {before} | {step} | {interval} | {measured} | {case.error:+.1%} |"


if __name__ == "__main__":
    main()
