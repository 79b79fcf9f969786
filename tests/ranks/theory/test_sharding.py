"""Theory compared with trainings with sharded parameters: FSDP2, HSDP and extensions of ZeRO-3."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("yaml")

import sharding
import trainings
from theory_assertions import assert_exact

from commtrace.analyses.compare import rules_analysis
from commtrace.analyses.fold_engine import NamedTables, fold
from commtrace.run import Run
from commtrace.theory import predict

pytestmark = [pytest.mark.long, trainings.TIMEOUT]

EVERY: Final = [
    *trainings.parameters(sharding.NAMES, sharding.OF_EACH_SCHEME, sharding.sharded),
    *(pytest.param(sharding.more, name, marks=pytest.mark.exhaustive) for name in sharding.MORE_NAMES),
    *(pytest.param(sharding.wide, name, marks=pytest.mark.exhaustive) for name in sharding.WIDE),
]
CONFIGURED: Final = [case for case in EVERY if "script" not in str(case.values[1])]

Runs = Callable[[], Mapping[str, Run]]


@functools.cache
def tables(runs: Runs, name: str) -> NamedTables:
    """Return the theory tables of one training."""
    return fold(runs()[name], [rules_analysis.ANALYSIS])


@pytest.mark.parametrize(("runs", "name"), EVERY)
def test_sharded_trainings_are_exact(runs: Runs, name: str) -> None:
    assert_exact(tables(runs, name), runs()[name])


@pytest.mark.parametrize(("runs", "name"), [case for case in EVERY if "tp" in str(case.values[1])])
def test_each_module_of_a_tensor_parallel_plan_moves_what_its_closed_form_says(runs: Runs, name: str) -> None:
    table = runs()[name].table("step_by_place")
    purposes = ("activations", "activation gradients")
    rows = table.loc[table["purpose"].isin(purposes) & (table["role"] == "tensor")]
    assert len(rows) >= 4
    assert rows["expected_calls"].tolist() == rows["calls"].tolist()
    assert rows["expected_bytes"].tolist() == rows["payload_bytes"].tolist()


@pytest.mark.parametrize(("runs", "name"), CONFIGURED)
def test_a_job_told_from_its_configuration_is_the_one_that_was_captured(runs: Runs, name: str, tmp_path: Path) -> None:
    run = runs()[name]
    planned = trainings.described(sharding.wanted([name])[name], len(run.ranks), tmp_path)
    captured = dict(run.job or {})
    assert predict(planned) == predict(captured)
    zero, captured_zero = planned.pop("zero", {}), captured.pop("zero", {})
    assert zero == {key: value for key, value in captured_zero.items() if key in zero}
    assert planned == {key: value for key, value in captured.items() if key in planned}


def test_groups_have_the_roles_of_their_meshes() -> None:
    """The role comes from the dimension's name, or from FSDP if the mesh is the world."""
    sizes = {
        name: {(role, op) for role, op in zip(events["role"], events["op"], strict=True)}
        for name in ("fsdp-kept", "hsdp-bf16", "fsdp-tp-bf16", "tp-sequence-again")
        for events in [sharding.sharded()[name].events()]
    }
    assert {role for role, _ in sizes["fsdp-kept"]} == {"data"}
    assert {role for role, _ in sizes["hsdp-bf16"]} == {"data"}
    assert ("data", "all_reduce") in sizes["hsdp-bf16"]
    assert {role for role, _ in sizes["fsdp-tp-bf16"]} == {"data", "tensor"}
    assert {role for role, _ in sizes["tp-sequence-again"]} == {"tensor"}


def test_hpz_gathers_from_the_neighbours_what_zero_3_gathers_from_all() -> None:
    """The payload is the same; wire bytes are half of it among two ranks, and three quarters among four."""
    events = sharding.sharded()["zero3-hpz-again"].events()
    last = events.loc[(events["rank"] == 0) & (events["step"] == 2) & (events["op"] == "all_gather")]
    assert set(last["group_size"]) == {2, 4}
    shares = last["wire_bytes"] / last["payload_bytes"]
    assert {*zip(last["group_size"], shares, strict=True)} == {(2, 0.5), (4, 0.75)}
