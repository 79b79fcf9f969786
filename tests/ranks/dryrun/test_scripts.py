"""Users' own scripts are dry-run unmodified, and the calls are those of real runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import dry_runs
import processes
import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("yaml")

import trainings

from commtrace.run import Run, open_run

SMALL: Final = 512
CONFIG: Final[dict[str, Any]] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 1000,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 20_000},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
"""Configuration of a DeepSpeed script; torch's AdamW, so that the real run compiles nothing."""


def script(name: str) -> Path:
    """Return the path of a script."""
    return processes.PROGRAMS / f"user_{name}.py"


def real(name: str, folder: Path, *arguments: object) -> Run:
    """Run a script on two ranks, traced."""
    program = (folder / "real", script(name), *arguments)
    started = trainings.parent().start("traced", folder / "logs", *program, traced=False)
    assert started.wait(dry_runs.LIMIT_SECONDS) == [0, 0], started.output(0)[-4000:]
    return open_run(folder / "real")


def dry(name: str, folder: Path, *arguments: object) -> tuple[Run, processes.Result]:
    """Dry-run a script with the command."""
    command = [sys.executable, "-m", "commtrace.cli", "dryrun", "--world-size", "2", "--ranks", "all", "--jobs", "2"]
    program = [sys.executable, str(script(name)), *map(str, arguments)]
    result = processes.run([*command, "--out", str(folder / "dry"), *program], limit=dry_runs.LIMIT_SECONDS, cwd=folder)
    assert result.status == 0, result.err
    return open_run(folder / "dry"), result


def dry_here(name: str, folder: Path, *arguments: object) -> Run:
    """Dry-run a script in forks of a process that has already imported DeepSpeed, which takes seconds."""
    program = (folder / "dry", script(name), *arguments)
    dry_runs.simulated("traced", folder / "simulated", 2, *program, small=SMALL)
    return open_run(folder / "dry")


def line_of(name: str, text: str) -> int:
    """Return the number of the first line of a script that contains a text."""
    return next(number for number, line in enumerate(script(name).read_text().splitlines(), 1) if text in line)


def notices_by_line(run: Run) -> dict[int, str]:
    """Return the notices of a dry run about lines of the script, by line number."""
    rows = run.processes[0].tables.notices
    return {row["line"]: row["what"] for row in rows if "user_" in row["file"]}


@pytest.mark.exhaustive
def test_a_plain_loop_under_ddp(tmp_path: Path) -> None:
    """The loop has loader workers, mixed precision, a gradient scaler, clipping, checkpoints and printed losses."""
    options = ("--batch-size", 16, "--checkpoints")
    expected = real("ddp", tmp_path, *options, tmp_path / "real-checkpoints")
    run, result = dry("ddp", tmp_path, *options, tmp_path / "checkpoints")
    dry_runs.assert_same(expected, run)
    assert result.out.count("% right") == 2
    assert len([*(tmp_path / "real-checkpoints").iterdir()]) == 2
    assert not (tmp_path / "checkpoints").exists()
    notices = notices_by_line(run)
    assert "reads a number" in notices[line_of("ddp", "total.item()")]


def test_a_script_as_in_deepspeeds_tutorial(tmp_path: Path) -> None:
    """The real run uses torch's AdamW; the dry run, DeepSpeed's C++ optimizer, which is not compiled here."""
    config = tmp_path / "ds.json"
    options = ("--deepspeed", "--deepspeed_config", config, "--save-dir")
    config.write_text(json.dumps(CONFIG))
    expected = real("deepspeed", tmp_path, *options, tmp_path / "real-saved")
    config.write_text(json.dumps({**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))
    run = dry_here("deepspeed", tmp_path, *options, tmp_path / "saved")
    dry_runs.assert_same(expected, run)
    assert [*(tmp_path / "real-saved").rglob("*states.pt")]
    assert not [*(tmp_path / "saved").rglob("*states.pt")]
    assert "no file is written" in notices_by_line(run)[line_of("deepspeed", "engine.save_checkpoint(")]


@pytest.mark.exhaustive
def test_a_loop_like_hugging_faces_trainer(tmp_path: Path) -> None:
    """The loop has accumulation without synchronization, recomputation, predictions of all ranks and early stopping."""
    expected = real("trainer", tmp_path, f"output={tmp_path / 'real-out'}")
    dry_runs.assert_same(expected, dry_here("trainer", tmp_path, f"output={tmp_path / 'out'}"))


@pytest.mark.long
def test_objects_that_are_larger_than_what_is_computed(tmp_path: Path) -> None:
    """Gathered bytes are as if every rank sent the same, others are the root's: the program loads the objects."""
    expected = real("objects", tmp_path)
    dry_runs.assert_same(expected, dry_here("objects", tmp_path))


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_hugging_faces_trainer_itself(stage: int | None, tmp_path: Path) -> None:
    """The Trainer runs on DDP or DeepSpeed with accumulation, clipping and evaluation. The tests do not install it."""
    pytest.importorskip("transformers", reason="needs `pip install transformers accelerate`")
    pytest.importorskip("accelerate", reason="needs `pip install transformers accelerate`")
    options: list[object] = []
    if stage is not None:
        config = tmp_path / "ds.json"
        zero = {"stage": stage, "reduce_bucket_size": 20_000, "stage3_param_persistence_threshold": 100}
        batch = {f"{name}": "auto" for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
        config.write_text(json.dumps({**batch, "gradient_clipping": "auto", "zero_optimization": zero}))
        options.append(config)
    expected = real("transformers", tmp_path, *options)
    run, _ = dry("transformers", tmp_path, *options)
    dry_runs.assert_same(expected, run)
