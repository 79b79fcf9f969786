"""The diagnosis of jobs that hang or died, in logs of known calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from factory import BARRIER, PAIR, RECV, SEND, WORLD, LogFactory, ProcessFactory, Records, record, training

from commtrace.analyses.across_ranks import stalls, stuck_calls
from commtrace.analyses.across_ranks.stuck_calls import find_stuck_calls
from commtrace.analyses.across_ranks.stuck_calls_section import diagnosis
from commtrace.analyses.fold_engine import fold
from commtrace.reading.recorded_run import RecordedRun
from commtrace.recording.ring import Silence
from commtrace.run import open_run
from commtrace.schema import Clock, Flag, State

SECOND = 10**9
STEPS, STEP = 10, SECOND // 10
LAST = STEPS * STEP
"""Time, in ns, at which the call under test begins: one step after the last step of the training."""
BROADCAST, DOUBLES, RECV_ANY, SECOND_GROUP, OTHER_PAIR = 20, 21, 22, 9, 8
GROUPS: dict[int, Sequence[int]] = {WORLD: [0, 1, 2], PAIR: [0, 1], SECOND_GROUP: [0, 1, 2], OTHER_PAIR: [1, 2]}


def steps(count: int = STEPS) -> list[Records]:
    """Return the first `count` calls of the group: all_reduces that completed."""
    return [call(number, number * STEP, t_return=number * STEP + 10, t_end=number * STEP + 99, state=State.COMPLETE,
                 clock=1) for number in range(count)]  # fmt: skip


def call(seq: int = STEPS, at: int = LAST, **fields: int) -> Records:
    """Return a call that did not complete."""
    known = {"t_begin": at + 1, "t_return": 0, "t_wait": 0, "t_end": 0, "clock": 0, "state": State.BEGUN, "site": 2}
    return record(**{**known, "seq": seq, **fields})


def died(process: ProcessFactory, after: int) -> None:
    """Record that the process was killed at time `after` and its records were recovered."""
    process.stats(mono_ns=after).add("salvage", records=1, host="node17", unix_ns=1)


def tables(
    folder: Path, rows: Mapping[int, Sequence[Records]], *, until: int = 20 * SECOND, ends: Sequence[int] = (),
    stats: Mapping[str, int] | None = None, world_size: int = 3, hosts: Mapping[int, str] | None = None,
) -> dict[str, pd.DataFrame]:  # fmt: skip
    """Return the tables of a run; the ranks `ends` closed their logs, the others were killed at time `until`."""
    log = LogFactory(folder)
    for rank, last in rows.items():
        host = (hosts or {}).get(rank, "node17")
        process = log.process(rank, pid=100 + rank, world_size=world_size, host=host, boot_id=host).known(GROUPS)
        for number, op, dtype, api in (
            (BROADCAST, "broadcast", "float32", "torch"),
            (DOUBLES, "all_reduce", "float64", "torch"),
            (RECV_ANY, "recv", "float32", "mpi"),
        ):
            process.add("kinds", id=number, op=op, variant=op, api=api, dtype=dtype, reduce_op=None)
        process.write([*steps(), *last])
        if rank in ends:
            process.stats(mono_ns=until, **(stats or {})).add("end", mono_ns=until, unix_ns=1, reason="exit")
        else:
            died(process.stats(**(stats or {})), until)
            if stats:
                process.stats(mono_ns=until, **stats)
    return verdict_tables(folder)


def verdict_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """Return the tables `stuck_calls` and `stuck_ranks` of a run, without running other analyses."""
    return fold(open_run(folder), [stuck_calls.ANALYSIS, stalls.ANALYSIS])


def rows_of(result: Mapping[str, pd.DataFrame]) -> list[tuple[Any, ...]]:
    """Return operation, number, waiting ranks, absent ranks and disagreement of each stuck call."""
    columns = ["op", "seq", "waiting_ranks", "absent_ranks", "disagreement"]
    return [*result["stuck_calls"][columns].itertuples(index=False, name=None)]


ABSENT = {0: [call()], 1: [], 2: [call()]}

KINDS: dict[str, tuple[dict[int, list[Records]], list[tuple[Any, ...]]]] = {
    "absent": (ABSENT, [("all_reduce", 10, "0,2", "1", "")]),
    "operation": (
        {0: [call()], 1: [call(kind=BARRIER, payload=0)], 2: [call()]},
        [("all_reduce", 10, "0-2", "", "operation: all_reduce on rank 0,2, barrier on rank 1")],
    ),
    "size": (
        {0: [call()], 1: [call(payload=8)], 2: [call()]},
        [("all_reduce", 10, "0-2", "", "size: 1,024 bytes on rank 0,2, 8 bytes on rank 1")],
    ),
    "dtype": (
        {0: [call()], 1: [call(kind=DOUBLES)], 2: [call()]},
        [("all_reduce", 10, "0-2", "", "dtype: float32 on rank 0,2, float64 on rank 1")],
    ),
    "root": (
        {rank: [call(kind=BROADCAST, peer=int(rank == 1))] for rank in range(3)},
        [("broadcast", 10, "0-2", "", "root: rank 0 on rank 0,2, rank 1 on rank 1")],
    ),
    "order": (
        {rank: [call(0, group=PAIR if rank == 1 else SECOND_GROUP)] for rank in range(3)},
        [
            ("all_reduce", 0, "0,2", "1", "order: rank 1 is in all_reduce 0 of group 0-1/2, which waits in turn"),
            ("all_reduce", 0, "1", "0", "order: rank 0 is in all_reduce 0 of group 0-2/9, which waits in turn"),
        ],
    ),
    "subgroup": ({0: [call(0, group=PAIR)], 1: [], 2: [call()]}, [
        ("all_reduce", 0, "0", "1", ""), ("all_reduce", 10, "2", "0-1", ""),
    ]),
    "receive": ({0: [call(0, kind=RECV, peer=1, tag=5)], 1: [], 2: []}, [("recv", 0, "0", "1", "")]),
    "receive of any tag": ({0: [call(0, kind=RECV_ANY, peer=1)], 1: [], 2: []}, [("recv", None, "0", "1", "")]),
    "receive from anywhere": ({0: [call(0, kind=RECV_ANY)], 1: [], 2: []}, [("recv", None, "0", "1-2", "")]),
    "send": ({0: [call(0, kind=SEND, peer=1, tag=5)], 1: [], 2: []}, [("send", 0, "0", "1", "")]),
    "tag": (
        {0: [call(0, kind=RECV, peer=1, tag=5)], 1: [call(0, kind=SEND, peer=0, tag=7, state=State.COMPLETE)], 2: []},
        [("recv", 0, "0", "1", "tag: 5 on rank 0, 7 on rank 1")],
    ),
    "nobody is absent": ({rank: [call()] for rank in range(3)}, [("all_reduce", 10, "0-2", "", "")]),
    "device": (  # the end of a call on a device is not observed
        {0: [call(state=State.UNOBSERVABLE, t_return=LAST + 9)], 1: [], 2: [call(state=State.UNOBSERVABLE)]},
        [("all_reduce", 10, "0,2", "1", "")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_hang(kind: str, tmp_path: Path) -> None:
    rows, expected = KINDS[kind]
    result = tables(tmp_path, rows)
    shown = [(op, None if seq is pd.NA else seq, *others) for op, seq, *others in rows_of(result)]
    assert sorted(shown, key=str) == sorted(expected, key=str)
    assert shown[0] == expected[0]  # the cause is listed first
    assert set(result["stuck_calls"]["site"]) == {"project/train.py:40 main"}
    assert (result["stuck_calls"]["waited_ns"] > 18 * SECOND).all()


@pytest.mark.parametrize(
    ("silence", "late_s", "waited_s"),
    [
        ("", 0, 20),
        ("", 9, 11),
        ("", 18, None),
        ("late", 0, None),
        ("stopped", 0, None),
        ("resumed", 0, None),
        ("lock", 0, 20),
    ],
)
def test_time_in_which_a_process_was_stopped(
    silence: Silence, late_s: int, waited_s: int | None, tmp_path: Path
) -> None:
    """It does not wait then: not while it is stopped, and not before it went on (`late_s`, with its next turn)."""
    log = LogFactory(tmp_path)
    for rank, last in ABSENT.items():
        log.process(rank, pid=100 + rank, world_size=3).known(GROUPS).write([*steps(), *last])
    run = open_run(tmp_path)
    live = [
        replace(
            process, live_at_ns=LAST + 20 * SECOND, live_turn_ns=LAST + SECOND, silence=silence,
            live_late_turn_ns=LAST + late_s * SECOND if late_s else 0,
        )
        for process in run.processes
    ]  # fmt: skip
    found = find_stuck_calls(RecordedRun(replace(run.log, processes=(*live,))))["stuck_calls"]
    assert (found["waited_ns"] / SECOND).round().tolist() == ([] if waited_s is None else [waited_s])


def test_a_pause_in_which_a_process_was_stopped_is_none_of_the_program(tmp_path: Path) -> None:
    """A hang after it is told as early as one without it."""
    rows = {rank: [call(at=LAST + 60 * SECOND) for _ in last] for rank, last in ABSENT.items()}
    log = LogFactory(tmp_path)
    for rank, last in rows.items():
        log.process(rank, pid=100 + rank, world_size=3).known(GROUPS).write([*steps(), *last])
    run = open_run(tmp_path)
    for late_s, is_told in ((0, False), (59, True)):
        live = [
            replace(
                process, live_at_ns=LAST + 80 * SECOND, live_turn_ns=LAST + 80 * SECOND,
                live_late_turn_ns=LAST + late_s * SECOND if late_s else 0,
            )
            for process in run.processes
        ]  # fmt: skip
        found = find_stuck_calls(RecordedRun(replace(run.log, processes=(*live,))))["stuck_calls"]
        assert bool(len(found)) is is_told


def test_a_circle_is_described_once(tmp_path: Path) -> None:
    (text,) = diagnosis(tables(tmp_path, KINDS["order"][0]))
    assert text.startswith("2 calls wait for each other in a circle since ")
    assert "ranks 0,2 are in all_reduce 0 of ranks 0-2 (project/train.py:40 main), without rank 1" in text
    assert "rank 1 is in all_reduce 0 of ranks 0-1 (project/train.py:40 main), without rank 0" in text


def test_where_the_ranks_are(tmp_path: Path) -> None:
    result = tables(tmp_path, ABSENT)
    ranks = result["stuck_ranks"].set_index("rank")
    assert [*ranks["part"]] == ["waiting", "absent", "waiting"]
    assert [*ranks["call"]] == ["all_reduce 10 of group 0-2/1", "all_reduce 9 of group 0-2/1",
                                "all_reduce 10 of group 0-2/1"]  # fmt: skip
    assert [*ranks["state"]] == ["begun", "complete", "begun"]
    assert {*ranks["end"]} == {"died"}
    verdict, first, second = diagnosis(result)
    assert verdict == "Rank 1 did not come: not known why; ranks 0,2 waited for it (confidence: medium)."
    assert first.startswith(
        "all_reduce 10 of ranks 0-2 has not completed: ranks 0,2 entered it at 2026-11-21 04:54:21 "
    )
    assert "for at least 19.0 s (project/train.py:40 main); rank 1 did not enter it." in first
    assert second.startswith(
        "Rank 1 last entered all_reduce 9 of group 0-2/1 at project/train.py:40 main (complete), 19.1"
    )


def test_calls_that_follow_from_another_come_after_it(tmp_path: Path) -> None:
    # Rank 1 waits for rank 2, which computes; rank 0 waits for rank 1.
    result = tables(tmp_path, {0: [call(0, LAST - 50, group=PAIR)], 1: [call(0, group=OTHER_PAIR)], 2: []})
    assert rows_of(result) == [("all_reduce", 0, "1", "2", ""), ("all_reduce", 0, "0", "1", "")]


def test_an_interrupted_run_has_no_verdict(tmp_path: Path) -> None:
    """Ranks that are killed at about the same time, within different calls, are not stuck."""
    result = tables(tmp_path, {0: [call()], 1: [], 2: [call()]}, until=LAST + SECOND // 5)
    assert not len(result["stuck_calls"])
    assert not len(result["stuck_ranks"])


def test_a_wait_is_compared_with_the_pauses_of_the_run(tmp_path: Path) -> None:
    long = 30 * SECOND
    ended = call(10, LAST + long, t_return=LAST + long + 9, t_end=LAST + long + 9, state=State.COMPLETE, clock=1)
    rows = {rank: [ended, call(11, LAST + long + STEP)] if rank else [ended] for rank in range(3)}
    assert not len(tables(tmp_path / "as long", rows, until=LAST + 2 * long)["stuck_calls"])
    assert len(tables(tmp_path / "far longer", rows, until=LAST + 4 * long)["stuck_calls"]) == 1


@pytest.mark.parametrize("counter", ["dropped", "removed", "lost", "unrecorded", "hook_errors", "not_selected"])
def test_records_that_are_missing_prove_nothing(counter: str, tmp_path: Path) -> None:
    """Rank 1 may have made the call without a record; if only old records were removed, its last calls are known."""
    result = tables(tmp_path, ABSENT, stats={counter: 1})
    assert len(result["stuck_calls"]) == (counter == "removed")
    rows = {0: [call(0, group=PAIR)], 1: [], 2: []}
    assert not len(tables(tmp_path / "another channel", rows, stats={counter: 1})["stuck_calls"])


def test_damaged_records_prove_nothing(tmp_path: Path) -> None:
    rows = {0: [call()], 1: [record(payload=-1)], 2: [call()]}
    assert not len(tables(tmp_path, rows)["stuck_calls"])


@pytest.mark.parametrize("damage", ["none", "cut", "garbled", "device"])
def test_damaged_kept_records_prove_nothing(damage: str, tmp_path: Path) -> None:
    """Kept records that are cut, impossible, or timed by an inexact device clock prove nothing."""
    tables(tmp_path, ABSENT, stats={"not_selected": 1, "device_clock_ns": 100 * SECOND})
    for path in tmp_path.glob("*/*/*.00000.npy"):
        kept = np.load(path)[:STEPS]
        if damage == "garbled":
            kept["payload"][-1] = -1
        if damage == "device":
            kept["clock"] = Clock.DEVICE
        kept_path = path.with_name(path.name.replace(".00000.npy", "-kept.npy"))
        np.save(kept_path, kept)
        if damage == "cut":
            kept_path.write_bytes(kept_path.read_bytes()[:-1])
    assert len(verdict_tables(tmp_path)["stuck_calls"]) == (damage == "none")
    assert {note.consequence for note in open_run(tmp_path).notes if note.kind == "cut"} == (
        {"its calls are kept besides the log, and not counted"} if damage == "cut" else set()
    )


def test_calls_that_were_kept_long_after_they_returned_prove_nothing(tmp_path: Path) -> None:
    """Rank 1 made the call, but did not keep it, because two older calls were never waited for."""
    tables(tmp_path, ABSENT, stats={"not_selected": 1})
    for path in tmp_path.glob("*/*/*.00000.npy"):
        every = np.load(path)
        kept = every[:STEPS].copy()
        if "rank00001" in path.name:
            kept["state"][:2], kept["t_end"][:2], kept["clock"][:2] = State.RETURNED, 0, 0
            kept["group"][2:] = PAIR
            np.save(path, every[:0])
        np.save(path.with_name(path.name.replace(".00000.npy", "-kept.npy")), kept)
    assert not len(verdict_tables(tmp_path)["stuck_calls"])


def test_a_log_that_was_not_recovered_proves_nothing(tmp_path: Path) -> None:
    tables(tmp_path, ABSENT)
    (path,) = tmp_path.glob("*/*/rank00001-101.jsonl")
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if "salvage" not in line))
    assert not len(verdict_tables(tmp_path)["stuck_calls"])


def test_a_rank_without_a_log_proves_nothing(tmp_path: Path) -> None:
    assert not len(tables(tmp_path, {0: [call()], 2: [call()]})["stuck_calls"])


def test_a_killed_rank_whose_calls_fail_on_the_others(tmp_path: Path) -> None:
    failed = call(state=State.FAILED)
    result = tables(tmp_path, {0: [failed], 1: [call()], 2: [failed]}, ends=[0, 2], until=LAST + SECOND // 5)
    assert rows_of(result) == [("all_reduce", 10, "0,2", "1", "")]
    verdict, first, second = diagnosis(result)
    assert verdict == "Rank 1 ended without closing the log; ranks 0,2 waited for it (confidence: high)."
    assert first == ("all_reduce 10 of ranks 0-2 did not complete: it failed on ranks 0,2 (project/train.py:40 main); "
                     "rank 1 did not enter it, or ended in it.")  # fmt: skip
    assert second.endswith("(begun), 200 ms before the rank was last seen; ended without closing its log.")


@pytest.mark.parametrize("ends", [[0], [0, 1, 2], [1, 2]])
def test_calls_that_fail_while_a_job_is_interrupted(ends: list[int], tmp_path: Path) -> None:
    """All ranks exit, in random order: by a signal, or by the exception that the exit of another rank causes."""
    failed = call(state=State.FAILED)
    result = tables(tmp_path, {0: [failed], 1: [], 2: [failed]}, ends=ends, until=LAST + SECOND // 5)
    assert not len(result["stuck_calls"])


def test_a_timeout(tmp_path: Path) -> None:
    """Calls that failed after a long time were stuck if the absent rank was alive for all of it."""
    failed = call(state=State.FAILED)
    result = tables(tmp_path, {0: [failed], 1: [], 2: [failed]}, ends=[0, 1, 2])
    assert rows_of(result) == [("all_reduce", 10, "0,2", "1", "")]


def test_a_call_that_failed_and_after_which_the_program_went_on(tmp_path: Path) -> None:
    after = [call(n, LAST + n * STEP, group=PAIR, state=State.COMPLETE, t_end=LAST + n * STEP + 9) for n in range(100)]
    result = tables(tmp_path, {0: [call(state=State.FAILED), *after], 1: after, 2: []}, ends=[0, 1, 2])
    assert not len(result["stuck_calls"])


def test_a_thread_that_listens_is_not_stuck(tmp_path: Path) -> None:
    """A receive in flight is not stuck while its process makes other calls."""
    after = [call(10 + n, LAST + n * STEP, state=State.COMPLETE, t_end=LAST + n * STEP + 9) for n in range(190)]
    listens = call(0, kind=RECV, peer=1, tag=5, thread=2)
    assert not len(tables(tmp_path, {0: [listens, *after], 1: after, 2: after})["stuck_calls"])


def test_sizes_that_may_differ(tmp_path: Path) -> None:
    def rows(**fields: int) -> dict[int, list[Records]]:
        done = {"state": State.COMPLETE, "t_return": LAST + 9, "t_end": LAST + 9}
        return {rank: [call(payload=8 * (rank + 1), **done, **fields)] for rank in range(3)}

    assert len(tables(tmp_path / "even", rows())["stuck_calls"]) == 1
    for flag in (Flag.OBJECT, Flag.UNEVEN, Flag.SPARSE):
        assert not len(tables(tmp_path / str(flag.name), rows(flags=flag))["stuck_calls"])


def test_ranks_of_several_hosts(tmp_path: Path) -> None:
    result = tables(tmp_path, ABSENT, hosts={0: "a", 1: "b", 2: "c"})
    assert rows_of(result) == [("all_reduce", 10, "0,2", "1", "")]


def test_a_healthy_run_is_not_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training(tmp_path)
    monkeypatch.delattr(stuck_calls, "LastCalls")
    assert not len(verdict_tables(tmp_path)["stuck_calls"])


def test_a_dry_run_has_none(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    for rank in range(2):
        log.process(rank, pid=rank + 1, simulated=True).known().write([record(t_begin=1, flags=Flag.SIMULATED)])
    assert not len(verdict_tables(tmp_path)["stuck_calls"])
