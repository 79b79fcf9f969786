"""What setup.cfg promises, with the versions of matrix.json: every collective, trainings, and verdicts.

With VERSIONS_RECORD=1 the results become results.json, and the table in docs/versions.md.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import version_environments as environments
import version_results as results

HERE = Path(__file__).parent
RECORD = os.environ.get("VERSIONS_RECORD") == "1"


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("row", environments.ROWS, ids=environments.name_of)
def test_all_that_is_promised_works(row: environments.Row, tmp_path: Path) -> None:
    try:
        python = environments.interpreter(row)
    except environments.NotAvailableError as reason:
        pytest.skip(str(reason))
    subprocess.run([python, HERE / "row.py", tmp_path], check=True, timeout=3000)
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    if RECORD:
        results.record(result)
    for recorder, cells in result["cells"].items():
        assert "error" not in cells, (recorder, cells)
        assert cells["right"] == cells["of"] > 100, (recorder, cells)
    for engine, training in result["trainings"].items():
        if "unsupported" not in training:  # fails untraced as well
            # Untraced runs of DeepSpeed's ZeRO-3 may differ from each other; traced runs then have no reference.
            assert training["equal"] or training["untraced_results"] > 1, engine
            assert all(status == 0 for status, _ in training["check"].values()), (engine, training)
    assert result["recomputation"] == {"passed": 2, "failed": 0, "error": 0}
    assert result["mpi"]["passed"] > 100, result["mpi"]
    assert not {"failed", "error", "skipped"} & {name for name, number in result["mpi"].items() if number}


def test_the_table_in_the_documentation_is_that_of_the_results() -> None:
    page = results.PAGE.read_text()
    assert results.with_table(page) == page


def test_the_lowest_versions_are_those_that_setup_cfg_promises() -> None:
    promised = (environments.ROOT / "setup.cfg").read_text()
    for package in ("torch", "deepspeed", "numpy", "pandas", "mpi4py"):
        lowest = min(environments.ROWS, key=lambda row: [int(part) for part in row[package].split(".")])[package]
        assert f"{package}>={lowest.removesuffix('.0')}\n" in promised
