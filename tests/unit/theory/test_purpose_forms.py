"""The rules of GPT-NeoX's recorded jobs say for each call of a step which purposes the hooks record for it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from commtrace.schema import Purpose
from commtrace.theory import predict
from commtrace.theory.purpose_forms import purpose_forms

RECORDED = json.loads((Path(__file__).parents[2] / "support" / "recorded" / "gpt_neox.json").read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_every_call_of_a_step_has_a_form(name: str) -> None:
    job: dict[str, Any] = RECORDED[name]["ranks"][0]["job"]
    expected, found = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for call in predict(job).steps[-1]:
        expected[call.role, call.op] += call.calls
    forms = purpose_forms([job])
    for form in forms:
        found[form.role, form.op] += form.calls
    assert found == expected
    keys = [(form.purposes, form.role, form.op) for form in forms]
    assert len(set(keys)) == len(keys)


def test_messages_of_all_kinds_between_stages_are_one_form() -> None:
    """What a stage sends in one direction has one purpose: which one, only the log knows."""
    (form,) = (
        form for form in purpose_forms([RECORDED["pp2-mp2"]["ranks"][0]["job"]]) if form.op == "send"
    )  # stage 0 sends forward only
    assert form.purposes == (Purpose.PIPELINE_ACTIVATIONS, Purpose.PIPELINE_GRADIENTS)
    assert form.calls == 6  # in each of two micro-batches: metadata, the part of the activations, the mask
    kinds = ("activations and their gradients", "metadata of partitioned activations", "the attention mask")
    assert all(kind in form.formula for kind in kinds)
