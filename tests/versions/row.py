"""python row.py FOLDER: what commtrace does with the versions in this interpreter's environment, as FOLDER/result.json.

Every collective with both recorders, cell by cell against the expected rows of test_operators.py; losses of DDP, FSDP2
and ZeRO traced and untraced; the verdict of `commtrace check` on each training; the tests of repeated forward passes
and of mpi4py's calls.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
PROGRAMS = TESTS / "support/hook_programs"
ENGINES = ("ddp", "fsdp2", "0", "1", "2", "3")
PACKAGES = ("torch", "deepspeed", "numpy", "pandas", "mpi4py")
SECONDS = 400
UNTRACED_RUNS = 40  # at most, besides the first
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support")]


def load(path: Path) -> Any:
    """Return a file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(command: Sequence[str | Path], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program. After SECONDS, ends it and all that it started, and raises subprocess.TimeoutExpired."""
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def launch(folder: Path, ranks: int, program: str, *arguments: str, **variables: str | Path) -> list[dict[str, Any]]:
    """Run a program with these variables. Returns what its ranks told."""
    folder.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COMMTRACE")}
    command: list[str | Path] = [
        sys.executable,
        PROGRAMS / "launch.py",
        str(ranks),
        PROGRAMS / f"{program}.py",
        folder,
        *arguments,
    ]
    # LOCAL_SIZE is of DeepSpeed's launcher; without it, DeepSpeed 0.15 asks numactl.
    environment |= {
        "LOCAL_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        **{name: str(variables[name]) for name in variables},
    }
    done = run(command, environment)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        raise RuntimeError((lines or done.stderr.splitlines() or ["no output"])[-1])
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def wrong_cells(folder: Path, recorder: str) -> Iterator[tuple[str, bool | None]]:
    """Yield each case of each rank, and whether it is as expected; None: this torch's gloo does not support it."""
    from hook_programs.runs import Ran, logs

    from commtrace.schema import Flag

    expected = load(TESTS / "ranks/hooks/torch/test_operators.py")
    variables: dict[str, str | Path] = {"COMMTRACE": folder / "log", "COMMTRACE_RECORDER": recorder}
    told = launch(folder, expected.RANKS, "operators", **variables)
    found = logs(folder / "log", recorder)
    # Torch before 2.8 does not tell which collectives are asynchronous.
    blind = any("ASYNC" in text for text in found[0].tables["process"][0]["blind_spots"])
    # The coalescing manager of torch 2.8 to 2.11 makes asynchronous all_gathers whatever it is asked for.
    own_async = {"all_gather_coalesced"} if version("torch").startswith(("2.8.", "2.11.")) else set()
    for rank, each in enumerate(map(Ran, told, found)):
        for name in (*expected.COMMON, *expected.EACH):
            rows, calls = expected.rows(name, rank), each.case(name)
            got = [expected.row(call, row.how) for call, row in zip(calls, rows, strict=False)]
            if blind or name in own_async:
                rows, got = ([row._replace(flags=row.flags & ~Flag.ASYNC) for row in both] for both in (rows, got))
            yield name, None if told[rank][name]["unsupported"] else got == rows and len(calls) == len(rows)


def cells(folder: Path, recorder: str) -> dict[str, Any]:
    """Return numbers of cells, and the names of wrong and of unsupported ones."""
    try:
        states = [*wrong_cells(folder, recorder)]
    except (RuntimeError, AssertionError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)[:300]}
    names = {state: sorted({name for name, own in states if own is state}) for state in (False, None)}
    tried = [state for _, state in states if state is not None]
    return {"right": sum(tried), "of": len(tried), "wrong": names[False], "unsupported": names[None]}


def check(log: Path) -> tuple[int, str]:
    """Return the status and the first line of `commtrace check`."""
    from commtrace.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(["check", str(log), "--width", "400"])
    return status, (out.getvalue() or err.getvalue()).splitlines()[0]


def losses(folder: Path, engines: Sequence[str], **variables: str | Path) -> dict[str, Any]:
    """Return the losses of each training and rank; the error of one that fails."""
    try:
        told = launch(folder, 2, "train", "0", *engines, **variables)
        return {engine: [rank[engine]["losses"] for rank in told] for engine in engines}
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        if len(engines) == 1:
            return {engines[0]: str(error)[:300]}
    alone = [losses(folder / engine, [engine], **variables) for engine in engines]
    return {engine: result for results in alone for engine, result in results.items()}


def trainings(folder: Path, engines: Sequence[str], recorders: Sequence[str]) -> dict[str, Any]:
    """Return by engine whether the losses are equal traced and untraced, and the verdict on each recorder's log."""
    untraced = losses(folder / "untraced", engines)
    found: dict[str, Any] = {name: {"unsupported": text} for name, text in untraced.items() if isinstance(text, str)}
    able = [engine for engine in engines if engine not in found]
    logs = {name: folder / name / "log" for name in recorders}
    traced = {name: losses(folder / name, able, TRAIN_LOGS=logs[name], COMMTRACE_RECORDER=name) for name in recorders}
    # On a busy machine, 1 of 20 trainings of ZeRO-3 has other losses, without commtrace, too: it is repeated until the
    # losses are those of the traced run, or vary.
    results = {engine: [untraced[engine]] for engine in able}
    for engine, number in itertools.product(able, range(UNTRACED_RUNS)):
        vary = len({str(result) for result in results[engine]}) > 1
        if not vary and any(traced[name][engine] not in results[engine] for name in recorders):
            results[engine].append(losses(folder / f"untraced-{engine}-{number}", [engine])[engine])
    return found | {
        engine: {
            "equal": all(traced[name][engine] in results[engine] for name in recorders),
            "untraced_results": len({str(result) for result in results[engine]}),
            "check": {name: check(logs[name] / engine) for name in recorders},
        }
        for engine in able
    }


def mpi() -> dict[str, int]:
    """Return numbers of passed and failed tests of mpi4py's calls: each with one MPI, by both recorders."""
    one = "openmpi" if version("mpi4py") >= "4.1" else "mpich"  # what this version was built for
    return tests("ranks/hooks/mpi/test_mpi.py", "-m", "", "-k", one)  # one MPI is left out by default


def tests(file: str, *options: str) -> dict[str, int]:
    """Return numbers of passed and failed tests of a file."""
    command: list[str | Path] = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, TESTS / file]
    last = (run(command, dict(os.environ)).stdout.splitlines() or [""])[-1]
    return {"passed": 0, "failed": 0, "error": 0} | {
        re.sub("s$", "", outcome): int(number)
        for number, outcome in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)
    }


def versions() -> dict[str, str]:
    """Return the versions of this environment."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def main(folder: Path) -> None:
    """Run everything."""
    recorders = ("python", "native")
    engines = ENGINES if "deepspeed" in versions() else ENGINES[:2]
    result = {
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "cells": {recorder: cells(folder / "operators" / recorder, recorder) for recorder in recorders},
        "trainings": trainings(folder / "trainings", engines, recorders),
        "recomputation": tests("unit/hooks/torch/test_recomputation.py"),
        "mpi": mpi(),
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
