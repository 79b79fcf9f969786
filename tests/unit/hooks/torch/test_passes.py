"""Rows of the table `passes`; tests/ranks/theory/test_passes.py compares their contents with the libraries."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from commtrace.current_step import progress
from commtrace.hooks.torch import fsdp2, passes
from commtrace.hooks.torch import tracer as torch_tracer
from commtrace.job_row import PassRow


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list that receives the written rows, as (step, passes)."""
    written: list[Any] = []
    tables = SimpleNamespace(new=lambda table, row: written.append((row["step"], row["passes"])))
    tracer = SimpleNamespace(recorder=SimpleNamespace(tables=tables))
    monkeypatch.setattr(torch_tracer, "current", lambda: tracer)
    monkeypatch.setattr(passes.ModelPasses, "limit", 4)
    return written


def run(steps: dict[int, int]) -> None:
    """Evaluate this many times in each step, and end the log."""
    model = passes.ModelPasses()
    model.job = 1
    try:
        for step, times in steps.items():
            progress.cells[0] = step
            for _ in range(times):
                model.add(PassRow(kind="evaluation", times=1))
        tracer = torch_tracer.current()
        assert tracer is not None
        model.end(tracer)
    finally:
        progress.reset()


def evaluations(times: int) -> list[dict[str, Any]]:
    """Return the passes of a step with this many evaluations."""
    return [{"kind": "evaluation", "times": times}]


def test_a_row_is_written_where_passes_change(rows: list[Any]) -> None:
    run({-1: 2, 0: 1, 1: 1, 2: 2})
    assert rows == [(-1, evaluations(2)), (0, evaluations(1)), (2, evaluations(2))]


def test_steps_without_passes_have_an_empty_row(rows: list[Any]) -> None:
    run({0: 1, 5: 2, 9: 0})
    assert rows == [(0, evaluations(1)), (1, []), (5, evaluations(2)), (6, None)]


def test_the_last_row_that_fits_has_no_passes(rows: list[Any]) -> None:
    run({step: 1 + step % 2 for step in range(9)})
    assert rows == [(0, evaluations(1)), (1, evaluations(2)), (2, evaluations(1)), (3, None)]


def settings_of(units: list[Any]) -> dict[str, Any]:
    """Return the settings in the row of a pass of these units."""
    row = fsdp2._training_pass(fsdp2._settings([SimpleNamespace(_fsdp_param_groups=units)]), True).to_json()
    return {name: row[name] for name in fsdp2._SETTINGS}


def test_a_setting_that_differs_among_units_is_not_known() -> None:
    settings = {"reduce_grads": True, "all_reduce_grads": True, "reshard_after_backward": False}
    units = [SimpleNamespace(**settings), SimpleNamespace(**{**settings, "reduce_grads": False})]
    assert settings_of(units[:1]) == settings
    assert settings_of(units) == {**settings, "reduce_grads": None}
    assert settings_of([]) == dict.fromkeys(settings)
    for unit in units:
        del unit.all_reduce_grads  # as in another version of torch
    assert settings_of(units) == {**settings, "reduce_grads": None, "all_reduce_grads": None}


def test_a_row_that_is_added_in_each_step(rows: list[Any]) -> None:
    """One object is added again and again, as FSDP2's hook does."""
    model, row = passes.ModelPasses(), PassRow(kind="training", times=1)
    model.job = 1
    try:
        for step, times in enumerate([1, 1, 3, 3, 1]):
            progress.cells[0] = step
            for _ in range(times):
                model.add(row)
        model.end(torch_tracer.current())  # type: ignore[arg-type]
    finally:
        progress.reset()
    assert row.times == 1
    times_by_step = {step: [entry["times"] for entry in written] for step, written in rows[:3]}
    assert times_by_step == {0: [1], 2: [3], 4: [1]}


def test_repeated_passes_write_the_rows_that_added_ones_do(rows: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes.ModelPasses, "limit", 100)
    training, evaluation = PassRow(kind="training", times=1), PassRow(kind="evaluation", times=1)
    of_a_step: list[list[PassRow]] = [[], [training], [training, training], [evaluation], [training, evaluation]]
    repeated = 0

    def written(steps: tuple[list[PassRow], ...], *, repeats: bool) -> list[Any]:
        nonlocal repeated
        rows.clear()
        model = passes.ModelPasses()
        model.job = 1
        for step, entries in enumerate(steps):
            progress.cells[0] = step
            for entry in entries:
                if repeats and model.repeat(entry):
                    repeated += 1
                else:
                    model.add(entry)
        model.end(torch_tracer.current())  # type: ignore[arg-type]
        return rows.copy()

    try:
        for steps in itertools.product(of_a_step, repeat=5):
            assert written(steps, repeats=True) == written(steps, repeats=False)
    finally:
        progress.reset()
    assert repeated
