"""Training frameworks on CPU ranks, traced by environment variable: operators, steps, dimensions and `check`.

    pip install -r tests/external/requirements.txt
    pytest -m external tests/external/test_frameworks.py

FRAMEWORKS_RESULTS=FILE adds the results to a JSON file, the source of the table on the page about frameworks.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
from framework_purposes import PURPOSES
from writing_programs import tree_hash

import commtrace

LAUNCHER = Path(__file__).parent / "frameworks" / "launch.py"
PACKAGES = {
    "trainer": "transformers", "accelerate": "accelerate", "lightning": "lightning", "fabric": "lightning",
    "trl": "trl", "deepspeed": "deepspeed", "autotp": "deepspeed",
}  # fmt: skip

pytestmark = [pytest.mark.external, pytest.mark.timeout(2400)]


class Row(NamedTuple):
    """Training with a framework: package, program, number of ranks, and what its log must contain."""

    package: str
    command: str
    ranks: int
    rules: int
    """Exit status of `check` with the rules."""
    dimensions: str
    """Parallel dimensions of the calls, without groups of one rank."""


ROWS = {
    "Trainer, DDP": Row("transformers", "trainer.py ddp", 2, 0, "data"),
    "Trainer, FSDP": Row("transformers", "trainer.py fsdp", 2, 0, "data"),
    "Trainer, ZeRO-2": Row("transformers", "trainer.py zero2", 2, 0, "data world"),
    "Trainer, ZeRO-3": Row("transformers", "trainer.py zero3", 2, 0, "data"),
    "accelerate, DDP": Row("accelerate", "accelerate_loop.py ddp", 2, 0, "data"),
    "accelerate, FSDP": Row("accelerate", "accelerate_loop.py fsdp", 2, 0, "data"),
    "accelerate, ZeRO-2": Row("accelerate", "accelerate_loop.py zero2", 2, 0, "data world"),
    "Lightning, DDP": Row("lightning", "lightning_fit.py ddp", 2, 0, "data"),
    "Lightning, FSDP": Row("lightning", "lightning_fit.py fsdp", 2, 0, "data"),
    "Lightning, ZeRO-2": Row("lightning", "lightning_fit.py zero2", 2, 0, "data world"),
    "Lightning, ZeRO-3": Row("lightning", "lightning_fit.py zero3", 2, 0, "data"),
    "Megatron-Core, tensor": Row("megatron-core", "megatron_core.py 2 1", 2, 3, "model tensor world"),
    "Megatron-Core, pipeline": Row("megatron-core", "megatron_core.py 1 2", 2, 3, "model pipeline world"),
    "Megatron-Core, both": Row("megatron-core", "megatron_core.py 2 2", 4, 3, "model pipeline tensor world"),
    "torchtitan, FSDP": Row("torchtitan", "torchtitan_train.py 2 1 1", 2, 0, "data"),
    "torchtitan, FSDP and tensor": Row("torchtitan", "torchtitan_train.py 2 2 1", 4, 3, "data tensor world"),
}

DRY_RUNS = ("Trainer, DDP", "accelerate, DDP", "Lightning, DDP", "Megatron-Core, tensor", "torchtitan, FSDP")
"""Rows whose calls are compared with those of a dry run."""


# Not by line: the ranks print to one pipe.
_LOSSES = re.compile(r"losses(?: and parameters \d+ [0-9a-f]{64}|(?:(?!losses)[^\n])*)")


def train(row: Row, folder: Path, **variables: object) -> list[str]:
    """Train, and return the losses that the ranks print, and the checksums of their parameters."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.ranks}"]
    return sorted(_LOSSES.findall(run(launcher, row, folder, **variables)))


