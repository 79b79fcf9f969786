"""The notebooks run, cell by cell, on the logs beside them, or on a trace."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from kineto_traces import KinetoFactory
from processes import ROOT

from commtrace.run import Run, open_run

go = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
GPU_TRACE = ROOT / "notebooks" / "gpu-trace.ipynb"
"""The notebook that downloads a public trace, or takes the one that the variable GPU_TRACE names."""


def cells(notebook: Path) -> list[dict[str, Any]]:
    """Return a notebook's code cells in order."""
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def run(
    notebook: Path, monkeypatch: pytest.MonkeyPatch, folder: Path = ROOT / "notebooks"
) -> tuple[dict[str, Any], list[Any]]:
    """Run a notebook, and return the names that it defines and the values that cells show: their last expressions."""
    monkeypatch.chdir(folder)
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
def test_a_notebook_is_kept_without_results(notebook: Path) -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells(notebook))


@pytest.mark.long
@pytest.mark.parametrize("notebook", [path for path in NOTEBOOKS if path != GPU_TRACE], ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, _ = run(notebook, monkeypatch)
    assert isinstance(names["run"], Run)


def test_the_notebook_of_a_gpu_trace_shows_what_is_exposed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On three steps of 900 us, with a communication kernel of 300 us of which computation hides 100 us."""
    trace = KinetoFactory()
    for step in range(3):
        at = 1000 * step
        trace.step(step, at, 900).call(at + 10, kernels=((at + 200, 300),))
        trace.kernel(at + 100, 200, "gemm", launched=at + 5).kernel(at + 600, 300, "gemm", launched=at + 6)
    monkeypatch.setenv("GPU_TRACE", str(trace.write(tmp_path / "trace.json")))
    names, shown = run(GPU_TRACE, monkeypatch, tmp_path)
    assert names["overlap"].loc["all_reduce", ["hidden_ns", "exposed_ns"]].tolist() == [300_000, 600_000]
    assert len([value for value in shown if isinstance(value, go.Figure)]) == 1
    assert "Communication beside computation" in (tmp_path / "gpu-trace.html").read_text()


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
