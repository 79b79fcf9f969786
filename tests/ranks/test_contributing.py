"""The recipes of CONTRIBUTING.md, followed to the letter in a copy of the package."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import processes
import pytest
from factory import training
from processes import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

SHOW = """
import json, runpy, sys
import commtrace
from commtrace.cli import main

directory, folder, table = sys.argv[1:]
page = ["--html", f"{folder}/page", "--force"]
for name, options in (("text", ["--sections", "all"]), ("json", ["--json"]), ("page", page)):
    sys.stdout = open(f"{folder}/{name}.out", "w")
    assert main(["report", directory, *options]) == 0
sys.stdout = sys.__stdout__
run = commtrace.open(directory)
print(json.dumps({
    "package": commtrace.__file__,
    "rows": json.loads(run.table(table).to_json(orient="records")),
    "columns": [*run.describe_table(table).index],
    "reference": f"### `{table}`" in runpy.run_path("docs/generated_pages.py")["tables_page"](),
}))
"""
"""Program that shows a run in every way, and prints what the notebook and the reference page have of a table."""

FIGURE = "import sys, commtrace; print(commtrace.open(sys.argv[1]).figure('dtypes').layout.title.text)"

TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.reduce(torch.ones(1000), 0)
dist.barrier()
dist.destroy_process_group()
"""
MPI = """
import numpy as np
from mpi4py import MPI
MPI.COMM_WORLD.Reduce(np.ones(500), np.ones(500), root=0)
MPI.COMM_WORLD.Barrier()
"""


class Change(NamedTuple):
    """Lines that a recipe adds: to the imports or to a named tuple or dictionary of a file, or as a new file."""

    path: str
    name: str
    lines: str


def recipe(title: str) -> list[Change]:
    """Return the changes in the code blocks of a recipe."""
    text = TEXT[TEXT.index(f"**{title}**") :]
    text = text[: re.search(r"^\*\*", text[2:], re.MULTILINE).start()]  # type: ignore[union-attr]
    changes = []
    for block in re.findall(r"^    ```python\n(.*?)^    ```$", text, re.MULTILINE | re.DOTALL):
        _, *parts = re.split(r"^# ([\w/]+\.py)(?:: (\w+))?\n", textwrap.dedent(block), flags=re.MULTILINE)
        changes += [Change(*part) for part in zip(parts[::3], parts[1::3], parts[2::3], strict=True)]
    return changes


def apply(change: Change, root: Path) -> None:
    """Make a change in a copy of the repository."""
    path = root / change.path
    if not change.name:
        path.write_text(change.lines, encoding="utf-8")
        return
    text = path.read_text(encoding="utf-8")
    if change.name == "imports":
        at = re.search(r"^from \.", text, re.MULTILINE)
    else:
        start = re.search(rf"^{change.name}\b.*= [({{]$", text, re.MULTILINE)
        assert start, change
        at = re.compile(r"^[)}]", re.MULTILINE).search(text, start.end())
    assert at, change
    path.write_text(text[: at.start()] + change.lines + text[at.start() :], encoding="utf-8")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the package and of what makes the reference pages."""
    root = tmp_path / "copy"
    for folder in ("commtrace", "hooks", "analyses", "docs", "tests/support/recorded"):
        shutil.copytree(ROOT / folder, root / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def python(code: str, root: Path, *args: object, **changes: Any) -> str:
    """Run a program with the package in `root`, and return its output."""
    arguments = [sys.executable, "-c", code, *map(str, args)]
    result = processes.run(arguments, cwd=root, PYTHONPATH=root, PYTHONDONTWRITEBYTECODE=1, **changes)
    assert result.status == 0, result.err
    return result.out


def test_a_recipe_for_a_format(copy: Path, tmp_path: Path) -> None:
    call = {"call": "all_reduce", "rank": 3, "bytes": 100, "begin": 1_700_000_000_000_000_000, "end": 17 * 10**17 + 5}
    (tmp_path / "calls.jsonl").write_text(f"{json.dumps(call)}\n")
    for change in recipe("A format to import"):
        apply(change, copy)
    code = "import sys, commtrace; print(commtrace.open(sys.argv[1]).events().to_json(orient='records'))"
    (row,) = json.loads(python(code, copy, tmp_path / "calls.jsonl"))
    assert (row["op"], row["rank"], row["payload_bytes"]) == ("all_reduce", 3, 100)
    assert row["t_end_ns"] - row["t_begin_ns"] == 5


@pytest.mark.long
def test_a_recipe_for_an_analysis(copy: Path, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("plotly")
    training(tmp_path / "log")
    for change in recipe("An analysis"):
        apply(change, copy)
    shown = json.loads(python(SHOW, copy, tmp_path / "log", tmp_path, "volume_by_dtype"))
    assert Path(shown["package"]).is_relative_to(copy)
    assert shown["rows"] == [
        {"dtype": "float16", "calls": 6, "payload_bytes": 12288, "wire_bytes": 6144},
        {"dtype": "float32", "calls": 6, "payload_bytes": 24576, "wire_bytes": 24576},
        {"dtype": "uint8", "calls": 2, "payload_bytes": 0, "wire_bytes": 0},
    ]
    assert shown["columns"] == ["dtype", "calls", "payload_bytes", "wire_bytes"]
    assert shown["reference"]
    document = json.loads((tmp_path / "json.out").read_text())
    assert document["tables"]["volume_by_dtype"] == shown["rows"]
    assert [*document["columns"]["volume_by_dtype"]] == shown["columns"]
    text, page = (tmp_path / "text.out").read_text(), (tmp_path / "page").read_text()
    assert re.search(r"^By type\ntype +calls +payload +wire \(min\)\nfloat16 +6 +12\.0 KiB", text, re.MULTILINE)
    assert "The calls carry several types: float16, float32." in text
    section = page[page.index('<section id="dtypes">') :].partition("</section>")[0]
    assert 'class="figure"' in section
    assert "float32" in section
    assert python(FIGURE, copy, tmp_path / "log").strip() == "Volume by type"


@pytest.mark.parametrize(
    ("library", "program", "payload"),
    [
        pytest.param("torch", TORCH, 4000, id="torch"),
        pytest.param("mpi4py", MPI, 4000, id="mpi4py"),
    ],
)
@pytest.mark.exhaustive
def test_a_recipe_for_a_collective(library: str, program: str, payload: int, copy: Path, tmp_path: Path) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    changes = recipe("A collective operation")
    for change in changes:
        path = copy / change.path
        text = path.read_text(encoding="utf-8")
        assert text.count(change.lines) == 1, f"{change.path} has other lines than CONTRIBUTING.md"
        path.write_text(text.replace(change.lines, ""), encoding="utf-8")
    python(program, copy, COMMTRACE=tmp_path / "without")
    without = json.loads(python(SHOW, copy, tmp_path / "without", tmp_path, "volume_by_operation"))
    assert "reduce" not in [row["op"] for row in without["rows"]]
    for change in changes:
        apply(change, copy)
    python(program, copy, COMMTRACE=tmp_path / "log")
    shown = json.loads(python(SHOW, copy, tmp_path / "log", tmp_path, "volume_by_operation"))
    [row] = [row for row in shown["rows"] if row["op"] == "reduce"]
    assert (row["calls"], row["payload_bytes"], row["wire_bytes"]) == (1, payload, 0)
    assert json.loads((tmp_path / "json.out").read_text())["tables"]["volume_by_operation"] == shown["rows"]
    assert re.search(r"^reduce +1 +3\.91 KiB", (tmp_path / "text.out").read_text(), re.MULTILINE)
    assert ">reduce<" in (tmp_path / "page").read_text()
