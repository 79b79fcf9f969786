"""How-to pages, word for word: their program, their commands, and the table that they show.

    pip install -r tests/external/requirements.txt
    pytest -m external tests/external/test_pages.py

The lines of pages that install packages are not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from processes import ROOT

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.external, pytest.mark.timeout(900)]

PAGE: Final = (ROOT / "docs/how-to/hugging-face.md").read_text(encoding="utf-8")
QUIET: Final = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def commands() -> Iterator[str]:
    """Yield the page's commands after those that install, with the programs of this environment."""
    folder = Path(sys.executable).parent
    for line in re.findall(r"^    ((?:COMMTRACE=|commtrace ).*)$", PAGE, re.MULTILINE):
        in_environment = re.sub(r"(^|\s)(commtrace|torchrun|python)(?=\s)", rf"\1{folder}/\2", line)
        yield in_environment.replace("torchrun ", "torchrun --standalone ")


def test_the_page_of_the_trainer(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    outputs = []
    for command in commands():
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env={**os.environ, **QUIET, "COLUMNS": "100"}, capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stdout, done.stderr[-3000:])
        outputs.append(done.stdout)
    shown = re.findall(r"^    (\S.*(?:%|share))$", PAGE, re.MULTILINE)
    assert len(shown) > 5
    reported = {" ".join(line.split()) for line in outputs[1].splitlines()}
    assert [line for line in shown if " ".join(line.split()) not in reported] == []
