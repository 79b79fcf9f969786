"""The notebooks run, cell by cell, on the logs beside them."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from processes import ROOT

from commtrace.run import Run, open_run

go = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(notebook: Path) -> list[dict[str, Any]]:
    """Return a notebook's code cells in order."""
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def run(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[Any]]:
    """Run a notebook, and return the names that it defines and the values that cells show: their last expressions."""
    monkeypatch.chdir(notebook.parent)
    names: dict[str, Any] = {}
    shown = []
    for cell in cells(notebook):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        filename = f"{notebook.name} {cell['id']}"
        exec(compile(tree, filename, "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), filename, "eval"), names))
    return names, shown


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_is_kept_without_results(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, _ = run(notebook, monkeypatch)
    assert isinstance(names["run"], Run)
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells(notebook))


def test_the_first_look_sums_what_the_log_has_and_shows_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    names, shown = run(next(path for path in NOTEBOOKS if path.stem == "first-look"), monkeypatch)
    by_line: pd.DataFrame = names["by_line"]
    events = names["run"].events()
    calls = events[(events["rank"] == 0) & (events["step"] >= 0)]
    assert by_line["sum"].sum() == calls["payload_bytes"].sum() > 0
    assert by_line["count"].sum() == len(calls)
    assert names["bins"]["sum_bytes"].sum() == calls.loc[calls["phase"] == "backward", "payload_bytes"].sum() > 0
    assert len([value for value in shown if isinstance(value, go.Figure)]) == 9


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_the_logs_beside_the_notebooks_are_whole(name: str) -> None:
    log = open_run(NOTEBOOKS[0].parent / "logs" / name)
    assert not log.notes
    assert log.ranks == [0, 1]
    assert log.table("coverage")["records"].tolist() == log.table("coverage")["calls"].tolist()
