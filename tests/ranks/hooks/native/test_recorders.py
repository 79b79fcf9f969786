"""The same program under both recorders gives equal logs, but for what docs/explanation/recorders.md lists."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import recorders
from recorders import DIFFERENT, RECORDERS

pytest.importorskip("torch")

import torch
import torch.distributed
from hook_programs.runs import ENGINES, Log, null_work, ran, training

from commtrace.schema import RECORD, Clock, State

PROGRAMS = ("operators", "mixture", "plain", "train", "pipeline", "gpt_neox", "null_work")
DEFAULT = ("operators", "gpt_neox")
"""Every operator, and training by DDP and ZeRO."""


def marked(programs: Sequence[str]) -> list[Any]:
    return [pytest.param(program, marks=() if program in DEFAULT else pytest.mark.exhaustive) for program in programs]


ROWS = {"kind": "kinds", "group": "groups", "site": "sites"}


def logs(program: str, recorder: str) -> list[Log]:
    """By rank. Most of these programs have run for other tests."""
    if program in ("train", "pipeline", "gpt_neox"):
        pytest.importorskip("deepspeed")
    if program == "train":
        return training(recorder).logs
    found = {
        "operators": lambda: ran(program, recorder, ranks=3),
        "mixture": lambda: ran(program, recorder),
        "plain": lambda: ran(program, recorder),
        "pipeline": lambda: ran(program, recorder, deepspeed=True),
        "gpt_neox": lambda: ran(program, recorder, *ENGINES, deepspeed=True),
        "null_work": lambda: null_work(recorder),
    }[program]()
    return [each.log for each in found]


@pytest.fixture(params=marked(PROGRAMS), scope="module")
def both(request: pytest.FixtureRequest) -> tuple[str, list[tuple[Log, Log]]]:
    """A program, and the two logs of each rank."""
    recorders.needs("native")
    return request.param, list(zip(*(logs(request.param, recorder) for recorder in RECORDERS), strict=True))


Both = tuple[str, list[tuple[Log, Log]]]


def records(log: Log) -> list[dict[str, Any]]:
    """Every record, with the rows that it refers to in place of their numbers, and without what may differ."""
    rows = {table: {row["id"]: row for row in log.tables.get(table, ())} for table in ROWS.values()}
    same = set(RECORD.names or ()) - DIFFERENT["records"]
    found = []
    for record in log.left.records[log.left.records["t_begin"].argsort()]:
        call: dict[str, Any] = {name: int(record[name]) for name in same}
        for field, table in ROWS.items():
            call |= {f"{field}.{name}": value for name, value in rows[table].get(int(record[field]), {}).items()}
            call.pop(f"{field}.id", None)
        found.append(call)
    return found


def rows(log: Log, table: str) -> list[str]:
    """What a table says, in an order of its own: numbers are given as rows come."""
    groups = {row["id"]: row for row in log.tables.get("groups", ())}
    found = []
    for row in log.tables[table][-1:] if table in ("stats", "clock") else log.tables[table]:
        told = {name: value for name, value in row.items() if name not in {"id"} | DIFFERENT.get(table, set())}
        for name in {"settings", "environment"} & set(told):
            told[name] = {key: value for key, value in told[name].items() if key not in GIVEN}
        if table in ("roles", "message_roles"):
            told["group"] = {name: value for name, value in groups[row["group"]].items() if name != "id"}
        found.append(json.dumps(told, sort_keys=True))
    return sorted(found)


GIVEN = ("recorder", "directory", "MASTER_PORT")  # each of the two programs has a folder and a port of its own


def test_records_are_equal(both: Both) -> None:
    for python, native in both[1]:
        for theirs, ours in zip(records(python), records(native), strict=True):
            assert ours == theirs


def test_tables_are_equal(both: Both) -> None:
    for python, native in both[1]:
        assert set(python.tables) == set(native.tables)
        for table in python.tables:
            assert rows(native, table) == rows(python, table), table


def test_ends_are_those_of_the_list(both: Both) -> None:
    """The native recorder's follow from the Python one's, by the table and the lists of operators of the page."""
    program, ranks = both
    for python, native in ranks:
        for theirs, ours in zip(python.calls, native.calls, strict=True):
            pair = (theirs.state, theirs.clock), (ours.state, ours.clock)
            assert pair in recorders.pairs(ours.variant, gloo=program != "null_work"), (ours.variant, ours)


@pytest.mark.parametrize("program", marked([program for program in PROGRAMS if program != "null_work"]))
def test_on_gloo_every_call_has_an_end_or_is_of_an_operator_without_future(program: str) -> None:
    recorders.needs("native")
    for log in logs(program, "native"):
        for call in log.calls:
            seen = call.state == State.COMPLETE and call.t_begin < call.t_end
            assert seen or call.state == State.FAILED or call.variant in recorders.FUTURELESS, call


def test_each_row_of_the_page_has_a_name_that_tests_expect_it_by() -> None:
    named = {value for value in vars(recorders).values() if isinstance(value, str)}
    assert set(recorders.ENDS) <= named | set(recorders._WITHOUT_FUTURE.values())


def test_both_measure_what_they_cost(both: Both) -> None:
    for pair in both[1]:
        for log in pair:
            enough = len(log.calls) >= 64  # one in sixteen is measured, or one in 32
            assert log.stats["cost_samples"] > 0 or not enough
            assert log.stats["cost_ns"] >= log.stats["cost_samples"]


def test_both_count_the_first_calls_apart(both: Both) -> None:
    """A call adds one call site at most."""
    for pair in both[1]:
        for log in pair:
            stats, sites = log.stats, log.tables.get("sites", [])
            assert len(sites) <= stats["first_calls"] <= stats["calls"]
            assert (stats["first_ns"] > 0) == (stats["first_calls"] > 0)
            assert stats["steady_samples"] <= stats["cost_samples"]


# ---- the list of operators is gloo's own -----------------------------------------------------------------------------


def test_operators_without_a_future_are_those_of_the_page() -> None:
    """As gloo says, in a world of one; a message needs two, and is waited for in the thread that asks for it."""
    dist: Any = torch.distributed  # its stubs leave out half of it
    store = dist.HashStore()
    pg = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1)
    pg._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def one() -> Any:
        return torch.ones(2)

    works = {
        "allreduce_": pg.allreduce([one()]),
        "allreduce_coalesced_": pg.allreduce_coalesced([one()]),
        "broadcast_": pg.broadcast(one(), 0),
        "reduce_": pg.reduce(one(), 0),
        "allgather_": pg.allgather([[one()]], [one()]),
        "_allgather_base_": pg._allgather_base(one(), one()),
        "allgather_into_tensor_coalesced_": pg.allgather_into_tensor_coalesced([one()], [one()]),
        "reduce_scatter_": pg.reduce_scatter([one()], [[one()]]),
        "_reduce_scatter_base_": pg._reduce_scatter_base(one(), one()),
        "reduce_scatter_tensor_coalesced_": pg.reduce_scatter_tensor_coalesced([one()], [one()]),
        "alltoall_base_": pg.alltoall_base(one(), one(), [], []),
        "gather_": pg.gather([one()], one(), 0),
        "scatter_": pg.scatter(one(), [one()], 0),
        "barrier": pg.barrier(),
    }
    without = set()
    for name, work in works.items():
        try:
            work.get_future()
        except RuntimeError:
            without.add(name)
        work.wait()
    assert without == {name for name in recorders.FUTURELESS if "reduce_scatter" in name}


def test_clocks_and_states_of_the_page_are_the_format_s() -> None:
    for each in recorders.ENDS.values():
        for state, clock in each.values():
            assert isinstance(state, State)
            assert isinstance(clock, Clock)
            assert (state == State.COMPLETE) == (clock != Clock.NONE)
