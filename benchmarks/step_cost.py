"""What recording adds to a training step: one job that records the steps of one turn in three.

A turn is a few steps, of which the first is not timed. Before it, all ranks switch the recorder on or off, each time
both ways (`switching`). In a round, three turns follow each other in an order that changes: not recorded, not recorded
again as a control, and recorded. A turn's time is the slowest rank's, its processor time the sum
over all threads of all ranks. The thread that writes the log runs in all turns: its share of a core has its own row.

Turns of one process are compared, because processes of one program differ by up to 3 % on a small machine: where memory
lies makes one faster or slower. The recorded turn of a round is compared with the mean of the two others, and one of
these with the other one; the trimmed means over all rounds are shown, of several starts of the job.

Any training whose optimizers are torch's can be measured, for instance of 4 ranks:

    python benchmarks/step_cost.py --ranks 4 --results out.json --script train.py --config small.yml

With --padded, operators that compute take the same time in all turns (`operators`), and steps vary less. Ratios are of
a step without the padding.
"""

from __future__ import annotations

import argparse
import json
import math
import os
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
import operators
import results
import training_steps
from measuring import A_CALL, PROCESSOR, Interval, Row, interval_of, rotated
from sides import recorders

import commtrace

SETTLED_S: Final = 9.0
"""A recorder reads the set-up of its process again until 7 s after its start."""
LIMIT_S: Final = 120