def run(command: list[str], row: Row, folder: Path, **variables: object) -> str:
    """Run Python with these arguments and the row's program, and return what it printed."""
    folder.mkdir(exist_ok=True)
    quiet = {
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COMMTRACE")}
    done = subprocess.run(
        [sys.executable, *command, str(LAUNCHER), *row.command.split()],
        env={**inherited, **quiet, **{name: str(value) for name, value in variables.items()}},
        cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def version_of(package: str) -> str:
    """Return a package's installed version, or skip the test."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")


def note(name: str, **facts: object) -> None:
    """Add facts about a row to the file FRAMEWORKS_RESULTS."""
    if "FRAMEWORKS_RESULTS" in os.environ:
        path = Path(os.environ["FRAMEWORKS_RESULTS"])
        results = json.loads(path.read_text()) if path.is_file() else {}
        results.setdefault(name, {}).update(facts)
        lines = [f"{json.dumps(name)}: {json.dumps(row_facts)}" for name, row_facts in results.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def check(log: Path, *options: str | Path) -> int:
    """Return the exit status of `commtrace check`."""
    command = [sys.executable, "-m", "commtrace.cli", "check", str(log), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).returncode


@pytest.mark.parametrize("name", ROWS)
def test_a_framework(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    version = version_of(row.package)
    operators, baseline = tmp_path / "operators", tmp_path / "calls.txt"
    operators.mkdir()
    losses = train(row, tmp_path / "untraced", FRAMEWORKS_OPERATORS=operators)
    logs = [tmp_path / name for name in ("log", "again", "faulty")]
    assert losses
    assert losses == train(row, tmp_path / "work", COMMTRACE=logs[0])
    assert losses == train(row, tmp_path / "work", COMMTRACE=logs[1])
    train(row, tmp_path / "work", COMMTRACE=logs[2], FRAMEWORKS_FAULT=1)

    events = commtrace.open(logs[0]).events()
    for rank in range(row.ranks):
        seen = json.loads((operators / f"{rank}.json").read_text())
        assert Counter("c10d::" + events.loc[events["rank"] == rank, "variant"].astype(str)) == seen
    steps = {tuple(sorted({*events.loc[events["rank"] == rank, "step"]})) for rank in range(row.ranks)}
    assert len(steps) == 1
    dimensions = {*events["role"].astype(str)} - {"self"}
    assert dimensions == {*row.dimensions.split()}

    assert check(logs[0]) == row.rules
    assert check(logs[0], "--update-baseline", baseline) == 0
    assert check(logs[1], "--baseline", baseline) == 0
    assert check(logs[2], "--baseline", baseline) == 1
    assert check(logs[2]) == (1 if row.rules == 0 else row.rules)
    note(
        name, package=row.package, version=version, date=str(datetime.date.today()), ranks=row.ranks,
        calls=len(events), steps=list(steps.pop()), dimensions=sorted(dimensions),
        phases=sorted({*events["phase"].astype(str)}), rules=row.rules,
    )  # fmt: skip


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    version_of(row.package)
    log, dry = tmp_path / "log", tmp_path / "dry"
    train(row, tmp_path / "work", COMMTRACE=log)
    simulated = ["-m", "commtrace.cli", "dryrun", f"--world-size={row.ranks}", "--ranks=all", "--device=cpu"]
    run([*simulated, f"--out={dry}", sys.executable], row, tmp_path / "work")
    assert check(log, "--against", dry) == 0
    note(name, dry_run=0)


@pytest.mark.parametrize("command", PURPOSES)
def test_every_call_has_its_purpose(command: str, tmp_path: Path) -> None:
    """Bits equal those of an untraced run; a dry run in the same folder predicts every call and changes no file."""
    row = Row(PACKAGES[command.split("_")[0].split(".")[0]], command, 4 if "autotp" in command else 2, 0, "")
    version_of(row.package)
    if "autotp" in command and "DEEPSPEED_EXAMPLES" not in os.environ:
        pytest.skip("DEEPSPEED_EXAMPLES does not name a checkout of DeepSpeedExamples")
    log, work, dry = tmp_path / "log", tmp_path / "work", tmp_path / "dry"
    bits = train(row, tmp_path / "untraced", FRAMEWORKS_BITS=1)
    assert train(row, work, COMMTRACE=log, FRAMEWORKS_BITS=1) == bits
    events = commtrace.open(log).events()
    events = events.loc[events["rank"] == 0, ["purpose", "op"]].astype(str)
    counts = Counter(zip(events["purpose"], events["op"], strict=True))
    found: dict[str, list[str]] = defaultdict(list)
    for (purpose, op), calls in sorted(counts.items()):
        found[purpose].append(f"{op} {calls}")
    assert {purpose: ", ".join(calls) for purpose, calls in found.items()} == PURPOSES[command]

    before = tree_hash(work)
    options = ["--world-size", str(row.ranks), "--ranks", "all", "--out", str(dry)]
    run(["-m", "commtrace.cli", "dryrun", *options, sys.executable], row, work)
    assert tree_hash(work) == before
    assert check(log, "--against", dry) == 0
