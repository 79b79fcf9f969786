"""Starting a program of this folder, and its log as plain rows.

Each program runs once with each recorder, for all tests that look at it.
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
    """Run a program to its good end, traced into `log` if that is given. What its ranks wrote to stderr.

    `before` is a command that runs the command given behind it.
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
    """One record, its numbers resolved."""

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
    t_end: int
    file: str
    line: int
    function: str

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
        times = ("t_begin", "t_return", "t_wait", "t_end")
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
        )

    def between(self, begin: int, end: int) -> list[Call]:
        """Calls begun within these times."""
        return [call for call in self.calls if begin <= call.t_begin < end]


def logs(directory: Path, recorder: str) -> list[Log]:
    """By rank. Whatever a test looks for, this recorder recorded, no hook failed, and nothing is missing."""
    found = [Log(left) for left in processes.read_all(directory)]
    for log in found:
        assert log.tables["process"][0]["recorder"] == recorder
        assert log.stats["hook_errors"] == 0, log.stats["first_error"]
        assert log.stats["dropped"] == log.stats["lost"] == 0
        assert "end" in log.tables
    return found


class Ran(NamedTuple):
    """What one rank of a program told, and its log."""

    told: dict[str, Any]
    log: Log

    def case(self, name: str) -> list[Call]:
        """The calls of one case of the program."""
        return self.log.between(self.told[name]["begin"], self.told[name]["end"])

    def section(self, name: str, until: str) -> list[Call]:
        """The calls between two marks of the program."""
        return self.log.between(self.told[name], self.told[until])


_folders: list[tempfile.TemporaryDirectory[str]] = []  # until the tests end


def new_folder() -> Path:
    """Kept until the tests end."""
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
    """By rank. The program is given a folder, into which each rank writes what it has to tell, as `rankN.json`."""
    folder = new_folder()
    launch(
        program, folder, *arguments,
        log=folder / "log", recorder=recorder, ranks=ranks, deepspeed=deepspeed, before=before,
    )  # fmt: skip
    told = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return [Ran(*each) for each in zip(told, logs(folder / "log", recorder), strict=True)]


def null_work(recorder: str) -> list[Ran]:
    """The program on a backend of its own."""
    return ran("null_work", recorder, str(null_work_folder()), ranks=1)


def null_work_folder() -> Path:
    """Where the backend that gives no Work is compiled; skips the test where that is impossible."""
    return extension_folder("null_work_backend.cpp")


def extension_folder(source: str) -> Path:
    """Where a C++ file of this folder is compiled; skips the test where that is impossible.

    It is kept between runs of the tests: compiling takes half a minute. ninja compiles again where a path differs.
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
    """What `train.py` left: its folder, and the log of each rank (none where it ran untraced)."""

    folder: Path
    logs: list[Log]

    def told(self, rank: int) -> dict[str, dict[str, Any]]:
        """What a rank wrote of each engine: times and losses."""
        told: dict[str, dict[str, Any]] = json.loads((self.folder / f"rank{rank}.json").read_text())
        return told

    def calls(self, rank: int, engine: str) -> list[Call]:
        """The calls of one training."""
        section = self.told(rank)[engine]
        return self.logs[rank].between(section["begin"], section["end"])


ENGINES = ("ddp", "0", "1", "2", "3")


@functools.cache
def training(recorder: str | None) -> Training:
    """All engines, one after the other, on two ranks; under the profiler where traced (None: untraced)."""
    folder = new_folder()
    log = None if recorder is None else folder / "log"
    launch("train", folder, int(recorder is not None), *ENGINES, log=log, recorder=recorder or "", deepspeed=True)
    return Training(folder, [] if log is None or recorder is None else logs(log, recorder))