def main() -> None:
    """Measure all trainings, or a script, and write the results."""
    parser = results.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="how often the job is started (%(default)s)")
    parser.add_argument("--rounds", type=int, default=120, help="recorded turns of a job (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.8, help="length of a turn (%(default)s)")
    parser.add_argument("--ranks", type=int, action="append", help="ranks of a job (2); may be repeated")
    parser.add_argument("--padded", action="store_true", help="let operators that compute take the same time always")
    parser.add_argument("--script", nargs=argparse.REMAINDER, help="a program and its arguments, in place of ours")
    options = results.parsed(parser, jobs=1, rounds=2, seconds=0.0)
    if "native" not in recorders():
        parser.error("the native recorder is not built; run `commtrace build`")
    programs = [f"{size} {scheme}" for size in in_turns.SIZES for scheme in training_steps.SCHEMES]
    if options.script:
        programs = [Path(options.script[0]).stem]
    operators.native()  # before several processes of a job build it
    rows = []
    for ranks in options.ranks or [2]:
        for program in programs:
            if options.only in program:
                rows += measured(program, ranks, options)
    results.write("step_cost", rows, options)


def measured(program: str, ranks: int, options: argparse.Namespace) -> list[Row]:
    """Return the rows of a training: its step's time and processor time, and what the report states."""
    starts = []
    for number in range(options.jobs):
        starts.append(Start.measure(program, ranks, number, options))
        print(f"{program}, {number}: {starts[-1].summary()}", file=sys.stderr, flush=True)
    case, name = f"{program}, {ranks} ranks{', padded' if options.padded else ''}", "commtrace, native, with call sites"
    calls = statistics.mean(start.calls for start in starts)
    reported_us = statistics.median(start.reported_us for start in starts)
    rows = [
        row_of(case, name, "ms", [start.wall for start in starts]),
        row_of(f"{case}{PROCESSOR}", name, "ms", [start.processor for start in starts]),
        Row(case, f"{name}: calls", "a step", calls),
        Row(case, f"{name}: as reported", "us a call", reported_us),
        Row(case, f"{name}: padding", "% of a step", statistics.median(start.padding for start in starts)),
        Row(case, f"{name}: writing", "% of a core", statistics.median(start.writing for start in starts)),
        row_of(f"{case}{A_CALL}", name, "us", [start.call for start in starts]),
        Row(f"{case}{A_CALL}", f"{name}: as reported", "us a call", reported_us),
    ]
    for row in rows:
        results.show(row)
    return rows


def row_of(case: str, name: str, unit: str, starts: Sequence[Mapping[str, Sequence[float]]]) -> Row:
    """Return the row of all starts of a training; `starts` has the values of each one's turns, by side."""
    turns = {side: [value for of in starts for value in of[side]] for side in starts[0]}
    ratio, control = (ratio_of(turns, side) for side in ("side", "again"))
    bare = statistics.median(turns["bare"])
    return Row(
        case, name, unit, side=statistics.median(turns["side"]), bare=bare, difference=(ratio.mean - 1) * bare,
        ratio=ratio.mean, control=control.mean, control_difference=(control.mean - 1) * bare, pairs=len(turns["side"]),
        ratio_interval=ratio.bounds, control_interval=control.bounds,
    )  # fmt: skip


def ratio_of(turns: Mapping[str, Sequence[float]], side: str) -> Interval:
    """Return the ratio of recorded turns to the two others of their rounds, or of the second of these to the first.

    Means are of logarithms: that of ratios is above 1 when nothing differs, by the variance of a turn.
    """
    logs = {name: [math.log(value) for value in values] for name, values in turns.items()}
    bare = logs["bare"]
    if side != "again":
        bare = [(one + other) / 2 for one, other in zip(bare, logs["again"], strict=True)]
    mean, bounds = interval_of([value - of for value, of in zip(logs[side], bare, strict=True)])
    return Interval(math.exp(mean), (math.exp(bounds[0]), math.exp(bounds[1])))


class Start(NamedTuple):
    """What the turns of one job took, a step in ms without the padding, by side."""

    wall: Mapping[str, list[float]]
    processor: Mapping[str, list[float]]
    call: Mapping[str, list[float]]
    """Processor time of an operator that communicates, us: until it has returned, not until it has ended."""
    padding: float
    """What a step waited for in padded operators, % of the step without that."""
    calls: float
    """Of a recorded step and rank."""
    reported_us: float
    """Cost of a call that the report states, us."""
    writing: float
    """Share of a core that the thread of a rank takes which writes the log, %."""

    @classmethod
    def measure(cls, program: str, ranks: int, number: int, options: argparse.Namespace) -> Start:
        """Start the job, let it train in turns, and end it."""
        turns: dict[str, list[Turn]] = {side: [] for side in ("bare", "again", "side")}
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            with running(program, ranks, log, options) as job:
                steps = warmed_up(job, options.seconds)
                for round_number in range(options.rounds):
                    for position, side in enumerate(rotated(list(turns), round_number + number)):
                        turns[side].append(job.turn(steps, recorded=side == "side", settles=position == 0))
                job.end()
            stated = recorded(log, ranks)
        return cls.of(turns, steps, ranks, stated)

    @classmethod
    def of(
        cls, turns: Mapping[str, Sequence[Turn]], steps: int, ranks: int, stated: tuple[float, float, float]
    ) -> Start:
        """Return what these turns of so many steps took, and what `recorded` has returned."""
        # One number for all turns: that of a turn is what its operators did not take, and would make it vary again.
        padding = statistics.median(turn.padding for of in turns.values() for turn in of)
        wall = {side: [1e3 * (turn.wall - padding) / steps for turn in of] for side, of in turns.items()}
        processor = {
            side: [1e3 * (turn.processor - ranks * padding) / steps for turn in of] for side, of in turns.items()
        }
        call = {side: [1e6 * turn.communication / turn.calls for turn in of] for side, of in turns.items()}
        share = 100 * 1e3 * padding / steps / statistics.median(wall["bare"])
        return cls(wall, processor, call, share, *stated)

    def summary(self) -> str:
        """Return the ratios in a line."""
        parts = []
        for name, turns in (("wall, ms", self.wall), ("processor, ms", self.processor), ("a call, us", self.call)):
            ratio, control = (ratio_of(turns, side) for side in ("side", "again"))
            half = (ratio.bounds[1] - ratio.bounds[0]) / 2
            bare = statistics.median(turns["bare"])
            parts.append(f"{name}: {bare:.4g}, {ratio.mean:.4f} +-{half:.4f} (control {control.mean:.4f})")
        parts.append(f"padding {self.padding:.3g} %")
        stated = f"{self.calls:.4g} calls a step, {self.reported_us:.3g} us as reported, writing {self.writing:.2g} %"
        return f"{'; '.join(parts)}; {stated}"


def warmed_up(job: Job, seconds: float) -> int:
    """Let the job train until it is settled, and return the steps of a turn of about this length."""
    began = time.monotonic()
    while True:
        turn = job.turn(3, recorded=True, settles=True)
        if seconds == 0 or time.monotonic() - began > SETTLED_S:
            return max(1, round(3 * seconds / turn.wall))


def recorded(log: Path, ranks: int) -> tuple[float, float, float]:
    """Return `calls`, `reported_us` and `writing` of a `Start`. Raise if something is missing in the log."""
    run = commtrace.open(log)
    assert len(run.processes) == ranks, run.processes
    for process in run.processes:
        stats: dict[str, Any] = process.tables.stats or {}
        assert process.tables.process.get("recorder") == "native", process.tables.process
        assert not stats["dropped"], stats
        assert not stats["hook_errors"], stats["first_error"]
    steps = run.events()["step"]
    calls = steps[steps > steps.max() // 2].value_counts() / ranks
    cost = run.table("tracing_cost")
    writing = 100 * (cost["drain_ns"] / cost["span_ns"]).mean()
    return float(calls.median()), float(cost["mean_ns"].mean()) / 1e3, float(writing)


# ---- jobs ------------------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """What some steps took, s."""

    wall: float
    """Of the slowest rank."""
    processor: float
    """Of all threads of all ranks."""
    communication: float
    """Processor time of operators that communicate, of all ranks."""
    calls: int
    """These operators' calls, of all ranks."""
    padding: float
    """Mean of the ranks."""


class Job:
    """The processes of a job, each behind a socket, which train only in its turns."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], sockets: Sequence[socket.socket]) -> None:
        self._processes = processes
        self._files = [one.makefile("rw") for one in sockets]
        for file in self._files:
            self._read(file)  # the first step of each rank

    def turn(self, steps: int, *, recorded: bool, settles: bool) -> Turn:
        """Let the job train for some steps, after one that is not timed. May settle how long operators take."""
        self._grant(steps, recorded=recorded, settles=settles)
        times = [self._read(file) for file in self._files]
        return Turn(
            wall=max(time.wall for time in times),
            processor=sum(time.processor for time in times),
            communication=sum(time.communication for time in times),
            calls=sum(time.calls for time in times),
            padding=statistics.mean(time.padding for time in times),
        )

    def end(self) -> None:
        """End the job, and its log."""
        self._grant(0, recorded=True, settles=False)
        for process in self._processes:
            assert process.wait(LIMIT_S) == 0, process.args

    def _grant(self, steps: int, *, recorded: bool, settles: bool) -> None:
        for file in self._files:
            file.write(f"{json.dumps([steps, recorded, settles])}\n")
            file.flush()

    def _read(self, file: Any) -> in_turns.Times:
        line = file.readline()
        if not line:
            raise RuntimeError(f"a rank has ended: {[process.poll() for process in self._processes]}")
        return in_turns.Times(*json.loads(line))


@contextmanager
def running(program: str, ranks: int, log: Path, options: argparse.Namespace) -> Iterator[Job]:
    """Start the ranks of a job as torchrun does, and end what is left of them."""
    port, processes, sockets = groups.free_port(), [], []
    try:
        for rank in range(ranks):
            ours, theirs = socket.socketpair()
            ours.settimeout(LIMIT_S)
            environment = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "DS_ACCELERATOR": "cpu",
                "PYTHONWARNINGS": "ignore", "COMMTRACE": log, "COMMTRACE_RECORDER": "native",
            }  # fmt: skip
            arguments = [str(theirs.fileno()), str(int(options.padded)), *(options.script or [program])]
            processes.append(
                subprocess.Popen(
                    [sys.executable, Path(__file__).with_name("in_turns.py"), *arguments],
                    env={**os.environ, **{name: str(value) for name, value in environment.items()}},
                    pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL,
                )
            )  # fmt: skip
            theirs.close()
            sockets.append(ours)
        yield Job(processes, sockets)
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
