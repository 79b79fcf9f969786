"""Bounds of clock offsets, in logs of random programs with known clocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from factory import LogFactory, record, training
from simulated_ranks import Schedule, random_schedule

from commtrace.analyses.across_ranks.aligned_clock import clock_within
from commtrace.analyses.across_ranks.clocks import Clocks
from commtrace.analyses.across_ranks.corridors import Bounds, find_jumps, lines_within
from commtrace.run import Run, open_run

STEPPED_AT_THE_EDGE = 163, 166, 182
"""Seeds with a clock step after which, or before which, all bounds are of one kind: upper or lower."""
DEFAULT = *range(8), *STEPPED_AT_THE_EDGE
SEEDS = [
    *DEFAULT,
    *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(200) if seed not in DEFAULT),
]


def run_of(schedule: Schedule, folder: Path) -> Run:
    schedule.write(folder)
    return open_run(folder)


def clocks_of_schedule(schedule: Schedule, folder: Path) -> Clocks:
    return run_of(schedule, folder).clocks


def assert_bounds_hold(schedule: Schedule, clocks: Clocks) -> None:
    """Assert that the bounds hold at every call of every host, within the part of the run that has bounds."""
    host_of = [int(name.removeprefix("node")) for name in clocks.hosts]
    reference = schedule.clocks[host_of[clocks.reference]]
    for host, clock in zip(host_of, clocks.aligned, strict=True):
        if clock is None:
            continue
        host_calls = [call for call in schedule.calls if schedule.host_of[call[0]] == host]
        times = np.sort(np.array([call[column] for call in host_calls for column in (6, 7)], np.int64))
        true, readings = reference.read(times), schedule.clocks[host].read(times)
        inside = (true >= clock.used_at[0]) & (true <= clock.used_at[1])
        true, readings = true[inside], readings[inside]
        lower, upper = clock.offsets(true)
        earliest, latest = clock.to_reference(readings)
        assert ((lower <= readings - true) & (readings - true <= upper)).all()
        assert ((earliest <= true) & (true <= latest)).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stepped", [False, True])
def test_bounds_always_hold(seed: int, stepped: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    hosts = int(rng.integers(2, 9))
    ranks, operations = hosts * int(rng.integers(1, 3)), int(rng.integers(20, 400))
    schedule = random_schedule(rng, hosts=hosts, ranks=ranks, operations=operations, stepped=stepped)
    assert_bounds_hold(schedule, clocks_of_schedule(schedule, tmp_path))


@pytest.mark.parametrize("hosts", [pytest.param(64, marks=pytest.mark.long)])
def test_hosts_that_share_no_group_are_aligned_along_a_path(hosts: int, tmp_path: Path) -> None:
    schedule = random_schedule(np.random.default_rng(1), hosts=hosts, ranks=hosts, operations=1500)
    schedule.calls = [call for call in schedule.calls if call[2] > 0]
    clocks = clocks_of_schedule(schedule, tmp_path)
    assert_bounds_hold(schedule, clocks)
    assert all(clock is not None for clock in clocks.aligned)


def test_offset_and_drift_of_ten_seconds(tmp_path: Path) -> None:
    schedule = random_schedule(np.random.default_rng(3), hosts=2, ranks=2, operations=1000)
    run_table = run_of(schedule, tmp_path).table("clocks")
    row = run_table.iloc[1]
    rates = [clock.drift for clock in schedule.clocks]
    drift = ((1 + rates[1]) / (1 + rates[0]) - 1) * 1e6
    assert abs(row["drift_ppm"] - drift) <= row["drift_half_width_ppm"] < 20
    assert row["half_width_ns"] < 200_000
    assert (row["host"], row["reference"], row["steps"]) == ("node01", "node00", 0)
    assert run_table.iloc[0][["offset_ns", "drift_ppm", "half_width_ns", "calls"]].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_a_step_is_found_where_it_was(seed: int, tmp_path: Path) -> None:
    schedule = random_schedule(np.random.default_rng(seed), hosts=2, ranks=2, operations=400, stepped=True)
    (host,) = (host for host, clock in enumerate(schedule.clocks) if clock.steps)
    ((stepped_at, stepped_by),) = schedule.clocks[host].steps
    steps = run_of(schedule, tmp_path).table("clock_steps")
    assert len(steps) == 1
    row, sign = steps.iloc[0], 1 if host == 1 else -1
    before, after = schedule.clocks[0].read(np.array([stepped_at - 1, stepped_at]))
    assert row["after_ns"] <= before
    assert after <= row["before_ns"]
    assert row["smallest_ns"] <= sign * stepped_by <= row["largest_ns"]


def test_bounds_of_one_kind_after_the_other_hold_nowhere() -> None:
    span = -1000, 5000
    mixed = bounds([0, 1000, 2000, 3000], [0, 10, 0, 10], [False, True, False, True])
    clock = clock_within(mixed, 0, 0, span, 4)
    assert clock is not None
    assert clock.used_at == (1000, 2000)
    assert (
        clock_within(bounds([0, 1000, 2000, 3000], [0, 0, 10, 10], [False, False, True, True]), 0, 0, span, 4) is None
    )


def test_hosts_without_common_calls_have_no_bounds(tmp_path: Path) -> None:
    schedule = random_schedule(np.random.default_rng(0), hosts=2, ranks=2, operations=10)
    schedule.calls = [call for call in schedule.calls if call[0] == 0]
    run = run_of(schedule, tmp_path)
    clocks = run.clocks
    assert clocks.aligned[1] is None
    assert run.table("clocks").iloc[1][["offset_ns", "drift_ppm", "half_width_ns"]].isna().all()
    assert clocks.to_reference(np.array([0, 1]), np.array([5, 5])) is None


def test_one_host_is_its_own_reference(tmp_path: Path) -> None:
    training(tmp_path)
    run = open_run(tmp_path)
    clocks = run.clocks
    readings = np.array([5, 10**15])
    times = clocks.to_reference(np.array([0, 1]), readings)
    assert times is not None
    assert times.tolist() == readings.tolist()
    assert run.table("clocks")["half_width_ns"].tolist() == [0]


def bounds(at: list[float], value: list[float], upper: list[bool]) -> Bounds:
    return Bounds(np.array(at, np.float64), np.array(value, np.float64), np.array(upper))


def test_lines_within_a_corridor_are_those_of_a_linear_programme() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        at = np.sort(rng.uniform(0, 1e6, 40))
        upper = rng.random(40) < 0.5
        value = 100 + 1e-3 * at + np.where(upper, 1, -1) * rng.exponential(200, 40)
        lines = lines_within(Bounds(at, value, upper))
        assert lines is not None
        for time in (0.0, 5e5, 1e6):
            rates = np.linspace(-5e-3, 5e-3, 20001)[:, None]
            low = (value[~upper] - rates * (at[~upper] - time)).max(axis=1)
            high = (value[upper] - rates * (at[upper] - time)).min(axis=1)
            possible: npt.NDArray[np.bool_] = low <= high
            (lowest,), (highest,) = lines.bounds(np.array([time]))
            assert lowest <= low[possible].min(initial=np.inf) + 1e-6
            assert highest >= high[possible].max(initial=-np.inf) - 1e-6
            assert np.isclose(lowest, low[possible].min(initial=np.inf), atol=2)


def test_contradictory_bounds_have_no_line_and_a_jump_between_them() -> None:
    contradictory = bounds([0, 1000, 2000, 3000], [0, 1, 500, 501], [False, True, False, True])
    assert lines_within(contradictory) is None
    assert [*find_jumps(contradictory, 0.0)] == [(1, 2)]
    assert lines_within(contradictory, slack=300.0) is not None


def test_hosts_without_any_operation_that_matches_have_no_bounds(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    for rank in range(2):
        log.process(rank, pid=rank + 1, host=f"node{rank}", boot_id=str(rank)).known().write([record(group=99)])
    assert open_run(tmp_path).table("clocks")["offset_ns"].isna().tolist() == [False, True]
