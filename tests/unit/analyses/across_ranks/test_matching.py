"""Matching of calls of different ranks to operations, in logs of known calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from factory import ALL_GATHER, ALL_REDUCE, BARRIER, PAIR, RECV, SEND, WORLD, LogFactory, Records, record

from commtrace.analyses.across_ranks.matching import NOT_MATCHED, MatchedCalls, host_numbers, match_calls
from commtrace.run import Run, open_run
from commtrace.schema import Flag

MPI_RECV = 20
GROUPS: dict[int, Sequence[int]] = {WORLD: [0, 1, 2], PAIR: [0, 2]}


def run_of(folder: Path, rows: dict[int, list[Records]], **hosts: str) -> Run:
    """Return a run of three ranks on one host; `hosts` gives other hosts by rank ("r0")."""
    log = LogFactory(folder)
    for rank, calls in rows.items():
        process = log.process(rank, pid=100 + rank, world_size=3, host=hosts.get(f"r{rank}", "node17"), boot_id="a")
        process.known(GROUPS).write(calls)
        process.add("kinds", id=MPI_RECV, op="recv", variant="Recv", api="mpi", dtype="byte", reduce_op=None)
    return open_run(folder)


def described(calls: MatchedCalls) -> dict[tuple[tuple[int, ...], int, int, int, int], set[int]]:
    """Return the ranks (here: processes) of each operation by (group's ranks, source, destination, tag, number)."""
    operations: dict[tuple[tuple[int, ...], int, int, int, int], set[int]] = {}
    for process, instance in zip(calls["process"].tolist(), calls["instance"].tolist(), strict=True):
        if instance != NOT_MATCHED:
            channel = calls.channels[calls.channel[instance]]
            key = (channel.group.ranks, *channel[1:], int(calls.seq[instance]))
            operations.setdefault(key, set()).add(process)
    return operations


def test_collectives_match_by_group_and_number_whatever_the_operation(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        {
            0: [record(seq=0), record(group=PAIR, seq=0), record(kind=ALL_GATHER, seq=1)],
            1: [record(kind=BARRIER, seq=1), record(seq=0)],
            2: [record(seq=0), record(group=PAIR, seq=0)],
        },
    )
    calls = match_calls(run, ["t_begin", "op"])
    world, pair = (0, 1, 2), (0, 2)
    assert described(calls) == {
        (world, -1, -1, -1, 0): {0, 1, 2},
        (world, -1, -1, -1, 1): {0, 1},
        (pair, -1, -1, -1, 0): {0, 2},
    }
    assert calls.complete.tolist() == [True, False, True]
    assert calls.present.tolist() == [3, 2, 2]
    assert calls.expected.tolist() == [3, 3, 2]
    at = np.flatnonzero(calls["instance"] == 1)
    assert sorted(calls.text("op", at)) == ["all_gather", "barrier"]


def test_messages_match_by_both_ends_tag_and_number(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        {
            0: [record(kind=SEND, peer=1, tag=7, seq=0), record(kind=SEND, peer=1, tag=8, seq=0)],
            1: [record(kind=RECV, peer=0, tag=7, seq=0), record(kind=RECV, peer=0, tag=8, seq=1)],
            2: [record(kind=SEND, peer=2, tag=7, seq=0), record(kind=RECV, peer=2, tag=7, seq=0)],
        },
    )
    calls = match_calls(run, [])
    assert described(calls) == {
        ((0, 1, 2), 0, 1, 7, 0): {0, 1},
        ((0, 1, 2), 0, 1, 8, 0): {0},
        ((0, 1, 2), 0, 1, 8, 1): {1},
        ((0, 1, 2), 2, 2, 7, 0): {2},
    }
    assert calls.complete.tolist() == [True, False, False, True], "a message to itself has two calls of one rank"


def test_what_has_no_counterpart_by_number_is_not_matched(tmp_path: Path) -> None:
    captured = record(seq=0, flags=int(Flag.CAPTURED))
    unknown_group, unknown_kind = record(group=99), record(kind=99)
    from_anywhere = record(kind=RECV, peer=-1, tag=3), record(kind=MPI_RECV, peer=1, tag=-1)
    run = run_of(tmp_path, {0: [captured, unknown_group, unknown_kind, *from_anywhere], 1: [record(seq=0)]})
    calls = match_calls(run, [])
    assert calls["instance"].tolist() == [NOT_MATCHED] * 5 + [0]
    assert len(calls) == 6
    assert calls.matched.tolist() == [5]


def test_a_message_without_tag_matches_where_the_library_has_none(tmp_path: Path) -> None:
    run = run_of(tmp_path, {0: [record(kind=SEND, peer=1)], 1: [record(kind=RECV, peer=0)]})
    assert match_calls(run, []).complete.tolist() == [True]


def test_an_instance_with_more_calls_than_ranks_is_damaged_and_not_matched(tmp_path: Path) -> None:
    run = run_of(tmp_path, {0: [record(seq=0), record(seq=0), record(seq=1)], 1: [record(seq=0)], 2: [record(seq=0)]})
    calls = match_calls(run, [])
    assert calls["instance"].tolist() == [NOT_MATCHED, NOT_MATCHED, 0, NOT_MATCHED, NOT_MATCHED]
    assert calls.seq.tolist() == [1]


def test_a_second_process_of_a_rank_is_not_taken_for_the_first(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    for pid in (100, 101):
        log.process(0, pid=pid, world_size=2).known().write([record(seq=pid - 100)])
    log.process(1, pid=102, world_size=2).known().write([record(seq=0), record(seq=1)])
    calls = match_calls(open_run(tmp_path), [])
    assert calls["instance"].tolist() == [0, NOT_MATCHED, 0, 1]


def test_times_of_an_instance(tmp_path: Path) -> None:
    rows = {rank: [record(seq=5, t_begin=100 + rank), record(seq=6, t_begin=300 - rank)] for rank in range(3)}
    calls = match_calls(run_of(tmp_path, rows), ["t_begin"])
    assert calls.largest(calls["t_begin"]).tolist() == [102, 300]
    assert calls.smallest(calls["t_begin"]).tolist() == [100, 298]


def test_only_the_steps_that_are_wanted_are_read(tmp_path: Path) -> None:
    rows = {rank: [record(seq=step, step=step) for step in range(4)] for rank in range(3)}
    calls = match_calls(run_of(tmp_path, rows), ["step"], np.array([1, 3]))
    assert calls["step"].tolist() == [1, 3] * 3
    assert calls.seq.tolist() == [1, 3]


def test_a_run_without_calls(tmp_path: Path) -> None:
    calls = match_calls(run_of(tmp_path, {0: [], 1: []}), ["t_begin", "site"])
    assert len(calls) == len(calls.channel) == 0
    assert calls.complete.tolist() == []


def test_hosts_are_numbered_by_name_and_boot(tmp_path: Path) -> None:
    run = run_of(tmp_path, {0: [], 1: [], 2: []}, r1="node18")
    hosts, numbers = host_numbers(run)
    assert [hosts[number] for number in numbers] == ["node17", "node18", "node17"]
    assert len(hosts) == 2


def test_the_size_of_all_reduces_is_a_field_like_any(tmp_path: Path) -> None:
    calls = match_calls(run_of(tmp_path, {0: [record(payload=77, kind=ALL_REDUCE)]}), ["payload", "site"])
    assert calls["payload"].tolist() == [77]
    assert calls.text("site").tolist() == ["deepspeed/runtime/engine.py:2711 allreduce_bucket"]
