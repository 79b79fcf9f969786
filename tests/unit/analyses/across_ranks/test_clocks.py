"""Bounds of clock offsets, in logs of random programs with known clocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from factory import LogFactory, record, training
from simulated_ranks import HostClock, Schedule, random_schedule

from commtrace.analyses.across_ranks.aligned_clock import clock_within
from commtrace.analyses.across_ranks.clocks import USEFUL_NS, Clocks
from commtrace.analyses.across_ranks.clocks_section import CLOCKS_SECTION
from commtrace.analyses.across_ranks.corridors import Bounds, Corridor, Rates, steepest
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


def slewed(clock: HostClock, rng: np.random.Generator, seconds: int) -> HostClock:
    """Return a clock whose rate changes by up to 5 ppm every 64 seconds."""
    changes = [(at * 10**9, float(rng.uniform(-5e-6, 5e-6))) for at in range(0, seconds, 64)]
    return replace(clock, rates=changes)


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(3, 100))]
)
def test_bounds_hold_where_rates_change(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    hosts, gap = int(rng.integers(2, 5)), int(rng.choice([10**8, 10**9, 10**10]))
    schedule = random_schedule(rng, hosts=hosts, ranks=2 * hosts, operations=500, gap_ns=gap)
    length = max(call[7] for call in schedule.calls) // 10**9
    schedule.clocks = [slewed(clock, rng, length) for clock in schedule.clocks]
    run = run_of(schedule, tmp_path)
    assert_bounds_hold(schedule, run.clocks)
    table = run.table("clocks")
    assert table[["steps", "contradiction_ns"]].to_numpy().tolist() == [[0, 0]] * hosts
    sums = [np.cumsum([0.0, *(rate for _, rate in clock.rates)]) for clock in schedule.clocks]
    assert table["rate_change_ppm"].max() < 1e6 * sum(sum_.max() - sum_.min() for sum_ in sums) + 1


def test_a_large_change_of_a_rate_is_no_jump(tmp_path: Path) -> None:
    schedule = random_schedule(np.random.default_rng(1), hosts=2, ranks=2, operations=1000)
    schedule.clocks = [schedule.clocks[0], replace(schedule.clocks[1], rates=[(6 * 10**9, 4e-4)])]
    run = run_of(schedule, tmp_path)
    assert_bounds_hold(schedule, run.clocks)
    row = run.table("clocks").iloc[1]
    assert (row["steps"], row["contradiction_ns"]) == (0, 0)
    assert 200 < row["rate_change_ppm"] <= 401


def test_the_reference_is_no_host_whose_clock_jumped(tmp_path: Path) -> None:
    schedule = random_schedule(np.random.default_rng(2), hosts=4, ranks=4, operations=400)
    schedule.clocks = [replace(schedule.clocks[0], steps=[(3 * 10**9, 10**8)]), *schedule.clocks[1:]]
    run = run_of(schedule, tmp_path)
    assert run.table("clocks")["steps"].tolist() == [1, 0, 0, 0]
    assert_bounds_hold(schedule, run.clocks)


@pytest.mark.parametrize("seed", range(3))
def test_timestamps_that_contradict_each_other_are_no_jumps(seed: int, tmp_path: Path) -> None:
    """Two ranks of a host have clocks that differ by a constant."""
    schedule = random_schedule(np.random.default_rng(seed), hosts=3, ranks=6, operations=600)
    schedule.ahead = {3: 2_000_000}
    run = run_of(schedule, tmp_path)
    table = run.table("clocks")
    assert table["steps"].tolist() == [0, 0, 0]
    assert (table["contradiction_ns"] > 0).tolist() == [False, True, False]
    row = table.iloc[1]
    assert row["contradiction_ns"] <= 2_000_000 <= row["contradiction_ns"] + 2 * row["half_width_ns"]
    assert 0 < row["contradicting_calls"] <= row["calls"]
    assert_bounds_hold(schedule, run.clocks)
    schedule.clocks = [
        replace(clock, offset=clock.offset + 2_000_000 * (host == 1)) for host, clock in enumerate(schedule.clocks)
    ]
    assert_bounds_hold(schedule, run.clocks)
    assert any("contradict each other" in text for text in findings(run))


def findings(run: Run) -> list[str]:
    assert CLOCKS_SECTION.findings is not None
    return [*CLOCKS_SECTION.findings(run.tables())]


def test_bounds_of_one_kind_after_the_other_hold_nowhere() -> None:
    span = -1000, 5000
    mixed = bounds([0, 1000, 2000, 3000], [0, 10, 0, 10], [False, True, False, True])
    clock = clock_within(mixed, 0, 0, span)
    assert clock is not None
    assert clock.used_at == (1000, 2000)
    assert clock_within(bounds([0, 1000, 2000, 3000], [0, 0, 10, 10], [False, False, True, True]), 0, 0, span) is None


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
    return Bounds(np.array(at, np.float64), np.array(value, np.float64), np.array(upper), np.arange(len(at)))


def random_bounds(rng: np.random.Generator, count: int) -> Bounds:
    """Return bounds on a function whose rate is 1,000 ppm."""
    at = np.sort(rng.uniform(0, 1e9, count))
    upper = rng.random(count) < 0.5
    return bounds([*at], [*(100 + 1e-3 * at + np.where(upper, 1, -1) * rng.exponential(200, count))], [*upper])


def test_the_rate_that_bounds_imply_is_the_largest_of_all_pairs() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        random = random_bounds(rng, 40)
        low, high = random.sides
        with np.errstate(divide="ignore", invalid="ignore"):
            pairs = (low[:, None] - high) / (random.at[:, None] - random.at)
        expected = pairs[np.tril_indices(40, -1)]
        largest = max(float(expected[np.isfinite(expected)].max()), -5e-3)
        assert steepest(random.at[None], low[None], high[None]).tolist() == pytest.approx([largest], rel=1e-6)


def test_a_corridor_follows_from_all_bounds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        random = random_bounds(rng, 40)
        rates = Rates.of(random)
        assert rates.least[0] <= 1e-3 <= rates.most[0]
        slow, fast = rates.least[0] - rates.spread[0], rates.most[0] + rates.spread[0]
        corridor = Corridor.of(random.relevant(), rates)
        times = np.concatenate([rng.uniform(-1e8, 1.1e9, 50), random.at])
        low, high = random.sides
        distance = times[:, None] - random.at
        expected = (
            (low + np.where(distance > 0, slow, fast) * distance).max(axis=1),
            (high + np.where(distance > 0, fast, slow) * distance).min(axis=1),
        )
        for found, right in zip(corridor.bounds(times), expected, strict=True):
            assert np.abs(found - right).max() < 1e-3
        knots = corridor.knots(0, 1e9)
        inside = np.sort(rng.uniform(0, 1e9, 200))
        for curve, right in zip(corridor.bounds(knots), corridor.bounds(inside), strict=True):
            assert np.abs(np.interp(inside, knots, curve) - right).max() < 1e-3


def test_hosts_without_any_operation_that_matches_have_no_bounds(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    for rank in range(2):
        log.process(rank, pid=rank + 1, host=f"node{rank}", boot_id=str(rank)).known().write([record(group=99)])
    assert open_run(tmp_path).table("clocks")["offset_ns"].isna().tolist() == [False, True]


def test_a_clock_that_calls_hardly_bound_is_told(tmp_path: Path) -> None:
    schedule = random_schedule(np.random.default_rng(5), hosts=2, ranks=2, operations=200)
    known = run_of(schedule, tmp_path / "known")
    assert known.table("clocks")["half_width_ns"].max() < USEFUL_NS
    assert not any("wall clocks" in text for text in findings(known))
    assert CLOCKS_SECTION.findings is not None
    for half_width, how in ((3 * USEFUL_NS, "only within 3.00 ms"), (np.nan, "not at all")):
        table = known.tables()["clocks"].copy()
        table.loc[1, "half_width_ns"] = half_width
        (told,) = CLOCKS_SECTION.findings({**known.tables(), "clocks": table})
        assert f"the clock of node01 {how}" in told
