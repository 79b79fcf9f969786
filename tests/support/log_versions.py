"""Conversion of logs from version 1 of the format to version 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from commtrace.rank_ranges import format_rank_list


def to_version_2(log: Path) -> None:
    """Rewrite the tables of a log of version 1 in version 2."""
    for path in log.rglob("*.jsonl"):
        rows = [_row(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _row(row: dict[str, Any]) -> dict[str, Any]:
    if row["table"] == "process":
        assert row["version"] == 1
        return {**row, "version": 2}
    return {**row, "ranks": format_rank_list(row["ranks"])} if row["table"] == "groups" else row
