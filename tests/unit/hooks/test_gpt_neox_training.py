"""GPT-NeoX's training loop, with a stand-in for its module that trains without a pipeline."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from commtrace.current_step import progress
from commtrace.hooks.megatron import gpt_neox_training
from commtrace.schema import Phase

TRAINING = """
def communicate(what):
    calls.append((what, progress.step, progress.present_phase()))

def forward_step(model):
    communicate("broadcast_data")
    if not model.evaluates:
        progress.note_activity()
    with progress.marked(Phase.FORWARD):
        communicate("engine")
    communicate("cross_entropy")

def train_step(model):
    forward_step(model)
    progress.finish_step()
    communicate("reduce_losses")

def evaluate(model):
    model.evaluates = True
    forward_step(model)
    communicate("reduce_losses")
    model.evaluates = False
"""
FORWARD, EVALUATION, OTHER = Phase.FORWARD, Phase.EVALUATION, Phase.OTHER
CALLS = ("broadcast_data", "engine", "cross_entropy")


class Model:
    evaluates = False


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = ModuleType("megatron.training")
    vars(module).update(calls=[], progress=progress, Phase=Phase)
    exec(TRAINING, vars(module))
    monkeypatch.setitem(sys.modules, "megatron.training", module)
    progress.reset()
    gpt_neox_training.install()
    yield module
    gpt_neox_training.uninstall()
    progress.reset()


def test_a_batch_belongs_to_its_step_and_to_its_forward_pass(training: ModuleType) -> None:
    for step in range(2):
        training.train_step(Model())
        assert training.calls == [*((call, step, FORWARD) for call in CALLS), ("reduce_losses", step, OTHER)]
        training.calls.clear()


def test_an_evaluation_is_one_phase_and_begins_no_step(training: ModuleType) -> None:
    training.train_step(Model())
    training.calls.clear()
    training.evaluate(Model())
    assert training.calls == [(call, 0, EVALUATION) for call in (*CALLS, "reduce_losses")]
    training.calls.clear()
    training.train_step(Model())
    assert training.calls[0] == ("broadcast_data", 1, FORWARD)


def test_the_functions_are_restored_and_others_left_alone(
    training: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked = training.train_step
    gpt_neox_training.uninstall()
    assert training.train_step is not hooked
    # Megatron-LM has a package of this name.
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    gpt_neox_training.install()
    assert not gpt_neox_training._patches
