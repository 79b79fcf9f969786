"""A hook made of tables: it marks what is there, of modules that are imported, and restores it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from commtrace.current_step import progress
from commtrace.hooks import purposes
from commtrace.hooks.marked_sources import MarkedSources, Source, evaluating
from commtrace.schema import Phase, Purpose

NAME = "library_of_a_test"


def seen() -> str:
    """Return the purpose of a call made now."""
    return str(purposes.facts(purposes.current()).get("name", ""))


class Trainer:
    """Methods of each kind."""

    def save(self) -> str:
        return seen()

    @classmethod
    def load(cls) -> str:
        return seen()

    @staticmethod
    def evaluate() -> tuple[str, bool, str]:
        return seen(), progress.marked_phase == Phase.EVALUATION, barrier()

    def batches(self) -> Iterator[str]:
        yield seen()


def barrier() -> str:
    return seen()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, module)
    vars(module).update(Trainer=type("Trainer", (), dict(vars(Trainer))), barrier=barrier)
    return module


def test_calls_have_the_purposes_of_the_table(library: ModuleType) -> None:
    before = {**vars(library.Trainer)}
    sources = MarkedSources(
        Source(NAME, "Trainer", {"save": Purpose.CHECKPOINT_SAVED, "load": Purpose.CHECKPOINT_LOADED}),
        Source(NAME, "Trainer", {"evaluate": Purpose.EVALUATION}, evaluating),
        Source(NAME, "Trainer", {"batches": Purpose.DATA, "of_another_version": Purpose.DATA}),
        Source(NAME, "", {"barrier": Purpose.BARRIER}, purposes.marking_unclaimed),
        Source("not_imported", "", {"barrier": Purpose.BARRIER}),
    )
    sources.install()
    sources.install()
    trainer = library.Trainer()
    assert trainer.save() == Purpose.CHECKPOINT_SAVED.value
    assert library.Trainer.load() == Purpose.CHECKPOINT_LOADED.value
    assert trainer.evaluate() == (Purpose.EVALUATION.value, True, Purpose.EVALUATION.value)
    assert next(trainer.batches()) == ""
    assert library.barrier() == Purpose.BARRIER.value
    with purposes.Marked(purposes.number(Purpose.METRICS)):
        assert library.barrier() == Purpose.METRICS.value
    assert (seen(), progress.marked_phase) == ("", -1)

    sources.uninstall()
    assert {**vars(library.Trainer)} == before
    assert library.barrier is barrier
