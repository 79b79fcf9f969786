"""Predictions of `commtrace whatif DRYRUN ... --calibrate RUN` beside what happened: layouts of one model over gloo.

Each rank has a network namespace whose only interface a token bucket filter limits (tc-tbf(8)); all are on one bridge.
This needs root. A prediction reads logs of one layout, dry runs, and `commtrace bench` of the network. Each ordered
pair of layouts of one number of ranks counts, also a layout from its own runs. All layouts run once in each round. If
other jobs use the machine, equal runs differ: rates and measured steps are both medians over the rounds, and those of
the run of each layout whose median step is the shortest (the least disturbed one).

    sudo python benchmarks/layout_pairs.py --folder pairs --out layouts.json
    python benchmarks/layout_pairs.py --show layouts.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from commtrace.analyses.what_if import layouts
from commtrace.analyses.what_if.changed_run import replayed_run
from commtrace.analyses.what_if.predictions import median_step_ns
from commtrace.analyses.what_if.simulated_step import simulated_step
from commtrace.run import open_run

ROOT: Final = Path(__file__).parents[1]
RATES: Final = ("500mbit",)
STEPS: Final = 8
ROUNDS: Final = {2: 5, 4: 3}
LAYOUTS: Final[Mapping[int, Mapping[str, Sequence[str]]]] = {
    2: {
        "ddp": ["--engine", "ddp"],
        "fsdp": ["--engine", "fsdp"],
        "zero1": ["--zero-stage", "1"],
        "zero2": ["--zero-stage", "2"],
        "zero3": ["--zero-stage", "3"],
        "tensor 2": ["model_parallel_size=2"],
    },
    4: {
        "ddp": ["--engine", "ddp"],
        "fsdp": ["--engine", "fsdp"],
        "zero1": ["--zero-stage", "1"],
        "zero3": ["--zero-stage", "3"],
        "tensor 2 x data 2": ["model_parallel_size=2"],
        "pipeline 2 x data 2": ["pipe_parallel_size=2", "gradient_accumulation_steps=4"],
    },
}
"""Options of `examples.gpt_neox.train` by ranks and name; KEY=VALUE: a setting of its file."""
MEDIAN, LEAST_DISTURBED = "median", "least disturbed"


@dataclass(frozen=True)
class Case:
    """A layout, predicted from the run of another one. Times in ns."""

    runs: str
    ranks: int
    rate: str
    calibrated: str
    layout: str
    low_ns: float
    high_ns: float
    measured_ns: float
    spread: float
    """By how much the longest of the equal runs exceeds the shortest, relative."""

    @property
    def miss(self) -> float:
        """Relative distance of the measured step from the nearer bound; 0 between them, negative if it is shorter."""
        if self.measured_ns < self.low_ns:
            return self.measured_ns / self.low_ns - 1
        return max(0.0, self.measured_ns / self.high_ns - 1)


@contextlib.contextmanager
def links(rate: str, ranks: int) -> Iterator[list[list[str]]]:
    """Yield for each rank the prefix of a command that runs behind a link of this rate."""
    hub, names = f"hub{os.getpid()}", [f"rank{os.getpid()}-{rank}" for rank in range(ranks)]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    try:
        for name in (hub, *names):
            ip("netns", "add", name)
        ip("-n", hub, "link", "add", "bridge", "mtu", "9000", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for rank, name in enumerate(names):
            ip("-n", hub, "link", "add", f"port{rank}", "mtu", "9000", "type", "veth", "peer", "eth0", "netns", name)
            ip("-n", name, "link", "set", "eth0", "mtu", "9000")
            ip("-n", hub, "link", "set", f"port{rank}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
            for inside, device in ((name, "eth0"), (hub, f"port{rank}")):
                shape = ["tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate]
                subprocess.run(
                    ["ip", "netns", "exec", inside, *shape, "burst", "64kb", "latency", "400ms"], check=True
                )  # fmt: skip
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in (hub, *names):
            subprocess.run(["ip", "netns", "del", name], check=False)


def run(inside: Sequence[Sequence[str]], command: Sequence[str], log: Path | None = None) -> None:
    """Run a command on each rank."""
    started = []
    for rank, prefix in enumerate(inside):
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "RANK": str(rank),
            "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(inside)), "LOCAL_WORLD_SIZE": str(len(inside)),
            "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29655", **({"COMMTRACE": str(log)} if log else {}),
        }  # fmt: skip
        arguments = [*prefix, "timeout", "600", *command]
        quiet = subprocess.DEVNULL
        started.append(subprocess.Popen(arguments, env=environment, cwd=ROOT, stdout=quiet, stderr=quiet))
    statuses = [process.wait() for process in started]
    if any(statuses):
        raise SystemExit(f"failed: {' '.join(command)}")


def program(folder: Path, options: Sequence[str]) -> list[str]:
    """Return the command of a rank."""
    settings = dict(option.split("=") for option in options if "=" in option)
    file = folder / f"{'-'.join(settings) or 'plain'}.json"
    lengths = dict.fromkeys(("seq_length", "max_position_embeddings"), 256)
    file.write_text(json.dumps({**lengths, **{name: int(value) for name, value in settings.items()}}))
    rest = [option for option in options if "=" not in option]
    start = [sys.executable, "-m", "examples.gpt_neox.train", "demo", str(file)]
    return [*start, "--precision", "fp32", "--train-iters", str(STEPS), *rest]


def measure(folder: Path, rates: Sequence[str]) -> None:
    """Make the dry runs, the runs and the measurements of networks that are missing."""
    for ranks, options in LAYOUTS.items():
        for name, own in options.items():
            if not (log := folder / f"dry-{ranks}" / name).exists():
                start = [sys.executable, "-m", "commtrace.cli", "dryrun", "--world-size", str(ranks), "--ranks", "all"]
                command = [*start, "--out", str(log), *program(folder, own)]
                command[command.index("--train-iters") + 1] = "4"
                subprocess.run(["timeout", "300", *command], check=True, capture_output=True, cwd=ROOT)
        for rate in rates:
            with links(rate, ranks) as inside:
                if not (out := folder / f"{rate}-{ranks}.json").exists():
                    limits = ["--max-bytes", "16m", "--seconds", "0.2", "--out", str(out), "--force"]
                    run(inside, [sys.executable, "-m", "commtrace.cli", "bench", *limits])
                for number, name in itertools.product(range(ROUNDS[ranks]), options):
                    if not (log := folder / f"{rate}-{ranks}-{number}" / name).exists():
                        run(inside, program(folder, options[name]), log)
                        print(log, flush=True)


def cases(folder: Path, rates: Sequence[str]) -> Iterator[Case]:
    """Yield a case for each ordered pair of layouts."""
    for (ranks, options), rate in itertools.product(LAYOUTS.items(), rates):
        steps = {name: simulated_step(open_run(folder / f"dry-{ranks}" / name)) for name in options}
        networks = layouts.networks_of([str(folder / f"{rate}-{ranks}.json")])
        replays = {
            name: [
                replayed_run(open_run(folder / f"{rate}-{ranks}-{number}" / name)) for number in range(ROUNDS[ranks])
            ]
            for name in options
        }
        steps_ns = {
            name: [float(median_step_ns(own.replay, own.replay.delays)) for own in runs]
            for name, runs in replays.items()
        }
        for calibrated, recorded in replays.items():
            speeds = [layouts.rate_of_run(own, [*steps.values()]).flops_per_s for own in recorded]
            least_disturbed = speeds[int(np.argmin(steps_ns[calibrated]))]
            for which, speed in ((MEDIAN, statistics.median(speeds)), (LEAST_DISTURBED, least_disturbed)):
                table = layouts.predicted_layouts(steps, networks, layouts.Rate(speed, calibrated))["layouts"]
                bounds = dict(zip(table["run"], zip(table["low_ns"], table["high_ns"], strict=True), strict=True))
                for name, measured in steps_ns.items():
                    low, high = map(float, bounds[name])
                    ns = statistics.median(measured) if which == MEDIAN else min(measured)
                    spread = max(measured) / min(measured) - 1
                    yield Case(which, ranks, rate, calibrated, name, low, high, ns, spread)


def tables(found: Sequence[Case]) -> Iterator[str]:
    """Yield the results as tables in Markdown, misses first; times in ms."""
    yield "| runs | ranks, rate | calibrated on | cases | between the bounds | within 10 % of them | largest miss |"
    yield "| --- " * 7 + "|"
    for (runs, ranks, rate, same), own in _grouped(found):
        close = sum(abs(case.miss) <= 0.1 for case in own)
        inside = sum(case.miss == 0 for case in own)
        largest = max((case.miss for case in own), key=abs)
        which = "itself" if same else "another layout"
        yield f"| {runs} | {ranks}, {rate} | {which} | {len(own)} | {inside} | {close} | {largest:+.1%} |"
    yield ""
    yield "| runs | ranks, rate | calibrated on | layout | predicted | measured | equal runs differ by | miss |"
    yield "| --- " * 8 + "|"
    for case in sorted(found, key=lambda case: -abs(case.miss)):
        low, high, measured = (f"{ns / 1e6:.0f}" for ns in (case.low_ns, case.high_ns, case.measured_ns))
        cells = (
            case.runs,
            f"{case.ranks}, {case.rate}",
            case.calibrated,
            case.layout,
            f"{low} to {high}",
            measured,
            f"{case.spread:.0%}",
            f"{case.miss:+.1%}" if case.miss else "-",
        )
        yield f"| {' | '.join(cells)} |"
    width = statistics.median(case.high_ns / case.low_ns for case in found)
    yield f"\nMedian ratio of the bounds: {width:.2f}."


def _grouped(found: Sequence[Case]) -> Iterator[tuple[tuple[str, int, str, bool], list[Case]]]:
    def key(case: Case) -> tuple[str, int, str, bool]:
        return case.runs, case.ranks, case.rate, case.calibrated == case.layout

    for group, own in itertools.groupby(sorted(found, key=key), key):
        yield group, [*own]


def main() -> None:
    """Run what is missing, print the cases, misses first, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("layouts.json"))
    parser.add_argument("--folder", type=Path, default=Path("layout-pairs"))
    parser.add_argument("--rates", type=lambda text: text.split(","), default=RATES)
    parser.add_argument("--show", type=Path, help="print the results in a file again, and measure nothing")
    options = parser.parse_args()
    if options.show is not None:
        print(*tables([Case(**case) for case in json.loads(options.show.read_text())]), sep="\n")
        return
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    measure(folder, options.rates)
    found = [*cases(folder, options.rates)]
    options.out.write_text(json.dumps([asdict(case) for case in found], indent=1))
    print(*tables(found), sep="\n")


if __name__ == "__main__":
    main()
