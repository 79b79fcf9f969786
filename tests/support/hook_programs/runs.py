"""Run the programs of this directory, and read their logs as plain rows.

Each program runs once with each recorder, for all tests that use it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import processes
import pytest

from commtrace.rank_ranges import parse_rank_list
from commtrace.schema import Clock, Flag, Phase, State

FOLDER = Path(__file__).parent


def launch(
    program: str,
    *arguments: object,
    log: Path | None,
    recorder: str = "python",
    ranks: int = 2,
    deepspeed: bool = False,
    before: Sequence[str] = (),
    **variables: object,
) -> str:
    """Run a program that must succeed, traced into `log` if that is given, and return its ranks' stderr.

    `before` is a command that runs the command appended to it.
    """
    settings = {} if log is None else {"COMMTRACE": log, "COMMTRACE_RECORDER": recorder}
    needs = {"LAUNCH_DEEPSPEED": 1, "DS_ACCELERATOR": "cpu"} if deepspeed else {}
    command: list[str | Path] = [
        *before,
        sys.executable,
        FOLDER / "launch.py",
        str(ranks),
        FOLDER / f"{program}.py",
        *map(str, arguments),
    ]
    everything: dict[str, Any] = {"PYTHONFAULTHANDLER": 1, **settings, **needs, **variables}
    result = processes.run(command, limit=150, **everything)
    assert result.status == 0, f"status {result.status}\n{result.out[-4000:]}\n{result.err[-8000:]}"
    return result.err


@dataclass(frozen=True)
class Call:
    """One record with its ids resolved."""

    op: str
    variant: str
    dtype: str | None
    reduce_op: str | None
    payload: int
    local: int
    group: dict[str, Any]
    seq: int
    peer: int
    tag: int
    flags: Flag
    batch: int
    state: State
    clock: Clock
    phase: Phase
    step: int
    micro_batch: int
    thread: int
    t_begin: int
    t_return: int
    t_wait: int
    t_start: int
    t_end: int
    file: str
    line: int
    function: str
    purpose: dict[str, Any]

    @property
    def ranks(self) -> list[int]:
        """Global ranks of its group."""
        return parse_rank_list(self.group["ranks"])


class Log:
    """The log of one rank."""

    def __init__(self, left: processes.Left) -> None:
        self.left = left
        self.tables = left.tables
        self.stats = left.stats
        self.calls = [self._call(record) for record in left.records[left.records["t_begin"].argsort()]]

    def _row(self, table: str, number: int) -> dict[str, Any]:
        return next((row for row in self.tables.get(table, ()) if row["id"] == number), {})

    def _call(self, record: Any) -> Call:
        kind, site = self._row("kinds", record["kind"]), self._row("sites", record["site"])
        same = ("payload", "local", "seq", "peer", "tag", "batch", "step", "micro_batch", "thread")
        times = ("t_begin", "t_return", "t_wait", "t_start", "t_end")
        fields: dict[str, Any] = {name: int(record[name]) for name in (*same, *times)}
        return Call(
            **fields,
            **{name: kind[name] for name in ("op", "variant", "dtype", "reduce_op")},
            group=self._row("groups", record["group"]),
            flags=Flag(int(record["flags"])),
            state=State(record["state"]),
            clock=Clock(record["clock"]),
            phase=Phase(record["phase"]),
            file=site.get("file", ""),
            line=site.get("line", 0),
            function=site.get("function", ""),
            purpose=site.get("purpose", {}),
        )

    def between(self, begin: int, end: int) -> list[Call]:
        """Return the calls that began between these times."""
        return [call for call in self.calls if begin <= call.t_begin < end]


def logs(directory: Path, recorder: str) -> list[Log]:
    """Return the logs by rank. Assert that this recorder wrote them, no hook failed, and no record is missing."""
    by_rank = [Log(left) for left in processes.read_all(directory)]
    for log in by_rank:
        assert log.tables["process"][0]["recorder"] == recorder
        assert log.stats["hook_errors"] == 0, log.stats["first_error"]
        assert log.stats["dropped"] == log.stats["lost"] == 0
        assert "end" in log.tables
    return by_rank


class Ran(NamedTuple):
    """What one rank of a program wrote, and its log."""

    told: dict[str, Any]
    log: Log

    def case(self, name: str) -> list[Call]:
        """Return the calls of a case of the program."""
        return self.log.between(self.told[name]["begin"], self.told[name]["end"])

    def section(self, name: str, until: str) -> list[Call]:
        """Return the calls between two marks of the program."""
        return self.log.between(self.told[name], self.told[until])


_folders: list[tempfile.TemporaryDirectory[str]] = []  # kept until the tests end


def new_folder() -> Path:
    """Return a directory that is kept until the tests end."""
    _folders.append(tempfile.TemporaryDirectory())
    return Path(_folders[-1].name)


@functools.cache
def ran(
    program: str,
    recorder: str,
    *arguments: str,
    ranks: int = 2,
    deepspeed: bool = False,
    before: tuple[str, ...] = (),
) -> list[Ran]:
    """Run a program and return its ranks. Each rank writes its results to `rankN.json` in the program's directory."""
    folder = new_folder()
    launch(
        program, folder, *arguments,
        log=folder / "log", recorder=recorder, ranks=ranks, deepspeed=deepspeed, before=before,
    )  # fmt: skip
    told = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return [Ran(*each) for each in zip(told, logs(folder / "log", recorder), strict=True)]


def null_work(recorder: str) -> list[Ran]:
    """Return the ranks of the program `null_work`."""
    return ran("null_work", recorder, str(null_work_folder()), ranks=1)


def null_work_folder() -> Path:
    """Return the build directory of the backend that returns no Work; skip the test if it cannot be compiled."""
    return extension_folder("null_work_backend.cpp")


def extension_folder(source: str) -> Path:
    """Return the build directory of a C++ file of this directory; skip the test if it cannot be compiled.

    It is kept between test runs, because compiling takes half a minute. ninja compiles again if a path differs.
    """
    cpp_extension: Any = pytest.importorskip("torch.utils.cpp_extension")
    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler to build it with")
    if not cpp_extension.is_ninja_available():
        pytest.skip("there is no ninja to build it with")
    torch = pytest.importorskip("torch")
    path = FOLDER / source
    known = (str(path), torch.__file__, torch.__version__, sys.version, path.read_text())
    key = hashlib.sha256("\0".join(known).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"commtrace-tests-{path.stem}-{key}"
    folder.mkdir(exist_ok=True)
    return folder


@dataclass(frozen=True)
class Training:
    """What `train.py` left: its directory, and the log of each rank (none if it ran untraced)."""

    folder: Path
    logs: list[Log]

    def told(self, rank: int) -> dict[str, dict[str, Any]]:
        """Return what a rank wrote about each engine: times and losses."""
        results: dict[str, dict[str, Any]] = json.loads((self.folder / f"rank{rank}.json").read_text())
        return results

    def calls(self, rank: int, engine: str) -> list[Call]:
        """Return the calls of one training."""
        section = self.told(rank)[engine]
        return self.logs[rank].between(section["begin"], section["end"])


ENGINES = ("ddp", "0", "1", "2", "3")


@functools.cache
def training(recorder: str | None) -> Training:
    """Train with each engine in turn on two ranks, with the profiler if `recorder` traces (None: untraced)."""
    folder = new_folder()
    log = None if recorder is None else folder / "log"
    launch("train", folder, int(recorder is not None), *ENGINES, log=log, recorder=recorder or "", deepspeed=True)
    return Training(folder, [] if log is None or recorder is None else logs(log, recorder))
