"""Experiments and their results: each is run once, in a folder that is renamed when the result is complete.

logs/study/volume/19M-zero-3-16-...        a result: the experiment's files, and
    experiment.json                        its title, end and cost
    output.txt, programs.jsonl             output and cost of its programs
logs/study/volume/.19M-...part             interrupted or failed: run again from the beginning
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from commtrace.errors import CommtraceError

from .parts import Experiment

FACTS: Final = "experiment.json"
OUTPUT: Final = "output.txt"
PROGRAMS: Final = "programs.jsonl"
_LOCK: Final = ".lock"
_LAST_LINES: Final = 15
_END_SECONDS: Final = 30  # a dry run ends its ranks on SIGINT, which takes seconds on a busy machine
_POLL_SECONDS: Final = 0.02

_stopping: Final = threading.Event()
"""Set while an interrupted study stops its programs."""


class ExperimentError(CommtraceError):
    """A program of an experiment failed."""


@dataclass(frozen=True)
class StudyCost:
    """Time of a program and the child processes that it waited for."""

    wall_seconds: float
    cpu_seconds: float


# ---- one program -----------------------------------------------------------------------------------------------------


def execute(
    command: Sequence[str], folder: Path, *, environment: Mapping[str, str] | None = None, limit_seconds: float = 1800
) -> StudyCost:
    """Run a program with its output in `folder`/output.txt; `environment` extends the process's own.

    The program and its child processes are stopped when the study is interrupted or the timeout expires. Raises
    ExperimentError with the end of the output.
    """
    began = time.monotonic()
    output = folder / OUTPUT
    with output.open("ab") as file:
        process = subprocess.Popen(
            [*command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # Without buffers, the last output of either stream is last in the file.
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,
        )
        try:
            while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
                if _stopping.is_set():
                    raise ExperimentError("interrupted")
                if time.monotonic() - began > limit_seconds:
                    raise ExperimentError(f"not finished after {limit_seconds:.0f} s{_end_of(output)}")
                time.sleep(_POLL_SECONDS)
        except BaseException:
            _end(process)
            raise
    process.returncode = status = os.waitstatus_to_exitcode(ended[1])
    if status:
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        raise ExperimentError(f"ended {how}{_end_of(output)}")
    cost = StudyCost(time.monotonic() - began, ended[2].ru_utime + ended[2].ru_stime)
    with (folder / PROGRAMS).open("a") as file:
        file.write(json.dumps(asdict(cost)) + "\n")
    return cost


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and its child processes: first by SIGINT, so that it can clean up, then by SIGKILL."""
    for how in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_SECONDS)


def _end_of(file: Path) -> str:
    lines = file.read_bytes().decode(errors="replace").splitlines()[-_LAST_LINES:]
    return "".join(f"\n    {line}" for line in lines)


# ---- experiments -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Lock the results for this process. Raises CommtraceError while another study writes them."""
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CommtraceError(f"{folder}: another study writes there; wait for it, or give another OUT") from None
        yield


def find_done(experiments: Iterable[Experiment], folder: Path) -> dict[str, Path]:
    """Return the folders of finished experiments, by key."""
    folders = {experiment.key: folder / experiment.key for experiment in experiments}
    return {key: result for key, result in folders.items() if (result / FACTS).is_file()}


def read_facts(result: Path) -> dict[str, Any]:
    """Read experiment.json: `title`, `command`, `ended` (UTC), `wall_seconds` and `cpu_seconds`."""
    facts: dict[str, Any] = json.loads((result / FACTS).read_text())
    return facts


def run_missing(
    experiments: Sequence[Experiment],
    folder: Path,
    jobs: int,
    ended: Callable[[Experiment, str | None], None],
) -> dict[str, str]:
    """Run the experiments without a result and return the reason of each failure, by key.

    Args:
        experiments: In the order in which they are started; those with `alone` run after all others.
        folder: Holds the results.
        jobs: Number of concurrent experiments.
        ended: Called at the end of each, with the reason if it failed.

    An interruption ends the running experiments.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = find_done(experiments, folder)
    missing = [experiment for experiment in experiments if experiment.key not in done]
    failures: dict[str, str] = {}

    def record_end(experiment: Experiment, failure: str | None) -> None:
        if failure is not None:
            failures[experiment.key] = failure
        ended(experiment, failure)

    _stopping.clear()
    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        try:
            started = {pool.submit(_attempt, item, folder): item for item in missing if not item.alone}
            for future in as_completed(started):
                record_end(started[future], future.result())
            for experiment in missing:
                if experiment.alone:
                    record_end(experiment, pool.submit(_attempt, experiment, folder).result())
        except BaseException:
            _stopping.set()
            pool.shutdown(cancel_futures=True)
            raise
    return failures


def _attempt(experiment: Experiment, folder: Path) -> str | None:
    """Run an experiment; return the reason if it failed."""
    try:
        _run(experiment, folder)
    except CommtraceError as error:
        return str(error)
    except Exception as error:  # a fault in one experiment must not end the others
        return f"{type(error).__name__}: {error}"
    return None


def _run(experiment: Experiment, folder: Path) -> None:
    part = folder / f".{experiment.key}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    began = time.monotonic()
    experiment.run(part)
    programs = [json.loads(line) for line in _lines(part / PROGRAMS)]
    facts = {
        "title": experiment.title,
        "command": experiment.command,
        "ended": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "wall_seconds": round(time.monotonic() - began, 3),
        "cpu_seconds": round(sum(program["cpu_seconds"] for program in programs), 3),
    }
    (part / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
    try:
        part.rename(folder / experiment.key)
    except OSError as error:
        raise ExperimentError(
            f"{folder / experiment.key}: exists and is not a result; remove it ({error.strerror})"
        ) from error


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
