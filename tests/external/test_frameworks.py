"""Training frameworks on CPU ranks, traced by environment variable: operators, steps, dimensions and `check`.

    pip install -r tests/external/requirements.txt
    pytest -m external tests/external/test_frameworks.py

FRAMEWORKS_RESULTS=tests/support/recorded replaces the recorded results by new ones. frameworks.json is the source of a
table of the reference, and `python tests/support/framework_table.py` writes that of the page about frameworks.
"""

from __future__ import annotations

import datetime
import fcntl
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from checkout_purposes import PROGRAMS
from writing_programs import tree_hash

import commtrace
from commtrace.reading.labels import NOT_RECORDED

LAUNCHER = Path(__file__).parent / "frameworks" / "launch.py"
PACKAGES = {
    "trainer": "transformers", "accelerate": "accelerate", "lightning": "lightning", "fabric": "lightning",
    "trl": "trl", "deepspeed": "deepspeed", "autotp": "deepspeed", "megatron": "megatron-core", "titan": "tyro",
    "pytorch": "torch", "picotron": "transformers",
}  # fmt: skip
CHECKOUTS = {
    "autotp": "DEEPSPEED_EXAMPLES", "titan": "TORCHTITAN_CHECKOUT", "pytorch": "PYTORCH_EXAMPLES",
    "picotron": "PICOTRON_CHECKOUT",
}  # fmt: skip
"""First word of a program -> variable that names the checkout that it runs."""

RESUME: Final = " resume"
"""End of the command of a run that begins with the checkpoint of another."""

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
    "Trainer, ZeRO-2": Row("transformers", "trainer.py zero2", 2, 0, "data"),
    "Trainer, ZeRO-3": Row("transformers", "trainer.py zero3", 2, 0, "data"),
    "accelerate, DDP": Row("accelerate", "accelerate_loop.py ddp", 2, 0, "data"),
    "accelerate, FSDP": Row("accelerate", "accelerate_loop.py fsdp", 2, 0, "data"),
    "accelerate, ZeRO-2": Row("accelerate", "accelerate_loop.py zero2", 2, 0, "data"),
    "Lightning, DDP": Row("lightning", "lightning_fit.py ddp", 2, 0, "data"),
    "Lightning, FSDP": Row("lightning", "lightning_fit.py fsdp", 2, 0, "data"),
    "Lightning, ZeRO-2": Row("lightning", "lightning_fit.py zero2", 2, 0, "data"),
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


def note(file_name: str, name: str, **facts: object) -> None:
    """Add facts about a row to a file in the directory FRAMEWORKS_RESULTS."""
    if "FRAMEWORKS_RESULTS" in os.environ:
        with open(Path(os.environ["FRAMEWORKS_RESULTS"]) / file_name, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # tests may run in several processes
            file.seek(0)
            results = json.loads(file.read() or "{}")
            results.setdefault(name, {}).update(facts)
            lines = [f"{json.dumps(name)}: {json.dumps(row_facts)}" for name, row_facts in results.items()]
            file.truncate(0)
            file.write("{\n" + ",\n".join(lines) + "\n}\n")


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
        "frameworks.json", name, package=row.package, version=version, date=str(datetime.date.today()), ranks=row.ranks,
        calls=len(events), steps=list(steps.pop()), dimensions=sorted(dimensions),
        phases=sorted({*events["phase"].astype(str)}), rules=row.rules,
    )  # fmt: skip


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    version_of(row.package)
    log, dry = tmp_path / "log", tmp_path / "dry"
    train(row, tmp_path / "work", COMMTRACE=log)
    dry_run(row, tmp_path / "work", dry)
    assert check(log, "--against", dry) == 0
    note("frameworks.json", name, dry_run=0)


@pytest.mark.parametrize("command", [command for command in PROGRAMS if not command.endswith(RESUME)])
def test_a_program_of_others(command: str, tmp_path: Path) -> None:
    """A program, and its resumption: bits, purposes, steps, dimensions, `check`, and a dry run that changes no file."""
    word = re.split(r"[_.]", command)[0]
    version_of(PACKAGES[word])
    if CHECKOUTS.get(word, "PATH") not in os.environ:
        pytest.skip(f"{CHECKOUTS[word]} does not name a checkout")
    work, found, expected = tmp_path / "work", {}, {}
    for part in (command, command + RESUME):
        if part in PROGRAMS:
            program = PROGRAMS[part]
            row = Row("", part, program.ranks, program.rules, program.dimensions)
            log, dry = tmp_path / f"log{len(part)}", tmp_path / f"dry{len(part)}"
            bits = train(row, tmp_path / "untraced", FRAMEWORKS_BITS=1)
            work.mkdir(exist_ok=True)
            before = tree_hash(work)
            dry_run(row, work, dry)
            is_unchanged = tree_hash(work) == before
            is_equal = train(row, work, COMMTRACE=log, FRAMEWORKS_BITS=1) == bits
            facts = {
                "equal": is_equal, "unchanged": is_unchanged, **facts_of(log),
                "rules": check(log), "dry_run": check(log, "--against", dry),
            }  # fmt: skip
            recorded = {name: value for name, value in facts.items() if name != "purposes"}  # those of PROGRAMS
            note("framework_programs.json", part, date=str(datetime.date.today()), **recorded)
            found[part], expected[part] = facts, {
                "equal": True, "unchanged": True, "steps": program.steps, "purposes": program.purposes,
                "dimensions": program.dimensions.split(), "unexplained_bytes": 0, "rules": program.rules,
                "dry_run": program.dry_run,
            }  # fmt: skip
    assert found == expected


def dry_run(row: Row, folder: Path, out: Path) -> None:
    """Simulate a program in a folder that its real run uses."""
    options = [f"--world-size={row.ranks}", "--ranks=all", "--device=cpu", f"--out={out}"]
    run(["-m", "commtrace.cli", "dryrun", *options, sys.executable], row, folder)


def facts_of(log: Path) -> dict[str, Any]:
    """Return what a log contains: numbers of calls of rank 0 by purpose, dimensions, steps, unexplained bytes."""
    recorded = commtrace.open(log)
    events = recorded.events()
    texts = events.loc[events["rank"] == 0, ["purpose", "op"]].astype(str)
    purposes: dict[str, list[str]] = defaultdict(list)
    for (purpose, op), calls in sorted(Counter(zip(texts["purpose"], texts["op"], strict=True)).items()):
        purposes[purpose].append(f"{op} {calls}")
    volumes = recorded.table("volume_by_purpose")
    steps = {len({*of_rank["step"]} - {-1}) for _, of_rank in events.groupby("rank")}
    assert len(steps) == 1
    return {
        "steps": steps.pop(),
        "purposes": {purpose: ", ".join(calls) for purpose, calls in purposes.items()},
        "dimensions": sorted({*events["role"].astype(str)} - {"self"}),
        "unexplained_bytes": int(volumes.loc[volumes["purpose"] == NOT_RECORDED, "payload_bytes"].sum()),
    }
