"""How-to pages, word for word: their programs, their commands, and the tables that they show.

    pip install -r tests/external/requirements.txt
    pytest -m external tests/external/test_pages.py

The lines of pages that install packages and fetch checkouts are not run; variables name the checkouts. Programs for
GPUs run on CPUs: DeepSpeed's as its page says, torchtitan's through `frameworks/titan_on_cpu.py` and with fewer tokens.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest
from processes import ROOT

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.external, pytest.mark.timeout(1800)]

FRAMEWORKS: Final = Path(__file__).parent / "frameworks"
QUIET: Final = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1",
    "COLUMNS": "100",
}  # fmt: skip


def page(name: str) -> str:
    """Return the text of a page."""
    return (ROOT / "docs/how-to" / f"{name}.md").read_text(encoding="utf-8")


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a page after those that install, with the programs of this environment."""
    folder = Path(sys.executable).parent
    for command in re.findall(r"^    ((?:COMMTRACE=|commtrace )(?:.*\\\n)*.*)$", text, re.MULTILINE):
        in_environment = re.sub(r"(^|\s)(commtrace|torchrun|python)(?=\s)", rf"\1{folder}/\2", command)
        yield in_environment.replace("torchrun ", "torchrun --standalone ")


def run(command: str, cwd: Path, **variables: str) -> str:
    """Run a command of a page, and return what it prints."""
    done = subprocess.run(
        command, shell=True, cwd=cwd, env={**os.environ, **QUIET, **variables}, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, (command, done.stdout, done.stderr[-3000:])
    return done.stdout


def squeezed(lines: Iterable[str]) -> list[str]:
    """Return lines with single spaces: columns of a page may be more narrow than those of a report."""
    return [" ".join(line.split()) for line in lines]


def assert_shown(lines: list[str], report: str) -> None:
    """Assert that a report has the lines of a page."""
    assert len(lines) > 5
    reported = squeezed(report.splitlines())
    assert [line for line in squeezed(lines) if line not in reported] == [], report


def checkout(variable: str) -> Path:
    """Return the checkout that a variable names."""
    if variable not in os.environ:
        pytest.skip(f"{variable} does not name a checkout")
    return Path(os.environ[variable])


def test_the_page_of_the_trainer(tmp_path: Path) -> None:
    text = page("hugging-face")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    outputs = [run(command, tmp_path) for command in commands(text)]
    assert_shown(re.findall(r"^    (\S.*(?:%|share))$", text, re.MULTILINE), outputs[1])


def test_the_page_of_autotp(tmp_path: Path) -> None:
    """The page's edit for CPUs, and its tables."""
    text = page("autotp")
    (folder,) = re.findall(r"cd DeepSpeedExamples/(\S+)", text)
    example = tmp_path / "example"
    shutil.copytree(checkout("DEEPSPEED_EXAMPLES") / folder, example)
    program = example / "autotp_example.py"
    edited, edits = re.subn(
        r"^( *)device = .*cuda.*$", r'\1device = torch.device("cpu")', program.read_text(), flags=re.M
    )
    assert edits == 1
    program.write_text(edited)
    made = "from trainer import tiny_llama; tiny_llama().save_pretrained('tiny')"
    run(f'{sys.executable} -c "{made}"', example, PYTHONPATH=str(FRAMEWORKS))
    outputs = [run(command, example, DS_ACCELERATOR="cpu") for command in commands(text)]
    tables = re.search(r"^    By purpose\n(.*?)^[^ \n]", text, re.MULTILINE | re.DOTALL)
    assert tables is not None
    assert_shown([line for line in tables[1].splitlines() if line.strip()], outputs[1])


def test_the_page_of_torchtitan(tmp_path: Path) -> None:
    """The page's table, of which it leaves columns out, and its dry run."""
    text, folder = page("torchtitan"), checkout("TORCHTITAN_CHECKOUT")
    train, report, dry_run, predicted = (
        command.replace("logs/", f"{tmp_path}/").replace("tests/assets/tokenizer", f"{folder}/tests/assets/tokenizer")
        for command in commands(text)
    )
    small = "--training.steps 3 --training.seq_len 128 --training.local_batch_size 2"
    on_cpus = train.replace("-m torchtitan.train", f"{FRAMEWORKS / 'titan_on_cpu.py'} {small} --dump_folder {tmp_path}")
    assert on_cpus != train
    run(on_cpus, folder, PYTHONPATH=str(folder))
    reported = run(report, folder)
    rows = re.findall(r"^\| (?!purpose|---)(.*) \|$", text, re.MULTILINE)
    lines, shown = squeezed(reported.splitlines()), squeezed(row.replace("|", " ") for row in rows)
    assert len(shown) > 5
    assert [row for row in shown if not any(line.startswith(row) for line in lines)] == [], reported
    run(dry_run, folder, PYTHONPATH=str(folder))
    assert "all_gather" in run(predicted, folder)
