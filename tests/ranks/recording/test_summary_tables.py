"""With COMMTRACE_MODE=summary, counts, sizes and what `check` compares are those of a full log, in every scheme."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import mpi_launch
import pytest
from ranks import Nursery
from summary_tables import assert_equal, assert_times_are_equal, summarized

pytest.importorskip("torch")

import encoder_cases as encoder
import pipelines
import sequence_parallel_cases as layer
import sequence_trainings
import sharding
import trainings
from hook_programs.runs import launch

from commtrace.cli import main
from commtrace.run import Run, open_run

MODES: Final = ("events", "summary")


@pytest.mark.long
def test_a_program_and_the_commands(nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program uses DDP, and makes calls of its own that differ between steps."""
    logs = [tmp_path / mode for mode in MODES]
    for log in logs:
        statuses, outputs = nursery.run("changed_training", log, "9", "more", MODE=log.name)
        assert statuses == [0] * 2, outputs
    assert_equal(*map(open_run, logs))
    capsys.readouterr()
    verdicts = [(main(["check", str(log)]), capsys.readouterr().out) for log in logs]
    assert verdicts[0] == verdicts[1]
    full, summary = map(str, logs)
    assert main(["report", summary, "--sections", "all"]) == 0
    assert "cannot be known from it" in " ".join(capsys.readouterr().out.split())
    for command in (["diff", summary, full], ["scaling", summary], ["export", summary, "--out", full + ".parquet"]):
        assert main(command) == 2
        assert "a summary does not have" in capsys.readouterr().err


WANTED: Final[dict[int, dict[str, dict[str, Any]]]] = {
    3: {name: trainings.VARIANTS[name] for name in ("ddp", "zero0", "zero1", "zero2", "zero3")},
    4: {
        **sharding.wanted(sharding.OF_EACH_SCHEME),
        **{name: trainings.SHARED[name] for name in trainings.SHARED_OF_EACH_SCHEME},
        **{name: sequence_trainings.wanted(name) for name in sequence_trainings.OF_EACH_SCHEME},
        **{name: pipelines.FOUR[name] for name in ("pp4", "pp2dp2", "pp2tp2")},
    },
    8: pipelines.EIGHT,
}
"""Number of ranks -> trainings; those on eight ranks are parallel in three dimensions."""
REPRESENTATIVES: Final = ("pp2tp2",)


def _mode_of(name: str, mode: str) -> str:
    return f"{name}-{mode}"


@functools.cache
def runs(ranks: int, recorder: str) -> Mapping[str, Run]:
    """Return the runs of WANTED in both modes."""
    wanted = {
        _mode_of(name, mode): {**training, "variables": {"COMMTRACE_MODE": mode, "COMMTRACE_RECORDER": recorder}}
        for name, training in WANTED[ranks].items()
        for mode in MODES
    }
    first = [_mode_of(name, mode) for name in REPRESENTATIVES if name in WANTED[ranks] for mode in MODES]
    return trainings.TwoStarts(wanted, first, functools.partial(trainings.trained, processes=ranks))


SCHEMES: Final = [case for ranks in WANTED for case in trainings.parameters(WANTED[ranks], REPRESENTATIVES, ranks)]


@pytest.mark.long
@trainings.TIMEOUT
@pytest.mark.parametrize(("ranks", "name"), SCHEMES)
def test_a_scheme(ranks: int, name: str, recorder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("yaml")
    full, summary = (runs(ranks, recorder)[_mode_of(name, mode)] for mode in MODES)
    assert_equal(full, summary)
    assert len(summary.table("reconciliation")) > 0
    same_calls = summarized(full.log.path, tmp_path / "summarized", random.Random(trainings.seed()))
    assert_equal(full, same_calls)
    assert_times_are_equal(full, same_calls)
    verdicts = [(main(["check", str(run.log.path)]), _last_line(capsys)) for run in (full, summary)]
    assert verdicts[0] == verdicts[1]


def _last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the last printed line; libraries that a command imports may print lines before it."""
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("program", "ranks"), [("operators", 3), ("mixture", 2), ("plain", 2)])
def test_operators_of_torch(program: str, ranks: int, recorder: str, tmp_path: Path) -> None:
    for mode in MODES:
        folder = tmp_path / mode
        folder.mkdir()
        launch(program, folder, log=folder / "log", recorder=recorder, ranks=ranks, COMMTRACE_MODE=mode)
    assert_equal(*(open_run(tmp_path / mode / "log") for mode in MODES))


MPI_CASES: Final = [
    *(
        ("mpi_encoder", [*encoder.COMMON, *encoder.CASES[mode]], False)
        for mode in ("tensor, 3 micro-batches", "model", "gpipe", "1f1b")
    ),
    *(
        ("mpi_sequence_parallel", layer.CASES[attention, True, "mpi"], False)
        for attention in ("all_gather", "ring", "ulysses")
    ),
]


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_calls_of_mpi(mpi: str, mpi_recorder: str, tmp_path: Path) -> None:
    """Summaries equal full logs for the MPI examples and for every kind of mpi4py call."""
    for mode in MODES:
        variables = {"COMMTRACE_MODE": mode, "COMMTRACE_RECORDER": mpi_recorder}
        log = tmp_path / mode
        mpi_launch.succeeds(mpi, "workloads", json.dumps(MPI_CASES), log, ranks=2, limit=150, **variables)
        mpi_launch.succeeds(mpi, "calls", tmp_path / "found", log=log / "calls", **variables)
    for name in (*map(str, range(len(MPI_CASES))), "calls"):
        assert_equal(*(open_run(tmp_path / mode / name) for mode in MODES))
