"""`commtrace doctor`: its report on this environment, on a call that is not recorded, and on a failing probe."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
from recorders import needs


def doctor(*arguments: str, **variables: Any) -> processes.Result:
    command = [sys.executable, "-m", "commtrace.cli", "doctor", *arguments]
    return processes.run(command, limit=200, **variables)


@pytest.mark.long
@pytest.mark.parametrize("recorder", ["python", pytest.param("native", marks=pytest.mark.exhaustive)])
def test_both_libraries_are_probed(recorder: str) -> None:
    needs(recorder)
    result = doctor(COMMTRACE_RECORDER=recorder, COMMTRACE="")
    assert (result.status, result.err) == (0, "")
    assert "tracing        off" in result.out
    assert re.findall(r"^probe of (\w+)", result.out, re.MULTILINE) == ["torch", "mpi4py"]
    assert re.findall(r"^recorder +(\w+)", result.out, re.MULTILINE) == [recorder] * 2
    assert result.out.count("COMMTRACE_RECORDER=python") == (2 if recorder == "python" else 0)
    assert result.out.count("all 10 operations are recorded with their payloads") == 2
    assert result.out.count("not observed") >= 4
    assert max(map(len, result.out.splitlines())) <= 100


@pytest.mark.long
def test_a_call_that_is_not_recorded_and_a_probe_that_cannot_run_are_named(tmp_path: Path) -> None:
    # Python imports `sitecustomize` at start-up, also in the ranks of the probe.
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK'):\n"
        "    import torch.distributed\n"
        "    torch.distributed.reduce = lambda *args, **options: None\n"
    )
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('broken')\n")
    result = doctor(COMMTRACE_RECORDER="python", PYTHONPATH=tmp_path)
    assert result.status == 2
    probes = result.out.partition("probe of torch")[2].partition("probe of mpi4py")
    assert "rank 0: 1 reduce of 4,096 bytes missing; rank 1: 1 reduce of 4,096 bytes missing" in probes[0]
    assert "broken" in probes[2]
    assert "Traceback" not in result.out + result.err
