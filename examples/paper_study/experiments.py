"""Experiments and their results: each is run once, in a folder that gets its name when all is there.

logs/study/volume/19M-zero-3-16-...        a result: what the experiment left, and
    experiment.json                        its title, when it ended, and what it took
    output.txt, programs.jsonl             what its programs wrote, and took
logs/study/volume/.19M-...part             one that was interrupted, or failed: run again from the beginning
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
_POLL_SECONDS: Final = 0.02

_stopping: Final = threading.Event()
"""Set while an interrupted study ends what it started."""


class ExperimentError(CommtraceError):
    """A program of an experiment failed."""


@dataclass(frozen=True)
class Cost:
    """What a program, and all that it started and waited for, took."""

    wall_seconds: float
    cpu_seconds: float


# ---- one program -----------------------------------------------------------------------------------------------------


def execute(
    command: Sequence[str], folder: Path, *, environment: Mapping[str, str] | None = None, limit_seconds: float = 1800
) -> Cost:
    """Run a program, its output in `folder`/output.txt; `environment` is added to the process's own.

    It and all that it started are ended when the study is interrupted, or after the limit. Raises ExperimentError with
    the end of its output.
    """
    began = time.monotonic()
    output = folder / OUTPUT
    with output.open("ab") as file:
        process = subprocess.Popen(
            [*command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # What a program says last is then last in the file, whichever of the two streams it says it on.
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,
        )
        try:
            while not (found := os.wait4(process.pid, os.WNOHANG))[0]:
                if _stopping.is_set():
                    raise ExperimentError("interrupted")
                if time.monotonic() - began > limit_seconds:
                    raise ExperimentError(f"not done after {limit_seconds:.0f} s{_end_of(output)}")
                time.sleep(_POLL_SECONDS)
        except BaseException:
            _end(process)
            raise
    process.returncode = status = os.waitstatus_to_exitcode(found[1])
    if status:
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        raise ExperimentError(f"ended {how}{_end_of(output)}")
    cost = Cost(time.monotonic() - began, found[2].ru_utime + found[2].ru_stime)
    with (folder / PROGRAMS).open("a") as file:
        file.write(json.dumps(asdict(cost)) + "\n")
    return cost


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and what it started: first politely, so that it can take away what it wrote and started."""
    for how in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)


def _end_of(file: Path) -> str:
    lines = file.read_bytes().decode(errors="replace").splitlines()[-_LAST_LINES:]
    return "".join(f"\n    {line}" for line in lines)


# ---- experiments -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Holds the results for this process. Raises CommtraceError while another study writes them."""
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CommtraceError(f"{folder}: another study is at work there; wait for it, or name another") from None
        yield


def find_done(experiments: Iterable[Experiment], folder: Path) -> dict[str, Path]:
    """The folders of those that are done, by their keys."""
    places = {one.key: folder / one.key for one in experiments}
    return {key: place for key, place in places.items() if (place / FACTS).is_file()}


def facts(place: Path) -> dict[str, Any]:
    """What experiment.json says: `title`, `command`, `ended` (UTC), `wall_seconds` and `cpu_seconds`."""
    told: dict[str, Any] = json.loads((place / FACTS).read_text())
    return told


def run_missing(
    experiments: Sequence[Experiment],
    folder: Path,
    jobs: int,
    ended: Callable[[Experiment, str | None], None],
) -> dict[str, str]:
    """Run those that are not done, `jobs` at a time, in their order; why each that failed did, by its key.

    `ended` is told of each, with the reason where it failed. An interruption ends all that is under way.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = find_done(experiments, folder)
    missing = [one for one in experiments if one.key not in done]
    failures: dict[str, str] = {}

    def tell(one: Experiment, why: str | None) -> None:
        if why is not None:
            failures[one.key] = why
        ended(one, why)

    _stopping.clear()
    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        try:
            started = {pool.submit(_attempt, one, folder): one for one in missing if not one.alone}
            for future in as_completed(started):
                tell(started[future], future.result())
            for one in missing:
                if one.alone:
                    tell(one, pool.submit(_attempt, one, folder).result())
        except BaseException:
            _stopping.set()
            pool.shutdown(cancel_futures=True)
            raise
    return failures


def _attempt(experiment: Experiment, folder: Path) -> str | None:
    """Run it; why it failed."""
    try:
        _run(experiment, folder)
    except CommtraceError as error:
        return str(error)
    except Exception as error:  # of one experiment, the others go on
        return f"{type(error).__name__}: {error}"
    return None


def _run(experiment: Experiment, folder: Path) -> None:
    part = folder / f".{experiment.key}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    began = time.monotonic()
    experiment.run(part)
    programs = [json.loads(line) for line in _lines(part / PROGRAMS)]
    told = {
        "title": experiment.title,
        "command": experiment.command,
        "ended": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "wall_seconds": round(time.monotonic() - began, 3),
        "cpu_seconds": round(sum(program["cpu_seconds"] for program in programs), 3),
    }
    (part / FACTS).write_text(json.dumps(told, indent=1) + "\n")
    try:
        part.rename(folder / experiment.key)
    except OSError as error:
        raise ExperimentError(f"{folder / experiment.key}: is in the way of the result ({error.strerror})") from error


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
