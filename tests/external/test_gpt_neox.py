"""GPT-NeoX's unmodified program on CPU ranks: theory expects every call, and the functions that rules mirror exist.

    COMMTRACE_GPT_NEOX=/path/of/a/checkout pytest -m external tests/external

Its requirements besides DeepSpeed must be installed: regex, sentencepiece, tokenizers, transformers, tiktoken,
pybind11, ftfy, six, requests, boto3. The rules were checked with commit `registry.GPT_NEOX`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import commtrace
from commtrace.reading.labels import NOT_RECORDED
from commtrace.schema import Purpose
from commtrace.theory.rules.registry import GPT_NEOX, RULES, Rule

VARIABLE = "COMMTRACE_GPT_NEOX"
CHECKOUT = Path(os.environ.get(VARIABLE, "."))
CPU = Path(__file__).parent / "gpt_neox_cpu"
RECORDED = json.loads((Path(__file__).parents[1] / "support" / "recorded" / "gpt_neox.json").read_text())

pytestmark = [
    pytest.mark.external,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} does not name a checkout of GPT-NeoX"),
]


LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
COMMTRACE = [sys.executable, "-m", "commtrace.cli"]


def run(command: list[str], ranks: int, *, status: int = 0, **variables: str) -> str:
    """Run a command in the checkout, check its exit status, and return its output."""
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}  # not a setting of commtrace
    environment = {
        **inherited, "PYTHONPATH": str(CPU), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        "TORCHDYNAMO_DISABLE": "1", "NEOX_RANKS": str(ranks), **variables,
    }  # fmt: skip
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == status, done.stderr[-2000:]
    return done.stdout


def prepared(name: str, folder: Path, **changes: object) -> tuple[int, list[str]]:
    """Write the data of a recorded run, and return its number of ranks and the script with its arguments."""
    config: dict[str, Any] = {**RECORDED[name]["config"], **changes}
    ranks = int(config["global_num_gpus"])
    data = str(folder / "text_document")
    paths = {"data_path": data, "vocab_file": "none", "distributed_backend": "gloo", "num_workers": 0}
    if "checkpoint_factor" in config:
        paths["save"] = str(folder / "checkpoints")
    (folder / "config.yml").write_text(yaml.safe_dump({**config, **paths, "data_impl": "mmap", "lr_decay_iters": 6}))
    start = [sys.executable, str(CPU / "start.py"), str(folder / "config.yml"), data]
    return ranks, json.loads(run(start, ranks).splitlines()[-1])


def trained(folder: Path, ranks: int, script: list[str]) -> str:
    """Train, and return the log directory."""
    run([*LAUNCHER, f"--nproc-per-node={ranks}", *script], ranks, COMMTRACE=str(folder / "log"))
    return str(folder / "log")


def simulated(folder: Path, ranks: int, script: list[str]) -> str:
    """Dry-run the same training, and return its log directory."""
    options = [f"--world-size={ranks}", "--ranks=all", "--out", str(folder / "dry")]
    run([*COMMTRACE, "dryrun", *options, sys.executable, *script], ranks)
    return str(folder / "dry")


@pytest.mark.parametrize("name", RECORDED)
def test_every_call_of_a_training_is_expected(name: str, tmp_path: Path) -> None:
    ranks, script = prepared(name, tmp_path)
    log, dry = trained(tmp_path, ranks, script), simulated(tmp_path, ranks, script)
    run([*COMMTRACE, "check", log], ranks)
    run([*COMMTRACE, "check", log, "--against", dry], ranks)
    table = commtrace.open(log).table("step_by_purpose")
    assert (table["difference_bytes"].dropna() == 0).all()
    without_form = set(table.loc[table["expected_calls"].isna(), "purpose"])
    assert without_form <= {Purpose.MODEL_CHECKED.value}  # ZeRO-3 compares the order of modules while it is recorded
    assert NOT_RECORDED not in set(commtrace.open(log).table("volume_by_purpose")["purpose"])


@pytest.mark.parametrize(
    ("fault", "name", "difference", "by_rules"),
    [
        ("bucket", "dp2-zero2", "- 2 all_reduce of 331,264 bytes", 1),
        ("extra", "dp2", "+ 1 all_reduce of 64 bytes", 0),  # listed, as the program's own call
        ("order", "mp2", "broadcast of 1,040 bytes", 0),
        ("size", "dp2", "broadcast of 40 bytes", 1),
    ],
)
def test_a_fault_shows(fault: str, name: str, difference: str, by_rules: int, tmp_path: Path) -> None:
    ranks, script = prepared(name, tmp_path)
    # The real run first: rank 0 writes an index of the data, which the other ranks of a dry run would not see.
    log = trained(tmp_path, ranks, [str(CPU / "faults.py"), fault, *script])
    dry = simulated(tmp_path, ranks, script)
    assert difference in run([*COMMTRACE, "check", log, "--against", dry], ranks, status=1)
    run([*COMMTRACE, "check", log], ranks, status=by_rules)


def test_an_evaluation_that_fails_in_the_pipeline_engine(tmp_path: Path) -> None:
    """DeepSpeed's pipeline returns a number, which GPT-NeoX's evaluation iterates over."""
    ranks, script = prepared("pp2", tmp_path, split="90,5,5", eval_interval=2, eval_iters=3)
    log = str(tmp_path / "log")
    run([*LAUNCHER, f"--nproc-per-node={ranks}", *script], ranks, status=1, COMMTRACE=log)
    shown = " ".join(run([*COMMTRACE, "check", log], ranks, status=5).split())
    first, _, rest = shown.partition("matches the rules")
    line = r"\S*training.py:\d+ evaluate"
    assert re.search(rf'by TypeError at {line} \("iteration over a 0-d tensor"\) in step 1\.', first)
    assert "differ" not in shown
    assert "evaluation" in rest, "its calls are an activity of the program"


def test_the_configuration_files_are_as_recorded(tmp_path: Path) -> None:
    run([sys.executable, str(Path(__file__).with_name("gpt_neox_files.py")), str(tmp_path / "files.json")], 1)
    recorded = Path(__file__).parents[1] / "support" / "recorded" / "gpt_neox_files.json"
    files, expected = (json.loads(path.read_text())["files"] for path in (tmp_path / "files.json", recorded))
    assert files == expected


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.library == GPT_NEOX[0]], ids=lambda rule: rule.name)
def test_the_functions_that_a_rule_mirrors_exist(rule: Rule) -> None:
    text, path = "", CHECKOUT
    for cited in re.sub(r"\(.*?\)", "", rule.mirrors).replace(";", ",").split(","):
        parts = cited.strip().split(".")
        if parts[0] == "megatron":
            lengths = range(len(parts), 0, -1)
            length = next(end for end in lengths if CHECKOUT.joinpath(*parts[:end]).with_suffix(".py").is_file())
            path, parts = CHECKOUT.joinpath(*parts[:length]).with_suffix(".py"), parts[length:]
            text = path.read_text()
        for name in parts:
            assert re.search(rf"(def|class) {name}\b", text), f"{path} has no {name}"
