"""Decisions that `commtrace whatif` leads to, beside what happened: which change is best, which bandwidth is enough.

Which change: jobs drawn at random run before and after each change that can really be made; the change that is ranked
first should be the best of them, or nearly. Which bandwidth: a dry run and the computation of a run on a fast link
give the bandwidth with which a share of the step is exposed; the job then runs on links of that and of neighbouring
bandwidths. Links are those of `what_if_pairs` and `layout_pairs`; this needs root.

    sudo python benchmarks/what_if_decisions.py --folder decisions --out decisions.json    # an hour
    python benchmarks/what_if_decisions.py --show decisions.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from layout_pairs import links, run
from what_if_pairs import DTYPE_SCHEMES, OVERLAPPING, TRAINING, WIDTHS, link, train

from commtrace.analyses.what_if.changed_run import replayed_run
from commtrace.analyses.what_if.changes import changed_run
from commtrace.analyses.what_if.layouts import rate_of_run
from commtrace.analyses.what_if.predictions import median_step_ns, what_if
from commtrace.analyses.what_if.simulated_step import simulated_step
from commtrace.run import open_run

OVERLAPPED: Final = {"buckets": "buckets", "gathered": "fsdp2"}
"""Schemes of the program that may overlap its communication -> their names in it."""
SCHEMES: Final = ("ddp", "zero1", "fsdp2", *OVERLAPPED)
JOBS: Final = 40
GOOD_ENOUGH: Final = 1.03
"""A change is as good as the best one up to this ratio of their steps."""
LAYERS: Final = 6
LATENCY: Final = 200e-6
"""Latency of a message over such links, s: a guess."""
FAST: Final = "8gbit"
"""The link of the run whose computation is measured."""
NEIGHBOURS: Final = (0.7, 0.85, 1.0, 1.15, 1.4)
"""Bandwidths of links, as multiples of the predicted one."""
BANDWIDTH_JOBS: Final = (
    ("buckets", 2, 0, 20, 30), ("buckets", 2, 1, 20, 30), ("buckets", 4, 0, 20, 30), ("buckets", 4, 1, 20, 30),
    ("fsdp2", 2, 0, 20, 30), ("fsdp2", 4, 0, 20, 30), ("buckets", 2, 0, 10, 30), ("buckets", 2, 1, 10, 30),
    ("fsdp2", 4, 0, 10, 30), ("fsdp2", 2, 0, 20, 60), ("fsdp2", 4, 0, 20, 60),
)  # fmt: skip
"""Scheme, ranks, whether gradients are reduced in the background, exposed share in %, and ms of a layer's forward; its
backward takes twice as long."""


@dataclass(frozen=True)
class Job:
    """A job before a change. `options` are those of its program; the rate of its link is in Mbit/s."""

    program: Path
    scheme: str
    rate: int
    options: Mapping[str, float]

    def name(self) -> str:
        """Return what distinguishes it from others."""
        values = " ".join(f"{name}={value:g}" for name, value in self.options.items())
        return f"{self.scheme}, {self.rate} Mbit/s, {values}"

    def changed(self, **options: float) -> Job:
        """Return the job with other options."""
        return Job(self.program, self.scheme, self.rate, {**self.options, **options})

    def changes(self) -> dict[str, Job]:
        """Return the job after each change that can really be made, in the order of the catalogue."""
        changes = {}
        if self.options.get("late_ms"):
            changes["without-straggler=worst"] = self.changed(late=-1)
        if self.program == OVERLAPPING:
            changes["overlap" if self.scheme == "buckets" else "overlap=all_gather"] = self.changed(background=1)
        if self.scheme in DTYPE_SCHEMES and self.program == TRAINING:
            changes["dtype=bf16"] = self.changed(bf16=1)
        if self.scheme in ("ddp", "zero1"):
            changes |= {
                f"bucket={size}MB": self.changed(bucket_mb=size) for size in (1, 4) if size != self.options["bucket_mb"]
            }
        halved = {name: self.options[name] / 2 for name in self.options if name.endswith("_ms") or name == "samples"}
        changes["compute=0.5x"] = self.changed(**halved)
        changes["scale-network=2x"] = Job(self.program, self.scheme, 2 * self.rate, self.options)
        return changes

    def record(self, log: Path) -> None:
        """Run it, unless that was done before."""
        options = [f"{name}={value:g}" for name, value in self.options.items() if name != "bf16"]
        if self.options.get("bf16"):
            options.append("sent=bfloat16")
        if self.program == TRAINING:
            options.append(WIDTHS)
        with link(f"{self.rate}mbit") as inside:
            train(inside, log, self.scheme, *options, program=self.program)


def job(seed: int) -> Job:
    """Return a job of each scheme in turn, all else drawn at random."""
    chance = random.Random(f"job {seed}")
    scheme = SCHEMES[seed % len(SCHEMES)]
    rate = chance.choice((100, 200, 300, 500, 800))
    if scheme in OVERLAPPED:
        milliseconds = chance.choice((10.0, 30.0, 60.0))
        options = {"steps": 12, "forward_ms": milliseconds, "backward_ms": 2 * milliseconds, "background": 0}
        return Job(OVERLAPPING, OVERLAPPED[scheme], rate, options)
    options = {
        "steps": 15, "samples": 64, "backward_ms": chance.choice((0.0, 5.0, 15.0, 30.0)), "late": 1,
        "late_ms": chance.choice((0.0, 30.0, 100.0, 250.0)), "bucket_mb": chance.choice((1, 2, 4)),
    }  # fmt: skip
    return Job(TRAINING, scheme, rate, options)


@dataclass(frozen=True)
class Choice:
    """A job, and its steps after each change, ns: predicted and measured."""

    name: str
    before_ns: float
    predicted_ns: Mapping[str, float]
    measured_ns: Mapping[str, float] = field(default_factory=dict)

    @property
    def ranked(self) -> list[str]:
        """The changes, the best prediction first; of equal ones, the first one of the catalogue."""
        return sorted(self.predicted_ns, key=lambda change: self.predicted_ns[change])

    @property
    def excess(self) -> float:
        """By how much the step after the change that is ranked first exceeds that after the best one, relative."""
        return self.measured_ns[self.ranked[0]] / min(self.measured_ns.values()) - 1


def step_ns(log: Path) -> float:
    """Return the median step of a run."""
    replay = replayed_run(open_run(log)).replay
    return float(median_step_ns(replay, replay.delays))


def choices(folder: Path, seeds: Iterable[int]) -> Iterator[Choice]:
    """Yield each job after its changes. Predictions are printed before the runs that they are of."""
    for seed in seeds:
        before = job(seed)
        before.record(log := folder / f"job-{seed}" / "before")
        replayed, changes = replayed_run(open_run(log)), before.changes()
        predicted = {change: float(what_if(changed_run(replayed, [change]))["step_ns"].iloc[-1]) for change in changes}
        choice = Choice(before.name(), step_ns(log), predicted)
        print(f"predicted: {choice.name}: {', '.join(choice.ranked)}", file=sys.stderr, flush=True)
        measured = {}
        for change, after in changes.items():
            after.record(log := folder / f"job-{seed}" / change.replace("=", "-"))
            measured[change] = step_ns(log)
        yield Choice(choice.name, choice.before_ns, predicted, measured)


@dataclass(frozen=True)
class Bandwidth:
    """A job, the bandwidth with which so much of its step is exposed, GB/s, and the shares on links around it."""

    name: str
    share: float
    predicted_gb_per_s: float
    computation_ns: float
    """Computation of a step in a run on a fast link."""
    measured_ns: Mapping[str, float]
    """Steps by bandwidth of the link, GB/s."""

    @property
    def measured_gb_per_s(self) -> float:
        """The bandwidth with which that share is exposed, between those of the links; nan: beyond them."""
        rates = np.array([*map(float, self.measured_ns)])
        exposed = 1 - self.computation_ns / np.array([*self.measured_ns.values()])
        order = np.argsort(exposed)
        # The step is linear in the time per byte, but for what is hidden.
        return float(1 / np.interp(self.share, exposed[order], 1 / rates[order], left=np.nan, right=np.nan))

    @property
    def error(self) -> float:
        """Relative error of the prediction; nan: not known."""
        return self.predicted_gb_per_s / self.measured_gb_per_s - 1


def bandwidths(folder: Path) -> Iterator[Bandwidth]:
    """Yield each job on links around the bandwidth that its dry run needs."""
    for scheme, ranks, background, percent, forward_ms in BANDWIDTH_JOBS:
        name = f"{scheme}, {ranks} ranks, {'background' if background else 'synchronous'}, {forward_ms} ms, {percent} %"
        options = [f"background={background}", f"forward_ms={forward_ms}", f"backward_ms={2 * forward_ms}", "steps=6"]
        program = [sys.executable, str(OVERLAPPING), scheme, *options, f"layers={LAYERS}"]
        own = folder / name.replace(", ", "-").replace(" ", "")
        if not (dry := own / "dry").exists():
            simulate = [sys.executable, "-m", "commtrace.cli", "dryrun", "--world-size", str(ranks), "--ranks", "0"]
            command = [*simulate, "--out", str(dry), *program]
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if not (fast := own / FAST).exists():
            with links(FAST, ranks) as inside:
                run(inside, program, fast)
        step = simulated_step(simulated := open_run(dry))
        flops_per_s = rate_of_run(replayed_run(open_run(fast)), [step]).flops_per_s
        tables = simulated.bandwidth_bounds(rate=flops_per_s, latency_s=LATENCY)
        needed = float(tables["bandwidth_bounds"].iloc[0][f"{'best' if background else 'worst'}_{percent}_gb_per_s"])
        print(f"predicted: {name}: {needed:.4f} GB/s", file=sys.stderr, flush=True)
        rates = {f"{factor * needed:.6f}": f"{factor * needed * 8e6:.0f}kbit" for factor in NEIGHBOURS}
        for rate in rates.values():
            if not (own / rate).exists():
                with links(rate, ranks) as inside:
                    run(inside, program, own / rate)
        measured = {gb_per_s: step_ns(own / rate) for gb_per_s, rate in rates.items()}
        computation_ns = 1e9 * max(step.flops_of_ranks.values()) / flops_per_s
        yield Bandwidth(name, percent / 100, needed, computation_ns, measured)


def tables(found: Sequence[Choice], needed: Sequence[Bandwidth]) -> Iterator[str]:
    """Yield the results as tables in Markdown, misses first."""
    if found:
        good = sum(own.excess <= GOOD_ENOUGH - 1 for own in found)
        best = sum(own.excess == 0 for own in found)
        yield f"Ranked first and really the best: {best} of {len(found)}; or within {GOOD_ENOUGH - 1:.0%}: {good}."
        yield from ("", "| job | before, ms | change: predicted, measured, ms | excess |", "| --- " * 4 + "|")
    for own in sorted(found, key=lambda own: -own.excess):
        steps = "; ".join(
            f"{change}: {own.predicted_ns[change] / 1e6:.1f}, {own.measured_ns[change] / 1e6:.1f}"
            for change in own.ranked
        )
        yield f"| {own.name} | {own.before_ns / 1e6:.1f} | {steps} | {own.excess:+.1%} |"
    if needed:
        yield from ("", "| job, exposed share | predicted, GB/s | measured | error |", "| --- " * 4 + "|")
    for row in sorted(needed, key=lambda row: -np.nan_to_num(abs(row.error), nan=np.inf)):
        measured = "beyond these links | " if np.isnan(row.error) else f"{row.measured_gb_per_s:.4f} | {row.error:+.1%}"
        yield f"| {row.name} | {row.predicted_gb_per_s:.4f} | {measured} |"


def main() -> None:
    """Run what is missing, print the results, misses first, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("decisions.json"))
    parser.add_argument("--folder", type=Path, default=Path("decisions"))
    parser.add_argument("--jobs", type=int, default=JOBS, help="random jobs (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (%(default)s)")
    parser.add_argument("--without-bandwidths", action="store_true", help="only which change is best")
    parser.add_argument("--show", type=Path, help="print the results in a file again, and measure nothing")
    options = parser.parse_args()
    if options.show is not None:
        document: dict[str, Any] = json.loads(options.show.read_text())
        found = [Choice(**row) for row in document["choices"]]
        print(*tables(found, [Bandwidth(**row) for row in document["bandwidths"]]), sep="\n")
        return
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    needed = [] if options.without_bandwidths else [*bandwidths(folder)]
    found = [*choices(folder, range(options.first, options.first + options.jobs))]
    document = {"choices": [*map(asdict, found)], "bandwidths": [*map(asdict, needed)]}
    options.out.write_text(json.dumps(document, indent=1))
    print(*tables(found, needed), sep="\n")


if __name__ == "__main__":
    main()
