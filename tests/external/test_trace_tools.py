"""HTA and TraceLens load exported traces, and count the same calls, bytes, durations and steps.

    TRACE_TOOLS=venv/bin/python LOGS=logs/ddp:logs/zero1 pytest -m external tests/external/test_trace_tools.py

TRACE_TOOLS is the Python of an environment with HolisticTraceAnalysis and TraceLens: neither is in commtrace's own, as
they bring Jupyter and TensorFlow's profiler. LOGS are recorded runs; without it, a small made one is used.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest
from factory import training

from commtrace.analyses.grouping import rows_of
from commtrace.analyses.kineto_export import export_kineto
from commtrace.importing.operation_names import operation_of
from commtrace.run import Run, open_run

PYTHON: Final = os.environ.get("TRACE_TOOLS", "")
LOGS: Final[list[Path | None]] = [Path(path) for path in os.environ.get("LOGS", "").split(":") if path]
pytestmark = [pytest.mark.external, pytest.mark.skipif(not PYTHON, reason="TRACE_TOOLS names no Python")]


@pytest.fixture(params=LOGS or [None], ids=str)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    if request.param is None:
        training(tmp_path / "log", ranks=3, steps=4)
    return open_run(request.param or tmp_path / "log")


@pytest.fixture
def counted(run: Run, tmp_path: Path) -> Any:
    """Return what the tools count in the exported run."""
    export_kineto(run, tmp_path / "traces")
    command = [PYTHON, str(Path(__file__).with_name("trace_tools.py")), str(tmp_path / "traces")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_counts_bytes_durations_and_steps_are_equal(run: Run, counted: Any) -> None:
    calls = [row for row in rows_of(run.events()) if row.t_end_ns > 0]
    durations = [row.t_end_ns - max(row.t_begin_ns, row.t_start_ns) for row in calls]
    of_lens = Counter((operation_of(name), rank, max(sent, received), ns)
                      for name, rank, sent, received, ns in counted["tracelens"])  # fmt: skip
    assert of_lens == Counter(
        (row.op, row.rank, row.payload_bytes, ns) for row, ns in zip(calls, durations, strict=True)
    )
    of_hta = Counter((rank, step, ns) for _, rank, step, ns in counted["hta"]["kernels"])
    assert of_hta == Counter((row.rank, row.step, ns) for row, ns in zip(calls, durations, strict=True))
    assert counted["hta"]["breakdown_ns"] == sum(durations)
    assert set(counted["hta"]["overlap_percent"].values()) == {0.0}, "no kernel computes in a recorded run"
