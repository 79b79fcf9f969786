"""Blocked time of operations whose ends were observed late."""

from __future__ import annotations

from pathlib import Path

import pytest
from factory import WORLD, LogFactory, record

from commtrace.run import open_run
from commtrace.schema import Clock, Purpose

STEP_NS, LAUNCH_NS, IN_FLIGHT_NS, LATE_NS = 1_000_000, 10_000, 300_000, 900_000
STEPS, LATE_STEP = 6, 2
SITE = 9


def write(folder: Path, purpose: Purpose) -> None:
    """Write a log of two ranks with a background all_reduce per step; an end is observed after the next one began."""
    log = LogFactory(folder)
    for rank in range(2):
        process = log.process(rank, pid=100 + rank, world_size=2).known({WORLD: [0, 1]})
        process.add("sites", id=SITE, file="train.py", line=7, function="main", purpose={"name": purpose.value})
        rows = []
        for step in range(STEPS):
            begin = (step + 1) * STEP_NS
            late = LATE_NS if step == LATE_STEP and rank == 0 else 0
            times = {"t_begin": begin, "t_return": begin + LAUNCH_NS, "t_end": begin + IN_FLIGHT_NS + late, "t_wait": 0}
            rows.append(record(**times, step=step, seq=step, site=SITE, clock=Clock.FUTURE))
        process.write(rows).end()


@pytest.mark.parametrize(
    ("purpose", "longest_ns"),
    [
        (Purpose.GRADIENTS, 2 * STEP_NS - IN_FLIGHT_NS),  # it has ended when the call of the next step begins
        (Purpose.CHECKPOINT_SAVED, STEP_NS),  # nothing shows that rank 0 waited for it
    ],
)
def test_gradients_have_ended_when_the_next_phase_begins(purpose: Purpose, longest_ns: int, tmp_path: Path) -> None:
    write(tmp_path, purpose)
    table = open_run(tmp_path).table("step_times").set_index("step")["ns"]
    assert [*table.index] == [*range(1, STEPS - 1)]
    others = table.drop([LATE_STEP, LATE_STEP + 1])
    assert (others == STEP_NS).all()
    assert table[LATE_STEP] + table[LATE_STEP + 1] == 2 * STEP_NS
    assert table[LATE_STEP] == longest_ns
