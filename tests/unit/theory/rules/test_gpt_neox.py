"""GPT-NeoX's own program: theory expects the calls of its recorded runs, and wrong rules are detected.

`tests/support/recorded/gpt_neox.json` has the configurations of runs of the commit that `registry.GPT_NEOX` names, and
the job row and the calls of each step of every rank that differs. `tests/external` runs the program again.
"""

from __future__ import annotations

import importlib
import json
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from broken_rules import break_rule
from matched_calls import counted_calls, unmatched_calls

from commtrace.analyses.compare.run_calls import EqualCalls
from commtrace.job_row import JobRow
from commtrace.theory import ExpectedCall, NotPredictedError, predict
from commtrace.theory.configs.gpt_neox import planning
from commtrace.theory.configs.gpt_neox.program_config import ProgramConfig
from commtrace.theory.configs.job_plan import plan_job
from commtrace.theory.expected_calls import total_wire_bytes
from commtrace.theory.job import Job, ModuleNode
from commtrace.theory.rules.deepspeed import zero12
from commtrace.theory.rules.registry import GPT_NEOX, RULES, Rule

TESTS = Path(__file__).parents[3]
RECORDED = json.loads((TESTS / "support" / "recorded" / "gpt_neox.json").read_text())
FILES = json.loads((TESTS / "support" / "recorded" / "gpt_neox_files.json").read_text())["files"]
RANKS = [(name, number) for name, run in RECORDED.items() for number in range(len(run["ranks"]))]


def job_row(name: str, number: int) -> dict[str, Any]:
    """Return the job row of a rank; rows after the first are stored as differences from it."""
    row: dict[str, Any] = {**RECORDED[name]["ranks"][0]["job"], **RECORDED[name]["ranks"][number]["job"]}
    return row


def recorded_steps(name: str, number: int) -> Iterator[tuple[int, list[EqualCalls]]]:
    """Yield the calls of a rank by step; a step that repeats an earlier one is stored as its number."""
    steps = RECORDED[name]["ranks"][number]["steps"]
    for step, stored in steps.items():
        calls = steps[stored] if isinstance(stored, str) else stored
        yield (
            int(step),
            [counted_calls(role, op, payload, count, ranks=ranks) for role, op, payload, ranks, count in calls],
        )


def leftovers(name: str, number: int, row: dict[str, Any] | None = None) -> list[Any]:
    """Return the calls of a rank that are expected but not recorded, or recorded but not expected."""
    prediction = predict(job_row(name, number) if row is None else row)
    return [
        (step, leftover)
        for step, calls in recorded_steps(name, number)
        for leftover in unmatched_calls(prediction.step(step), calls, prediction)
    ]


@pytest.mark.parametrize(("name", "number"), RANKS)
def test_every_recorded_call_is_expected(name: str, number: int) -> None:
    assert leftovers(name, number) == []


@pytest.mark.parametrize("name", [name for name in RECORDED if "zero3" in name])
def test_the_list_of_layers_may_be_said_to_be_idle(name: str) -> None:
    """As hooks of ZeRO-3 see it: the model runs the layers itself."""
    row = job_row(name, 0)
    (number,) = (number for number, module in enumerate(row["modules"]) if module["name"] == "sequential")
    idle = {"kind": "idle", "times": 1, "modules": [number]}
    first = {"id": 0, "job": 1, "step": 0, "passes": [idle]}
    assert leftovers(name, 0, {**row, "passes": [first]}) == []


@pytest.mark.parametrize(("name", "number"), RANKS)
def test_every_recorded_call_is_expected_from_the_configuration_alone(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data sets, checkpoints and the rank within its group come from the log, because no configuration has them."""
    # Other tests may have registered the rows of the example.
    monkeypatch.setitem(planning.ENGINE_ROWS, "deepspeed", planning.EngineRows(ProgramConfig, planning._program_rows))
    config = tmp_path / "config.yml"
    config.write_text(json.dumps(RECORDED[name]["config"]))
    recorded = job_row(name, number)
    plan = plan_job([str(config)], recorded["world_size"])
    row = plan.rows[recorded.get("pipeline", {}).get("stage", 0)].to_json()
    facts = ("do_valid", "do_test", "save", "checkpoint_factor", "checkpoint_scale")
    row["model"] = {**row["model"], **{fact: recorded["model"][fact] for fact in facts if fact in recorded["model"]}}
    assert leftovers(name, number, {**row, "tensor_parallel_rank": recorded["tensor_parallel_rank"]}) == []


@pytest.mark.parametrize("name", RECORDED)
def test_the_waterfall_ends_at_the_wire_bytes_of_a_step(name: str) -> None:
    prediction = predict(job_row(name, 0))
    sent = sum(total_wire_bytes([call], call.ranks or prediction.ranks_of(call.role)) for call in prediction.steps[-1])
    assert prediction.closed_form.bytes + sum(bar.bytes for bar in prediction.bars) == sent


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("dp2-zero2", {"model": {"train_impl": "dpo"}}, "train_impl dpo"),
        ("dp2-zero2", {"model": {"gpt_j_tied": True}}, "gpt_j_tied"),
        ("dp2-zero3", {"model": {"pos_emb": "alibi"}}, "alibi positions"),
        ("dp2-zero3", {"modules": [{"name": "", "parameters": []}]}, "not those of GPT-NeoX"),
        ("dp2-zero3-tied", {"model": {"eval_interval": 1}}, "after the first micro-batch"),
    ],
)
def test_what_has_no_rules_is_not_predicted(name: str, change: dict[str, Any], reason: str) -> None:
    row = job_row(name, 0)
    change = {**change, "model": {**row["model"], **change.get("model", {})}}
    with pytest.raises(NotPredictedError, match=reason):
        predict({**row, **change})


def test_every_gradient_of_tensor_parallel_layers_side_by_side_is_reduced() -> None:
    row = job_row("dp2-zero2", 0)
    model = {**row["model"], "model_parallel_size": 2, "gpt_j_residual": True}
    job = Job(JobRow.read({**row, "tensor_parallel_size": 2, "model": model}))
    assert sorted(zero12.reduction_order(job)) == [*range(len(job.parameters))]


def test_the_models_of_gpt_neox_s_files_have_the_predicted_parameters() -> None:
    compared = {name: file for name, file in FILES.items() if {"parameters", "real"} <= file.keys()}
    assert len(compared) > 40
    assert [name for name, file in compared.items() if file["parameters"] != file["real"]] == []


def test_the_reference_page_has_every_run_and_file() -> None:
    pytest.importorskip("mkdocs")
    page = runpy.run_path(str(TESTS.parent / "docs" / "generated_pages.py"))["real_programs_page"]()
    assert [name for name in (*RECORDED, *FILES) if f"\n| {name} |" not in page] == []


def wrong(value: Any, item: Any) -> Any:
    """Return another value of the same kind; `item` is put into an empty sequence."""
    if isinstance(value, ExpectedCall):
        return replace(value, payload=value.payload + 1)
    if isinstance(value, ModuleNode):
        return replace(value, outputs=value.outputs + 1, children=value.children[:-1])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return type(value)(wrong(part, item) for part in value) if value else type(value)([item])


BROKEN = [rule for rule in RULES if rule.library == GPT_NEOX[0] and ".megatron." in rule.module]


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.name)
def test_a_wrong_rule_shows(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(importlib.import_module(rule.module), rule.name)
    item = 1 if "int" in right.__annotations__["return"] else ExpectedCall("all_reduce", 3, "wrong")
    break_rule(rule, monkeypatch, lambda value: wrong(value, item))
    assert any(leftovers(name, number) for name, number in RANKS)
