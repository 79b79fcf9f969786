"""Rules compared with FSDP2 and ZeRO-3 in micro-batches and evaluations, where the hooks count passes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

import pytest
from ports import free_port

pytest.importorskip("deepspeed")

import trainings
from broken_rules import OF_EVALUATIONS, break_rule

from commtrace.analyses.compare import rules_analysis
from commtrace.analyses.fold_engine import fold
from commtrace.cli import main
from commtrace.run import open_run
from commtrace.schema import Purpose
from commtrace.theory.rules.registry import RULES

RANKS: Final = 4
FSDP: Final = (
    "accumulated", "evaluated", "evaluated_kept", "evaluated_by_default", "evaluated_without_root", "hsdp_accumulated",
)  # fmt: skip
ZERO: Final = "deepspeed_zero3"
STATES: Final = "deepspeed_zero3_states"
FAULT: Final = "gathered_once_more"
AHEAD: Final = "gathered_ahead"

pytestmark = [pytest.mark.long, trainings.TIMEOUT]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run functions of `programs/sharded.py` in one start, and return the directory of their logs."""
    folder = tmp_path_factory.mktemp("passes")
    orders = folder / "orders.json"
    ways = (*FSDP, FAULT, AHEAD, ZERO, STATES)  # ZeRO-3 last: it changes linear layers for the rest of its process
    orders.write_text(json.dumps([{"log": str(folder / way), "port": free_port(), "way": way} for way in ways]))
    started = trainings.parent().start("sharded", folder / "parent", orders, ranks=RANKS, traced=False)
    assert started.wait(trainings.SECONDS_A_RANK) == [0] * RANKS, started.output(0)[-4000:]
    return folder


@pytest.mark.parametrize("way", [*FSDP, ZERO])
def test_micro_batches_and_evaluations_are_exact(logs: Path, way: str) -> None:
    run = open_run(logs / way)
    tables = fold(run, [rules_analysis.ANALYSIS])
    cells, theory, bars = tables["reconciliation"], tables["theory"], tables["waterfall"]
    assert theory["not_predicted"].isna().all(), theory["not_predicted"].tolist()
    assert {*cells["cause"]} == {"expected"}, cells.loc[cells["cause"] != "expected"].to_string()
    assert (theory["matched_bytes"] == theory["measured_bytes"]).all()
    assert theory["measured_bytes"].sum() == run.events()["payload_bytes"].sum() > 0
    assert bars["bytes"].iloc[:-1].sum() == bars["bytes"].iloc[-1]
    assert main(["check", str(logs / way)]) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OF_EVALUATIONS)
def test_a_wrong_rule_shows(logs: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (rule,) = (rule for rule in RULES if rule.name == name)
    break_rule(rule, monkeypatch)
    assert any(main(["check", str(logs / way)]) for way in (*FSDP, ZERO, STATES))


def test_parameters_that_others_than_passes_gather_are_known(logs: Path) -> None:
    """A checkpoint that is loaded or saved, GatheredParameters, and a weight used outside of its module."""
    assert main(["check", str(logs / STATES)]) == 0
    job = open_run(logs / STATES).job
    assert job is not None
    kinds = {entry["kind"] for row in job["passes"] for entry in row["passes"]}
    assert kinds == {"gathered", "external", "idle", "evaluation"}


def test_units_that_the_program_gathers_are_its_own(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pass after them does not gather these units, unless the program reshards them."""
    assert main(["check", str(logs / AHEAD)]) == 0
    gathers = open_run(logs / AHEAD).events().query("rank == 0 and op == 'all_gather'")
    steps = gathers.groupby(["step", "purpose"], observed=True).size().unstack(fill_value=0).to_dict("index")
    requested, forward = Purpose.PARAMETERS_ON_REQUEST.value, Purpose.PARAMETERS_FORWARD.value
    assert {step: (row[requested], row[forward]) for step, row in steps.items()} == {
        -1: (2, 0),  # the root and a block
        0: (2, 8 - 2),  # two passes of a root and three blocks
        1: (2, 8 - 2 + 4),  # with an evaluation, which leaves the root gathered; then two blocks on request
        2: (2, 8 - 3),
        3: (2, 8 - 1),  # the block was resharded
        4: (0, 8 - 2),
    }
    assert f"  {requested}\n" in capsys.readouterr().out


def test_evaluations_are_expected_in_their_steps(logs: Path) -> None:
    """Evaluations may precede the first step, or leave the root gathered, so that the next step does not gather it."""
    expected = fold(open_run(logs / "evaluated"), [rules_analysis.ANALYSIS])["expected"]
    assert (expected["step"] == -1).any()
    events = open_run(logs / "evaluated_by_default").events()
    gathers = events.loc[(events["rank"] == 0) & (events["op"] == "all_gather")].groupby("step").size()
    assert gathers.to_dict() == {0: 7, 1: 7, 2: 7 + 4 + 3, 3: 6}  # a step: the root and 3 blocks, then the blocks again


def test_a_gather_that_no_pass_needs_is_listed(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(logs / FAULT)]) == 0
    listed = capsys.readouterr().out.partition(f"  {Purpose.PARAMETERS_ON_REQUEST.value}\n")[2]
    assert re.search(r": 4 all_gather, 300,288\s+bytes, rank 0-3", listed)
