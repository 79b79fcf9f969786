"""Starting a program of this folder, and its log as plain rows."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processes

from commtrace.schema import Clock, Flag, Phase, State

FOLDER = Path(__file__).parent


def launch(
    program: str, *arguments: object, log: Path | None, ranks: int = 2, deepspeed: bool = False, **variables: object
) -> str:
    """Run a program to its good end, traced into `log` if that is given. What its ranks wrote to stderr."""
    settings = {} if log is None else {"COMMTRACE": log}
    needs = {"LAUNCH_DEEPSPEED": 1, "DS_ACCELERATOR": "cpu"} if deepspeed else {}
    command: list[str | Path] = [
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
        ranks: list[int] = self.group["ranks"]
        return ranks


class Log:
    """The log of one rank."""

    def __init__(self, left: processes.Left) -> None:
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


def logs(directory: Path) -> list[Log]:
    """By rank. Whatever a test looks for, no hook may have failed and nothing may be missing."""
    found = [Log(left) for left in processes.read_all(directory)]
    for log in found:
        assert log.stats["hook_errors"] == 0, log.stats["first_error"]
        assert log.stats["dropped"] == log.stats["lost"] == 0
        assert "end" in log.tables
    return found


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
_folders: list[tempfile.TemporaryDirectory[str]] = []  # until the tests end


@functools.cache
def training(*, traced: bool) -> Training:
    """All engines, one after the other, on two ranks; under the profiler where traced. Run once for all tests."""
    _folders.append(tempfile.TemporaryDirectory())
    folder = Path(_folders[-1].name)
    log = folder / "log" if traced else None
    launch("train", folder, int(traced), *ENGINES, log=log, deepspeed=True)
    return Training(folder, logs(folder / "log") if traced else [])
