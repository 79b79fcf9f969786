"""Wait and transfer of calls, in logs with a known schedule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from factory import ALL_REDUCE, WORLD, LogFactory, record
from simulated_ranks import OPERATIONS, Schedule, random_schedule

from commtrace.analyses.across_ranks import waits_section
from commtrace.analyses.across_ranks.call_times import COLUMNS, CallTimes
from commtrace.analyses.across_ranks.matching import match_calls
from commtrace.analyses.fold_engine import NamedTables, fold
from commtrace.run import Run, open_run
from commtrace.schema import Clock

SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(6, 100))]


def tables_of(run: Run) -> NamedTables:
    return fold(run, [waits_section.ANALYSIS])


def split(run: Run) -> CallTimes:
    return CallTimes.of(match_calls(run, [], derived=COLUMNS), run.clocks)


def true_waits(schedule: Schedule) -> list[int | None]:
    """Return the true wait of each call, in the order of the log; None for calls without an end and for sends."""
    waits: list[int | None] = []
    for rank in range(len(schedule.host_of)):
        for owner, op, _, _, _, _, begin, end, clock, last in schedule.calls:
            if owner == rank:
                waits.append(None if clock == Clock.NONE or op == "send" else max(0, min(last, end) - begin))
    return waits


@pytest.mark.parametrize("seed", SEEDS)
def test_wait_and_transfer_are_the_duration_and_the_truth_is_in_the_interval(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    hosts = int(rng.choice([1, 2, 5, 64 if seed == 0 else 3]))
    schedule = random_schedule(rng, hosts=hosts, ranks=hosts + 2, operations=200)
    schedule.write(tmp_path)
    times = split(open_run(tmp_path))
    assert (times.wait + times.transfer == times.duration).all()
    assert (times.shortest <= times.longest).all()
    assert (times.longest <= times.duration).all()
    targets = {"broadcast": False, "scatter": False, "reduce": True, "gather": True}
    calls = [call for rank in range(hosts + 2) for call in schedule.calls if call[0] == rank]
    for number, (call, true) in enumerate(zip(calls, true_waits(schedule), strict=True)):
        if not times.known[number] or true is None:
            continue
        rank, op, peer = call[0], call[1], call[3]
        if op in targets and (rank == peer) != targets[op]:
            true = 0  # this rank waits for no other
        tolerance = 2 + 1e-3 * true  # clock drift
        assert times.shortest[number] - tolerance <= true <= times.longest[number] + tolerance, (call, number)
    if hosts == 1:
        assert times.known.sum() >= sum(true is not None for true in true_waits(schedule))
        assert (times.shortest == times.longest).all()


def two_ranks(folder: Path, *calls: tuple[str, int, int, int, int], bytes_: int = 1000) -> Run:
    """Return a run of two ranks; a call is (operation, begin and end on rank 0, begin and end on rank 1)."""
    kinds = {name: 100 + number for number, name in enumerate((*OPERATIONS[:-1], "send", "recv"))}
    log = LogFactory(folder)
    for rank in (0, 1):
        rows = []
        for seq, (op, *times) in enumerate(calls):
            name = op if op != "message" else ("send", "recv")[rank]
            peer = 1 - rank if op == "message" else 0
            begin, end = times[2 * rank : 2 * rank + 2]
            rows.append(
                record(kind=kinds[name], seq=seq, peer=peer, tag=0, t_begin=begin, t_return=end, t_end=end,
                       clock=int(Clock.RETURN), payload=bytes_, local=10, group=WORLD)
            )  # fmt: skip
        process = log.process(rank, pid=rank + 1, boot_id="a").known()
        for name, kind in kinds.items():
            process.add("kinds", id=kind, op=name, variant=name, api="torch", dtype="float32", reduce_op=None)
        process.write(rows).end()
    return open_run(folder)


@pytest.mark.parametrize(
    ("op", "times", "pattern", "wait"),
    [
        ("all_reduce", (100, 400, 200, 400), "wait at n x n", 100),
        ("barrier", (100, 400, 200, 400), "wait at barrier", 100),
        ("broadcast", (200, 400, 100, 400), "late broadcast", 100),
        ("broadcast", (100, 400, 200, 400), "late broadcast", 0),
        ("reduce", (100, 400, 200, 400), "early reduce", 100),
        ("message", (200, 300, 100, 400), "late sender", 100),
        ("message", (100, 400, 200, 400), "late receiver", 100),
        ("message", (100, 150, 200, 400), "late receiver", 0),
    ],
)
def test_patterns(op: str, times: tuple[int, int, int, int], pattern: str, wait: int, tmp_path: Path) -> None:
    tables = tables_of(two_ranks(tmp_path, (op, *times)))
    patterns = tables["wait_patterns"].set_index("pattern")["wait_ns"]
    assert patterns[pattern] == wait
    assert patterns.sum() == wait
    assert tables["waits_by_operation"]["wait_ns"].sum() == wait


def test_tables_by_every_key_have_the_same_sums(tmp_path: Path) -> None:
    run = two_ranks(tmp_path, ("all_reduce", 1100, 1400, 1200, 1400), ("message", 2200, 2300, 2100, 2400))
    tables = {name: table for name, table in tables_of(run).items() if name != "wait_patterns"}
    for table in tables.values():
        sums = table[["calls", "duration_ns", "wait_ns", "transfer_ns"]].sum().tolist()
        assert sums == [4, 900, 200, 700]
    by_op = tables["waits_by_operation"].set_index("op")
    assert by_op.loc["all_reduce", "busbw_gb_per_s"] == 2000 / 500
    assert by_op.loc["all_reduce", "transfer_busbw_gb_per_s"] == 2000 / 400
    sample = fold(run, [waits_section.SAMPLE])["waiting"].iloc[0]
    assert (sample["every"], sample["calls"], sample["wait_ns"]) == (1, 4, 200)


def test_an_operation_that_a_rank_lacks_is_left_out(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    log.process(0).known().write([record(kind=ALL_REDUCE)]).end()
    table = tables_of(open_run(tmp_path))["waits_by_operation"]
    assert table[["calls", "calls_unknown", "duration_ns"]].to_numpy().tolist() == [[0, 1, 0]]
