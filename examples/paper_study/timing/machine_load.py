"""Load of the machine: processor time of other programs while a program ran."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from commtrace.process_setup.processor_limits import usable_cores
from examples.paper_study.experiments import execute

FILE: Final = "machine.json"
_STAT: Final = Path("/proc/stat")
_IDLE: Final = (3, 4)  # idle, and waiting for a disk
_COUNTED: Final = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests are within user and nice


def execute_watched(command: Sequence[str], folder: Path, environment: Mapping[str, str], limit_seconds: float) -> None:
    """Run a program as `execute` does, and write `machine.json` to the folder.

    It has `cores` (usable by the program), `wall_seconds`, `cpu_seconds`, and `others_cores`: how many cores all other
    programs used meanwhile (None if unknown).
    """
    before = busy_seconds()
    cost = execute(command, folder, environment=environment, limit_seconds=limit_seconds)
    after = busy_seconds()
    others = None
    if before is not None and after is not None:
        others = max(0.0, after - before - cost.cpu_seconds) / cost.wall_seconds
    load = {
        "cores": usable_cores(), "wall_seconds": cost.wall_seconds, "cpu_seconds": cost.cpu_seconds,
        "others_cores": others,
    }  # fmt: skip
    (folder / FILE).write_text(json.dumps(load, indent=1) + "\n", encoding="utf-8")


def busy_seconds(stat: Path = _STAT) -> float | None:
    """Return the busy seconds of all processors since boot, including steal time; None if unknown."""
    try:
        with stat.open() as file:
            head, *counts = file.readline().split()
        ticks = [int(count) for count in counts[:_COUNTED]]
    except (OSError, ValueError):
        return None
    if head != "cpu" or len(ticks) < _COUNTED:
        return None
    return sum(count for at, count in enumerate(ticks) if at not in _IDLE) / os.sysconf("SC_CLK_TCK")


def read(folder: Path) -> dict[str, Any]:
    """Read the file that `execute_watched` writes; {} if that is not possible."""
    try:
        document = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
