"""Both recorders write equal logs of the same program, except for what docs/explanation/recorders.md lists."""

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

pytestmark = pytest.mark.long

PROGRAMS = ("operators", "mixture", "plain", "purposes", "train", "pipeline", "gpt_neox", "null_work")
DEFAULT = ("operators", "purposes")
"""Every operator and every purpose."""


def marked(programs: Sequence[str]) -> list[Any]:
    return [pytest.param(program, marks=() if program in DEFAULT else pytest.mark.exhaustive) for program in programs]


ROWS = {"kind": "kinds", "group": "groups", "site": "sites"}


def logs(program: str, recorder: str) -> list[Log]:
    """Return the logs of a program by rank. Most of the programs have already run for other tests."""
    if program in ("train", "pipeline", "gpt_neox"):
        pytest.importorskip("deepspeed")
    if program == "train":
        return training(recorder).logs
    runs = {
        "operators": lambda: ran(program, recorder, ranks=3),
        "mixture": lambda: ran(program, recorder),
        "plain": lambda: ran(program, recorder),
        "purposes": lambda: ran(program, recorder),
        "pipeline": lambda: ran(program, recorder, deepspeed=True),
        "gpt_neox": lambda: ran(program, recorder, *ENGINES, deepspeed=True),
        "null_work": lambda: null_work(recorder),
    }[program]()
    return [run.log for run in runs]


@pytest.fixture(params=marked(PROGRAMS), scope="module")
def both(request: pytest.FixtureRequest) -> tuple[str, list[tuple[Log, Log]]]:
    """Return a program, and the two logs of each rank."""
    recorders.needs("native")
    return request.param, list(zip(*(logs(request.param, recorder) for recorder in RECORDERS), strict=True))


Both = tuple[str, list[tuple[Log, Log]]]


def records(log: Log) -> list[dict[str, Any]]:
    """Return the records with the rows that they refer to in place of ids, and without fields that may differ."""
    rows = {table: {row["id"]: _equal_keys(table, row) for row in log.tables.get(table, ())} for table in ROWS.values()}
    fields = set(RECORD.names or ()) - DIFFERENT["records"]
    calls = []
    for record in log.left.records[log.left.records["t_begin"].argsort()]:
        call: dict[str, Any] = {name: int(record[name]) for name in fields}
        for field, table in ROWS.items():
            call |= {f"{field}.{name}": value for name, value in rows[table].get(int(record[field]), {}).items()}
            call.pop(f"{field}.id", None)
        calls.append(call)
    return calls


def _equal_keys(table: str, row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in DIFFERENT.get(table, set())}


def rows(log: Log, table: str) -> list[str]:
    """Return the rows of a table as sorted JSON, without ids, which depend on the order of the rows."""
    groups = {row["id"]: _equal_keys("groups", row) for row in log.tables.get("groups", ())}
    lines = []
    for row in log.tables[table][-1:] if table in ("stats", "clock", "setup") else log.tables[table]:
        values = {name: value for name, value in _equal_keys(table, row).items() if name != "id"}
        for name in {"settings", "environment"} & set(values):
            values[name] = {key: value for key, value in values[name].items() if key not in GIVEN}
        if table in ("roles", "message_roles"):
            values["group"] = {name: value for name, value in groups[row["group"]].items() if name != "id"}
        lines.append(json.dumps(values, sort_keys=True))
    return sorted(lines)


GIVEN = ("recorder", "directory", "MASTER_PORT")  # settings in which the two runs of a program differ


def test_records_are_equal(both: Both) -> None:
    for python, native in both[1]:
        for theirs, ours in zip(records(python), records(native), strict=True):
            assert ours == theirs


def test_tables_are_equal(both: Both) -> None:
    """A process that makes no progress for seconds, as on a busy machine, has stacks, too: these are left out."""
    for python, native in both[1]:
        tables = {*python.tables} - {"stacks"}
        assert tables == {*native.tables} - {"stacks"}
        for table in tables:
            assert rows(native, table) == rows(python, table), table


def test_ends_are_those_of_the_list(both: Both) -> None:
    """The page's table and lists of operators give the native recorder's end for each end of the Python recorder."""
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
            enough = len(log.calls) >= 64  # one call in 16 or 32 is measured
            assert log.stats["cost_samples"] > 0 or not enough
            assert log.stats["cost_ns"] >= log.stats["cost_samples"]


def test_both_count_the_first_calls_apart(both: Both) -> None:
    """A call adds at most one call site."""
    for pair in both[1]:
        for log in pair:
            stats, sites = log.stats, log.tables.get("sites", [])
            assert len(sites) <= stats["first_calls"] <= stats["calls"]
            assert (stats["first_ns"] > 0) == (stats["first_calls"] > 0)
            assert stats["steady_samples"] <= stats["cost_samples"]


# ---- the list of operators is gloo's own -----------------------------------------------------------------------------


def test_operators_without_a_future_are_those_of_the_page() -> None:
    """gloo's Works with one rank show it. Messages, which need two ranks, are left out."""
    dist: Any = torch.distributed  # its stubs are incomplete
    store = dist.HashStore()
    pg = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1)
    pg._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def tensor() -> Any:
        return torch.ones(2)

    works = {
        "allreduce_": pg.allreduce([tensor()]),
        "allreduce_coalesced_": pg.allreduce_coalesced([tensor()]),
        "broadcast_": pg.broadcast(tensor(), 0),
        "reduce_": pg.reduce(tensor(), 0),
        "allgather_": pg.allgather([[tensor()]], [tensor()]),
        "_allgather_base_": pg._allgather_base(tensor(), tensor()),
        "allgather_into_tensor_coalesced_": pg.allgather_into_tensor_coalesced([tensor()], [tensor()]),
        "reduce_scatter_": pg.reduce_scatter([tensor()], [[tensor()]]),
        "_reduce_scatter_base_": pg._reduce_scatter_base(tensor(), tensor()),
        "reduce_scatter_tensor_coalesced_": pg.reduce_scatter_tensor_coalesced([tensor()], [tensor()]),
        "alltoall_base_": pg.alltoall_base(tensor(), tensor(), [], []),
        "gather_": pg.gather([tensor()], tensor(), 0),
        "scatter_": pg.scatter(tensor(), [tensor()], 0),
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
    for ends in recorders.ENDS.values():
        for state, clock in ends.values():
            assert isinstance(state, State)
            assert isinstance(clock, Clock)
            assert (state == State.COMPLETE) == (clock != Clock.NONE)
