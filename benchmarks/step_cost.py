"""What recording adds to a training step: jobs with and without it that take turns.

Three jobs of one training run at a time: bare, bare again as a control, and recorded. One of them trains for a few
steps; the processes of the other two are stopped (SIGSTOP), so that all threads of a job cost their own job. A turn's
time is the slowest rank's, its processor time the sum over all threads of all ranks. In a round, each job has one turn,
in an order that changes.

Where memory lies makes a process faster or slower than another one of the same program, also by a percent: the jobs
are therefore started several times, and the intervals are those of the differences between these jobs.

Any training whose optimizers are torch's can be measured, for instance of 4 ranks:

    python benchmarks/step_cost.py --ranks 4 --results out.json --script train.py --config small.yml
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import groups
import in_turns
import results
import training_steps
from measuring import PROCESSOR, Row, interval_of, rotated
from sides import recorders

import commtrace

SETTLED_S: Final = 9.0
"""A recorder reads the set-up of its process again until 7 s after its start."""
LIMIT_S: Final = 120


def main() -> None:
    """Measure all trainings, or a script, and write the results."""
    parser = results.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=6, help="how often the three jobs are started (%(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each job (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.4, help="length of a turn (%(default)s)")
    parser.add_argument("--ranks", type=int, action="append", help="ranks of a job (2); may be repeated")
    parser.add_argument("--recorder", choices=recorders(), default=recorders()[-1], help="(%(default)s)")
    parser.add_argument("--script", nargs=argparse.REMAINDER, help="a program and its arguments, in place of ours")
    options = results.parsed(parser, jobs=2, rounds=2, seconds=0.0)
    programs = [f"{size} {scheme}" for size in in_turns.SIZES for scheme in training_steps.SCHEMES]
    if options.script:
        programs = [Path(options.script[0]).stem]
    rows = []
    for ranks in options.ranks or [2]:
        for program in programs:
            if options.only in program:
                rows += measured(program, ranks, options)
    results.write("step_cost", rows, options)


def measured(program: str, ranks: int, options: argparse.Namespace) -> list[Row]:
    """Return the rows of a training: its step's time and processor time, and the cost that the report states."""
    triples = []
    for number in range(options.jobs):
        triples.append(Triple.measure(program, ranks, number, options))
        print(f"{program}, {number}: {triples[-1].summary()}", file=sys.stderr, flush=True)
    case, name = f"{program}, {ranks} ranks", f"commtrace, {options.recorder}, with call sites"
    rows = [
        row_of(case, name, "ms", [triple.wall for triple in triples]),
        row_of(f"{case}{PROCESSOR}", name, "ms", [triple.processor for triple in triples]),
        Row(case, f"{name}: calls", "a step", statistics.mean(triple.calls for triple in triples)),
        Row(case, f"{name}: as reported", "us a call", statistics.median(triple.reported_us for triple in triples)),
    ]
    for row in rows:
        results.show(row)
    return rows


def row_of(case: str, name: str, unit: str, triples: Sequence[Mapping[str, Sequence[float]]]) -> Row:
    """Return the row of all jobs of a training; `triples` has the values of each job's turns, by side."""
    relative: dict[str, list[float]] = {side: [] for side in ("again", "side")}
    for turns in triples:
        for side, ratios in relative.items():
            ratios.append(ratio_to_bare(turns, side))
    medians = {which: statistics.median(value for of in triples for value in of[which]) for which in ("bare", "side")}
    bare = medians["bare"]
    ratio, control = interval_of(relative["side"]), interval_of(relative["again"])
    return Row(
        case, name, unit, side=medians["side"], bare=bare, difference=(ratio.mean - 1) * bare, ratio=ratio.mean,
        control=control.mean, control_difference=(control.mean - 1) * bare, pairs=len(triples),
        ratio_interval=ratio.bounds, control_interval=control.bounds,
    )  # fmt: skip


def ratio_to_bare(turns: Mapping[str, Sequence[float]], side: str) -> float:
    """Return the median ratio of a side's turns to those of the bare job in the same rounds."""
    return statistics.median(value / bare for value, bare in zip(turns[side], turns["bare"], strict=True))


class Triple(NamedTuple):
    """What the turns of three jobs took, a step in ms, by side."""

    wall: Mapping[str, list[float]]
    processor: Mapping[str, list[float]]
    calls: float
    """Of a step and rank, as recorded."""
    reported_us: float
    """Cost of a call that the report states, us."""

    @classmethod
    def measure(cls, program: str, ranks: int, number: int, options: argparse.Namespace) -> Triple:
        """Start the jobs, let them take turns, and end them."""
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            sides: dict[str, dict[str, object]] = {
                "bare": {}, "again": {}, "side": {"COMMTRACE": log, "COMMTRACE_RECORDER": options.recorder},
            }  # fmt: skip
            started = rotated(list(sides), number)  # the first job may find other memory than the last one
            with running({side: (program, ranks, sides[side], options.script) for side in started}) as jobs:
                steps = warmed_up(jobs, options.seconds)
                turns: dict[str, list[Turn]] = {side: [] for side in jobs}
                for round_number in range(options.rounds):
                    for side in rotated(["bare", "again", "side"], round_number + number):
                        turns[side].append(jobs[side].turn(steps))
                for job in jobs.values():
                    job.end()
            calls, reported = recorded(log, ranks, options.recorder)
        per_step = {side: [(1e3 * wall / steps, 1e3 * cpu / steps) for wall, cpu in of] for side, of in turns.items()}
        return cls(
            {side: [wall for wall, _ in of] for side, of in per_step.items()},
            {side: [processor for _, processor in of] for side, of in per_step.items()},
            calls,
            reported,
        )

    def summary(self) -> str:
        """Return the ratios in a line."""
        parts = []
        for name, turns in (("wall", self.wall), ("processor", self.processor)):
            ratio, control = (ratio_to_bare(turns, side) for side in ("side", "again"))
            parts.append(f"{name} {statistics.median(turns['bare']):.4g} ms, {ratio:.4f} (control {control:.4f})")
        return f"{'; '.join(parts)}; {self.calls:.4g} calls a step, {self.reported_us:.3g} us as reported"


