"""Tables of the analyses, compared with values computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from factory import ALL_GATHER, ALL_REDUCE, ALONE, BARRIER, PAIR, RECV, SEND, WORLD, LogFactory, record, training

from commtrace.analyses.steps import STEPS_SECTION
from commtrace.analyses.tracing_cost import NOT_MEASURED, cost_per_call, describe_cost
from commtrace.run import Run, open_run
from commtrace.schema import Clock, Flag, Phase, State


def rows(table: pd.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    """Return the rows of a table as tuples."""
    return list(table[[*columns]].itertuples(index=False, name=None))


def cells(table: pd.DataFrame, row: str, *columns: str) -> list[Any]:
    """Return values of one row of an indexed table."""
    return [table.loc[row, column] for column in columns]


def single(tmp_path: Path, *records: Any, **process: Any) -> Run:
    """Return a run of one process with these records."""
    log = LogFactory(tmp_path).process(0, world_size=4, **process)
    log.known({WORLD: [0, 1, 2, 3], PAIR: [0, 1], ALONE: [0]}, {PAIR: "pipeline"}).write([*records]).end()
    return open_run(tmp_path)


@pytest.mark.parametrize(("group", "sends"), [(WORLD, True), (ALONE, False)])
def test_a_step_in_groups_of_one_rank_sends_nothing(tmp_path: Path, group: int, sends: bool) -> None:
    run = single(tmp_path, *(record(step=step, seq=step, payload=1000, group=group) for step in range(3)))
    (text,) = STEPS_SECTION.findings(run.tables())
    assert text.startswith("A training step moves 0.98 KiB per rank: 100.0 % all_reduce.")
    assert ("The recorded ranks send none of it." in text) != sends


# --- volume ---------------------------------------------------------------------------------------------------------


def test_volume_by_operation(tmp_path: Path) -> None:
    run = single(
        tmp_path,
        record(payload=1000),
        record(payload=3000),
        record(kind=ALL_GATHER, payload=4000, local=1000),
        record(kind=SEND, group=PAIR, payload=500, peer=1),
        record(kind=RECV, group=PAIR, payload=500, peer=1),
        record(group=ALONE, payload=2000),
    )
    assert rows(run.table("volume_by_operation"), "op", "calls", "payload_bytes", "wire_bytes") == [
        ("all_reduce", 3, 6000, 2 * 4000 * 3 / 4),
        ("all_gather", 1, 4000, 3000),
        ("recv", 1, 500, 0),
        ("send", 1, 500, 500),
    ]
    assert run.table("volume_by_operation")["payload_share"].sum() == pytest.approx(1)
    assert rows(run.table("volume_by_role"), "role", "payload_bytes", "wire_bytes") == [
        ("world", 8000, 9000),
        ("self", 2000, 0),
        ("pipeline", 1000, 500),
    ]


def test_an_evaluation_is_in_no_training_step(tmp_path: Path) -> None:
    evaluation = record(step=1, payload=50, phase=Phase.EVALUATION)
    run = single(
        tmp_path, record(step=-1, payload=7), *(record(step=step, payload=1000) for step in range(3)), evaluation
    )
    assert rows(run.table("volume_by_step"), "step", "calls", "payload_bytes") == [
        (-2, 1, 50), (-1, 1, 7), *((step, 1, 1000) for step in range(3)),
    ]  # fmt: skip
    assert rows(run.table("steady_step"), "op", "steps", "payload_bytes_max", "differing_steps") == [
        ("all", 3, 1000, 0), ("all_reduce", 3, 1000, 0),
    ]  # fmt: skip
    assert rows(run.table("ranks"), "calls", "training_calls", "training_payload_bytes") == [(5, 3, 3000)]
    assert ("evaluation", 50) in rows(run.table("volume_by_phase"), "phase", "payload_bytes")


def test_volumes_are_sums_over_the_ranks(tmp_path: Path) -> None:
    training(tmp_path, ranks=4, steps=2)
    table = open_run(tmp_path).table("volume_by_operation").set_index("op")
    assert cells(table, "all_reduce", "calls", "payload_bytes", "wire_bytes") == [8, 8 * 4096, 8 * 4096 * 1.5]


def test_wire_bytes_are_missing_where_one_call_does_not_tell(tmp_path: Path) -> None:
    run = single(tmp_path, record(), record(group=99))
    table = run.table("volume_by_operation")
    assert rows(table, "calls", "payload_bytes") == [(2, 2048)]
    assert table["wire_bytes"].isna().all()


def test_two_kinds_of_one_operation_are_one_row(tmp_path: Path) -> None:
    process = LogFactory(tmp_path).process().known()
    process.add("kinds", id=50, op="all_reduce", variant="Allreduce", api="mpi", dtype="int8", reduce_op="sum")
    process.write([record(), record(kind=50)])
    assert rows(open_run(tmp_path).table("volume_by_operation"), "op", "calls") == [("all_reduce", 2)]


# --- steps ----------------------------------------------------------------------------------------------------------


def test_steps_and_start_up(tmp_path: Path) -> None:
    training(tmp_path, ranks=2, steps=2)
    run = open_run(tmp_path)
    assert rows(run.table("volume_by_step"), "step", "calls", "payload_bytes") == [
        (-1, 2, 0),
        (0, 4, 12288),
        (1, 4, 12288),
    ]
    assert rows(run.table("steady_step"), "op", "calls_per_rank", "payload_bytes_per_rank", "differing_steps") == [
        ("all", 2, 6144, 0),
        ("all_reduce", 1, 4096, 0),
        ("all_gather", 1, 2048, 0),
    ]


def test_a_call_in_flight_of_a_step_that_was_not_selected_makes_no_step(tmp_path: Path) -> None:
    calls = [record(step=0), record(step=1), record(step=7, state=State.BEGUN)]
    run = single(tmp_path, *calls, settings={"steps": "0-1"})
    assert rows(run.table("volume_by_step"), "step", "calls") == [(0, 1), (1, 1)]
    assert rows(run.table("steps_by_operation"), "step", "op") == [(0, "all_reduce"), (1, "all_reduce")]
    assert run.table("steady_step")["steps"].tolist() == [2, 2]
    assert run.table("volume_by_operation")["calls"].tolist() == [3]


def test_an_operation_that_a_step_lacks_counts_nothing_there(tmp_path: Path) -> None:
    run = single(tmp_path, *(record(step=step) for step in range(5)), record(step=2, kind=ALL_GATHER))
    steady = run.table("steady_step").set_index("op")
    assert cells(steady, "all_gather", "calls_per_rank", "payload_bytes_min", "payload_bytes_max", "steps") == [
        0,
        0,
        1024,
        5,
    ]
    assert steady["differing_steps"].to_dict() == {"all": 1, "all_reduce": 0, "all_gather": 1}


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_message_sizes(tmp_path: Path) -> None:
    sizes = (0, 1, 2, 3, 4, 1023, 1024, (1 << 40) - 1, 1 << 40)
    run = single(tmp_path, *(record(payload=size) for size in sizes), record(payload=4))
    assert rows(run.table("message_size_bins"), "from_bytes", "below_bytes", "calls", "sum_bytes") == [
        (0, 1, 1, 0),
        (1, 2, 1, 1),
        (2, 4, 2, 5),
        (4, 8, 2, 8),
        (512, 1024, 1, 1023),
        (1024, 2048, 1, 1024),
        (1 << 39, 1 << 40, 1, (1 << 40) - 1),
        (1 << 40, 1 << 41, 1, 1 << 40),
    ]
    assert (4, 2, 8) in rows(run.table("message_sizes"), "payload_bytes", "calls", "sum_bytes")


# --- times ----------------------------------------------------------------------------------------------------------


def times(run: Run) -> pd.DataFrame:
    """Return the host time of the only operation, by measure."""
    return run.table("host_time").set_index("measure")


def test_host_times(tmp_path: Path) -> None:
    ends = [record(t_begin=1_000, t_return=2_000, t_wait=5_000, t_end=5_000 + 100 * n) for n in range(1, 101)]
    table = times(single(tmp_path, *ends))
    assert cells(table, "in_call", "calls_known", "calls_unknown", "p50_ns", "max_ns", "sum_ns") == [
        100,
        0,
        1_000,
        1_000,
        100_000,
    ]
    assert table.loc["waiting", "p50_ns"] == pytest.approx(5_000, rel=0.01)
    assert table.loc["waiting", "p99_ns"] == pytest.approx(9_900, rel=0.01)
    assert cells(table, "waiting", "max_ns", "sum_ns") == [10_000, 505_000]
    assert table.loc["to_completion", "sum_ns"] == 505_000 + 100 * 4_000


def test_who_waits_for_an_end_that_a_callback_saw_waits_until_then(tmp_path: Path) -> None:
    late, early = (record(t_wait=5_000, t_end=t_end, clock=Clock.FUTURE) for t_end in (9_000, 4_000))
    table = times(single(tmp_path, late, early))
    assert cells(table, "waiting", "calls_known", "max_ns", "sum_ns") == [2, 4_000, 4_000]


def test_times_that_are_not_known_are_counted_and_not_made_up(tmp_path: Path) -> None:
    run = single(
        tmp_path,
        record(t_return=0, t_wait=0, t_end=0, clock=Clock.NONE, state=State.BEGUN),
        record(t_wait=0, t_end=0, clock=Clock.NONE, state=State.UNOBSERVABLE),
        record(clock=Clock.FUTURE, t_wait=0),
        record(t_begin=0),
        record(flags=Flag.CAPTURED),
        record(flags=Flag.SIMULATED),
    )
    table = times(run)
    assert table["calls_known"].to_dict() == {"in_call": 2, "waiting": 1, "to_completion": 1}
    assert (table["calls_known"] + table["calls_unknown"]).tolist() == [6, 6, 6]


def test_no_time_known_is_missing_and_not_zero(tmp_path: Path) -> None:
    table = times(single(tmp_path, record(t_return=0, t_wait=0, t_end=0, clock=0)))
    assert table[["p50_ns", "p99_ns", "max_ns", "sum_ns"]].isna().all(axis=None)


def test_bandwidth(tmp_path: Path) -> None:
    run = single(
        tmp_path,
        record(payload=8_000, t_begin=1_000, t_end=5_000),  # 4 ranks, end observed by a wait: 2 GB/s, busbw 3
        record(payload=8_000, t_begin=1_000, t_start=4_000, t_end=5_000, clock=Clock.DEVICE),  # 8 GB/s, busbw 12
        record(payload=8_000, group=ALONE),  # nothing leaves the rank
        record(payload=8_000, batch=3),  # the end is that of the batch
        record(payload=8_000, t_end=0),
        record(kind=BARRIER, payload=0),
    )
    table = run.table("bandwidth")
    assert rows(table, "op", "end_seen_by", "calls", "algbw_gb_per_s", "busbw_gb_per_s") == [
        ("all_reduce", "device", 1, 8.0, 12.0),
        ("all_reduce", "wait", 1, 2.0, 3.0),
    ]


# --- coverage, cost, balance ----------------------------------------------------------------------------------------


def test_coverage_of_a_whole_run(tmp_path: Path) -> None:
    training(tmp_path, ranks=2, steps=2)
    coverage = open_run(tmp_path).table("coverage").iloc[0]
    expected = {
        "ranks_seen": 2,
        "world_size": 2,
        "ranks_missing": "",
        "without_end": 0,
        "records": 10,
        "calls": 10,
        "not_found": 0,
    }
    assert {name: coverage[name] for name in expected} == expected


def test_coverage_of_a_damaged_run(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    log.process(0, world_size=4).known().write([record()] * 3).stats(calls=10, dropped=2, removed=1, lost=1).add(
        "end", reason="exit"
    )
    killed = log.process(2, world_size=4).known().write([record(state=State.BEGUN), record()])
    killed.segments[0].write_bytes(killed.segments[0].read_bytes()[:-1])
    log.process(3, world_size=4, blind_spots="garbage").stats(calls=0, hook_errors=2, first_error="KeyError: 'x'")
    run = open_run(tmp_path)
    coverage = run.table("coverage").iloc[0]
    expected = {"ranks_seen": 3, "world_size": 4, "ranks_missing": "1", "without_end": 2, "records": 4, "files_cut": 1}
    assert {name: coverage[name] for name in expected} == expected
    assert coverage["first_error"] == "KeyError: 'x'"
    assert pd.isna(coverage["calls"])  # rank 2 wrote no counters
    assert run.table("processes")["not_found"].fillna(-1).tolist() == [3, -1, -1]
    assert rows(run.table("states"), "state", "calls") == [("complete", 3), ("begun", 1)]
    assert run.table("blind_spots")["processes"].tolist() == [2]


def test_tracing_cost(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    log.process(0, mono_ns=1_000).known().write(record()).stats(
        calls=1_000, cost_samples=10, cost_ns=50_000, cost_p99_ns=9_000, drain_cpu_ns=5_000_000, mono_ns=100_001_000
    )
    log.process(1, mono_ns=1_000).known().write(record()).stats(calls=5, cost_samples=0, cost_ns=0)
    log.process(2)
    log.process(3).stats(calls=1_000, first_calls=4, first_ns=400_000, steady_samples=50, steady_ns=100_000)
    table = open_run(tmp_path).table("tracing_cost")
    assert rows(table.head(1), "rank", "mean_ns", "p99_ns", "calls_ns", "drain_ns", "span_ns", "share") == [
        (0, 5_000, 9_000, 5_000_000, 5_000_000, 100_000_000, 0.1)
    ]
    assert table["rank"].tolist() == [0, 1, 3]
    assert table.loc[1, ["mean_ns", "share"]].isna().all()
    split = ["first_calls", "first_mean_ns", "steady_mean_ns"]
    assert table.head(2)[split].isna().all(axis=None)  # an older commtrace did not count them
    assert rows(table.tail(1), *split) == [(4, 100_000, 2_000)]
    # Weighted by calls, over the processes that counted.
    assert cost_per_call(table) == "2.00 us a call (first call of a call site: 100 us)"
    assert cost_per_call(table.head(1)) == "5.00 us a call"
    text = describe_cost(table.head(1), 2)
    assert text.startswith("on 1 of 2 processes: 5.00 us a call, p99 9.00 us; with writing to disk 10 % of the run's ")
    assert text.endswith(NOT_MEASURED)


def test_balance(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    for rank, sizes in enumerate(([100, 100], [100, 300], [])):
        log.process(rank, world_size=3).known({WORLD: [0, 1, 2]}).write(
            [record(payload=size, step=step) for step, size in enumerate(sizes, -1)]
        )
    table = open_run(tmp_path).table("ranks")
    assert rows(
        table, "rank", "calls", "payload_bytes", "training_calls", "training_payload_bytes", "payload_of_median"
    ) == [
        (0, 2, 200, 1, 100, 1.0),
        (1, 2, 400, 1, 300, 3.0),
        (2, 0, 0, 0, 0, 0.0),
    ]


def test_a_run_of_garbage_still_gives_every_table(tmp_path: Path) -> None:
    run = single(
        tmp_path,
        record(payload=-5, t_begin=-1, t_end=-7, step=-9, phase=255, clock=255, flags=255, state=255, kind=ALL_REDUCE),
    )
    assert all(isinstance(table, pd.DataFrame) for table in run.tables().values())
