"""The notebooks run, cell by cell, on a log where they expect one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from factory import training

from commtrace.reading.run import Run

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def run(notebook: Path) -> dict[str, Any]:
    """The names that its code cells define, run in order."""
    names: dict[str, Any] = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name} {cell['id']}", "exec"), names)
    return names


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_is_kept_without_results(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training(tmp_path / "demo-logs" / "zero3")
    monkeypatch.chdir(tmp_path)
    names = run(notebook)
    assert isinstance(names["run"], Run)
    cells = json.loads(notebook.read_text())["cells"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")


def test_the_first_look_sums_what_the_log_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training(tmp_path / "demo-logs" / "zero3")
    monkeypatch.chdir(tmp_path)
    names = run(next(path for path in NOTEBOOKS if path.stem == "first-look"))
    by_line: pd.DataFrame = names["by_line"]
    events = names["run"].events()
    of_rank_0 = events[(events["rank"] == 0) & (events["step"] >= 0)]
    assert by_line["sum"].sum() == of_rank_0["payload_bytes"].sum() > 0
    assert by_line["count"].sum() == len(of_rank_0)