def warmed_up(jobs: Mapping[str, Job], seconds: float) -> int:
    """Let all jobs train until they are settled, and return the steps of a turn of about this length."""
    began = time.monotonic()
    while True:
        turns = [job.turn(3) for job in jobs.values()]
        if seconds == 0 or time.monotonic() - began > SETTLED_S:
            return max(1, round(3 * seconds / max(turn.wall for turn in turns)))


def recorded(log: Path, ranks: int, recorder: str) -> tuple[float, float]:
    """Return the calls of a step and rank, and the reported cost of a call in us. Raise if something is missing."""
    run = commtrace.open(log)
    assert len(run.processes) == ranks, run.processes
    for process in run.processes:
        stats: dict[str, Any] = process.tables.stats or {}
        assert process.tables.process.get("recorder") == recorder, process.tables.process
        assert not stats["dropped"], stats
        assert not stats["hook_errors"], stats["first_error"]
    events = run.events()
    last = int(events["step"].max())
    of_steps = events[events["step"].between(last // 2, last - 1)]
    cost = run.table("tracing_cost")
    return len(of_steps) / ranks / max(1, last - last // 2), float((cost["mean_ns"]).mean()) / 1e3


# ---- jobs ------------------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """What some steps took, s."""

    wall: float
    """Of the slowest rank."""
    processor: float
    """Of all threads of all ranks."""


class Job:
    """The processes of one job, each behind a socket, which train only in its turn."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], sockets: Sequence[socket.socket]) -> None:
        self._processes = processes
        self._files = [one.makefile("rw") for one in sockets]
        for file in self._files:
            self._read(file)  # the first step of each rank
        self._send(signal.SIGSTOP)

    def turn(self, steps: int) -> Turn:
        """Let the job train, and stop it again."""
        self._send(signal.SIGCONT)
        self._grant(steps)
        times = [self._read(file) for file in self._files]
        self._send(signal.SIGSTOP)
        return Turn(max(wall for wall, _ in times), sum(processor for _, processor in times))

    def end(self) -> None:
        """End the job, and its log."""
        self._send(signal.SIGCONT)
        self._grant(0)
        for process in self._processes:
            assert process.wait(LIMIT_S) == 0, process.args

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _grant(self, steps: int) -> None:
        for file in self._files:
            file.write(f"{steps}\n")
            file.flush()

    def _read(self, file: Any) -> tuple[float, float]:
        line = file.readline()
        if not line:
            raise RuntimeError(f"a rank has ended: {[process.poll() for process in self._processes]}")
        wall, processor = json.loads(line)
        return wall, processor


JobOf = tuple[str, int, Mapping[str, object], Sequence[str] | None]
"""Program, ranks, environment variables, and the script if it is none of ours."""


@contextmanager
def running(jobs: Mapping[str, JobOf]) -> Iterator[dict[str, Job]]:
    """Start the jobs at once, and end what is left of them."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        waiting = {}
        for side, job in jobs.items():
            processes, sockets = start(*job)
            started += processes
            waiting[side] = processes, sockets
        yield {side: Job(*of_side) for side, of_side in waiting.items()}
    finally:
        for process in started:
            process.kill()
            process.wait()


def start(
    program: str, ranks: int, variables: Mapping[str, object], script: Sequence[str] | None
) -> tuple[list[subprocess.Popen[bytes]], list[socket.socket]]:
    """Start the ranks of a job, as torchrun does."""
    port, processes, sockets = groups.free_port(), [], []
    for rank in range(ranks):
        ours, theirs = socket.socketpair()
        ours.settimeout(LIMIT_S)
        arguments = [str(theirs.fileno()), *(script or [program])]
        environment = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "DS_ACCELERATOR": "cpu",
            "PYTHONWARNINGS": "ignore", **variables,
        }  # fmt: skip
        processes.append(
            subprocess.Popen(
                [sys.executable, Path(__file__).with_name("in_turns.py"), *arguments],
                env={**os.environ, **{name: str(value) for name, value in environment.items()}},
                pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL,
            )
        )  # fmt: skip
        theirs.close()
        sockets.append(ours)
    return processes, sockets


if __name__ == "__main__":
    main()
