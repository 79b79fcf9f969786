"""The event table, and the names of ids in records."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from factory import ALL_GATHER, ALL_REDUCE, ALONE, PAIR, RECV, SEND, WORLD, LogFactory, record, training

from commtrace.errors import NoSuchTableError
from commtrace.rank_ranges import format_ranks, is_selected, parse_ranks, rank_ranges, select_steps
from commtrace.reading.labels import group_label, short_paths
from commtrace.reading.table_reader import RecordedGroup
from commtrace.run import open_run
from commtrace.schema import EVENT_COLUMNS, Flag, Phase, State


def single_event(tmp_path: Path, rank: int = 0, **fields: int) -> pd.Series:
    """Write a run with one event, and return the event."""
    process = LogFactory(tmp_path).process(rank, world_size=4)
    process.known({WORLD: [0, 1, 2, 3], PAIR: [2, 0], ALONE: [rank]}, {PAIR: "tensor"}).write(record(**fields))
    return open_run(tmp_path).events().iloc[0]


def test_columns_are_the_normal_form(tmp_path: Path) -> None:
    training(tmp_path)
    events = open_run(tmp_path).events()
    assert tuple(events.columns) == EVENT_COLUMNS
    assert len(events) == 2 * 7
    assert events["payload_bytes"].dtype == np.int64


def test_columns_are_there_without_events(tmp_path: Path) -> None:
    LogFactory(tmp_path).process()
    events = open_run(tmp_path).events()
    assert tuple(events.columns) == EVENT_COLUMNS
    assert len(events) == 0


def test_an_event(tmp_path: Path) -> None:
    event = single_event(tmp_path, peer=3, tag=7, seq=5, micro_batch=2, flags=Flag.ASYNC | Flag.COALESCED)
    assert event.to_dict() == {
        "rank": 0,
        "op": "all_reduce",
        "variant": "allreduce_",
        "api": "torch",
        "group": "0-3/1",
        "group_ranks": "0-3",
        "group_size": 4,
        "role": "world",
        "dtype": "float32",
        "payload_bytes": 1024,
        "wire_bytes": 1536.0,
        "peer": 3,
        "tag": 7,
        "seq": 5,
        "t_begin_ns": 1_000,
        "t_return_ns": 3_000,
        "t_wait_ns": 4_000,
        "t_start_ns": 0,
        "t_end_ns": 9_000,
        "step": 0,
        "micro_batch": 2,
        "phase": "backward",
        "site": "deepspeed/runtime/engine.py:2711 allreduce_bucket",
        "state": "complete",
        "flags": "async|coalesced",
        "purpose": "not recorded",
    }


def test_what_is_not_known_is_called_unknown_or_missing(tmp_path: Path) -> None:
    event = single_event(tmp_path, kind=77, group=88, site=99, flags=0)
    assert [event[name] for name in ("op", "group", "role", "site")] == ["unknown"] * 4
    assert event["flags"] == ""
    assert pd.isna(event["group_size"])
    assert pd.isna(event["wire_bytes"])


def test_a_site_that_was_not_recorded_is_empty(tmp_path: Path) -> None:
    assert single_event(tmp_path, site=0)["site"] == ""


@pytest.mark.parametrize(("group", "role"), [(WORLD, "world"), (PAIR, "tensor"), (ALONE, "self")])
def test_roles(tmp_path: Path, group: int, role: str) -> None:
    assert single_event(tmp_path, group=group)["role"] == role


def test_a_role_that_one_rank_was_told_holds_on_all(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    log.process(0, world_size=4).known({PAIR: [0, 1]}).write(record(group=PAIR))
    log.process(1, world_size=4).known({9: [1, 0]}).add("groups", id=9, ranks=[1, 0], name=str(PAIR), index=0)
    log.process(1, pid=2, world_size=4).known({PAIR: [0, 1]}, {PAIR: "pipeline"}).write(record(group=PAIR))
    assert open_run(tmp_path).events()["role"].tolist() == ["pipeline", "pipeline"]


@pytest.mark.parametrize(("other", "role"), [("tensor", "tensor"), ("data", "unknown")])
def test_a_group_without_a_role_has_that_of_the_same_ranks_if_there_is_one(
    other: str, role: str, tmp_path: Path
) -> None:
    process = LogFactory(tmp_path).process(0, world_size=4)
    process.known({7: [0, 1], 8: [1, 0], 9: [0, 1]}, {7: "tensor", 8: other})
    process.write(np.concatenate([record(group=group) for group in (7, 8, 9)]))
    assert open_run(tmp_path).events()["role"].tolist() == ["tensor", other, role]


def test_messages_may_serve_another_dimension_than_their_group(tmp_path: Path) -> None:
    """A message role that one rank states holds on all ranks, only for sends and receives of its group."""
    log = LogFactory(tmp_path)
    first = log.process(0).known({WORLD: [0, 1], PAIR: [0, 1]})
    first.add("message_roles", group=WORLD, role="pipeline", source="test")
    first.write([record(group=group, kind=kind) for group in (WORLD, PAIR) for kind in (SEND, ALL_REDUCE)])
    log.process(1).known({WORLD: [0, 1]}).write(record(kind=RECV))
    run = open_run(tmp_path)
    assert run.events()["role"].tolist() == ["pipeline", "world", "world", "world", "pipeline"]
    volumes = run.table("volume_by_role_and_operation").set_index(["role", "op"])["calls"].to_dict()
    assert volumes[("pipeline", "send")] == volumes[("pipeline", "recv")] == 1
    assert volumes[("world", "all_reduce")] == 2


def test_a_group_has_the_same_label_on_all_ranks(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    log.process(0).known({WORLD: [0, 1]}).write(record(group=WORLD))
    log.process(1).known({5: [1, 0]}).add("groups", id=5, ranks=[1, 0], name=str(WORLD), index=0).write(record(group=5))
    assert open_run(tmp_path).events()["group"].nunique() == 1


def test_a_group_name_that_is_used_again_is_another_group() -> None:
    assert group_label(RecordedGroup("0,2", "pg", 0)) == "0,2/pg"
    assert group_label(RecordedGroup("0,2", "pg", 1)) == "0,2/pg#1"
    assert group_label(RecordedGroup("0", "", 0)) == "0"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((0, 1, 2, 3), "0-3"),
        ((0, 2, 4), "0,2,4"),
        ((0, 1), "0-1"),
        ((5,), "5"),
        ((0, 1, 4, 5, 9), "0-1,4-5,9"),
        ((5, 0, 1, 2, 1), "0-2,5"),
        ((), ""),
    ],
)
def test_ranks_as_text_and_back(ranks: tuple[int, ...], text: str) -> None:
    assert format_ranks(ranks) == text
    assert parse_ranks(text) == sorted(set(ranks))


@pytest.mark.parametrize(
    ("text", "selected"), [("", range(20)), ("8,0-3", [0, 1, 2, 3, 8]), ("1-19:6", [1, 7, 13, 19]), ("5", [5])]
)
def test_selections_of_ranks(text: str, selected: Iterable[int]) -> None:
    assert [rank for rank in range(20) if is_selected(rank, text)] == [*selected]
    assert not text or parse_ranks(text) == [*selected]


def test_selections_of_steps() -> None:
    steps = np.arange(-1, 12)
    assert steps[select_steps(steps, rank_ranges("2,5-11:3"))].tolist() == [-1, 2, 5, 8, 11]


@pytest.mark.parametrize(("settings", "expected"), [({"ranks": "0,4"}, [1, 2, 3]), ({"ranks": "all"}, []), ([7], [])])
def test_ranks_that_were_not_selected(settings: object, expected: list[int], tmp_path: Path) -> None:
    LogFactory(tmp_path).process(0, world_size=5, settings=settings)
    assert open_run(tmp_path).ranks_not_selected == expected


def test_wire_bytes_of_a_message_to_oneself(tmp_path: Path) -> None:
    assert single_event(tmp_path, rank=2, kind=SEND, peer=2)["wire_bytes"] == 0


def test_paths_lose_what_leads_to_the_package() -> None:
    files = ["/a/lib/site-packages/deepspeed/engine.py", "/home/me/proj/train.py", "main.py"]
    assert list(short_paths(files).values()) == ["deepspeed/engine.py", "proj/train.py", "main.py"]


def test_paths_that_would_become_one_stay_whole() -> None:
    files = ["/a/site-packages/torch/x.py", "/b/site-packages/torch/x.py", "/c/site-packages/torch/y.py"]
    assert list(short_paths(files).values()) == [*files[:2], "torch/y.py"]


def test_events_are_sorted_by_rank_and_time(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    log.process(1).known().write([record(t_begin=5), record(t_begin=3)])
    log.process(0).known().write([record(t_begin=9)]).write([record(t_begin=4)])
    events = open_run(tmp_path).events()
    assert list(zip(events["rank"], events["t_begin_ns"], strict=True)) == [(0, 4), (0, 9), (1, 3), (1, 5)]


def test_facts_of_a_run(tmp_path: Path) -> None:
    training(tmp_path, ranks=2).process(0, pid=9).add("job", source="deepspeed", zero_stage=1)
    run = open_run(tmp_path)
    assert (run.ranks, run.world_size) == ([0, 1], 2)
    assert (run.job or {})["zero_stage"] == 1
    assert "2 of 2 ranks, 3 processes, 1 notes" in repr(run)


def test_tables_by_name(tmp_path: Path) -> None:
    training(tmp_path)
    run = open_run(tmp_path)
    assert set(run.table("volume_by_operation")["op"]) == {"all_reduce", "all_gather", "barrier"}
    assert run.tables()["states"].equals(run.table("states"))
    with pytest.raises(NoSuchTableError, match="'nonsense'; choose from endings, "):
        run.table("nonsense")


def test_categories_cover_all_ranks_and_only_what_is_there(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    log.process(0).known().write(record(kind=ALL_REDUCE))
    log.process(1).known().write(record(kind=ALL_GATHER, phase=Phase.INIT, state=State.BEGUN))
    events = open_run(tmp_path).events()
    assert list(events["op"].cat.categories) == ["all_gather", "all_reduce"]
