"""Tables of a process as JSON lines: the rows that records refer to by id, and the facts of a run.

`LogWriter` writes the lines to the log.

Format: docs/reference/log-format.md.

A sample of what a process writes:

    {"table": "process", "format": "commtrace", "version": 2, "run": "20261121-045421-3f9a1c", "rank": 0, ...}
    {"table": "kinds", "id": 1, "op": "all_reduce", "variant": "allreduce_", "api": "torch", "dtype": "float32", ...}
    {"table": "groups", "id": 1, "ranks": "0-1", "name": "0", "desc": "default_pg", "index": 0, "backend": "gloo"}
    {"table": "sites", "id": 1, "file": "/home/me/train.py", "line": 31, "function": "main"}
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Hashable
from typing import Any

from .ring import Ring


class TableLines:
    """The tables of one process. Rows are numbered from 1 in each table. Thread-safe."""

    def __init__(self, ring: Ring | None = None) -> None:
        """Make empty tables. A ring also keeps their lines, in case that the process is killed."""
        self._ring = ring
        self._lock = threading.RLock()  # reentrant: a signal handler may communicate
        self.numbers: dict[tuple[str, Hashable], int] = {}
        """Ids by table and key of the row."""
        self._last: dict[str, int] = {}
        self.lookups = 0
        """Number of rows added and frames classified so far: a call during which it grows is a first call."""
        self.lines: list[bytes] = []
        """All lines so far, in order; the drain thread writes them to the log."""

    def add(self, table: str, **row: Any) -> None:
        """Append a row."""
        line = json.dumps({"table": table, **row}, default=str).encode() + b"\n"
        with self._lock:
            if self._ring is not None:
                self._ring.keep_table_line(line)
            self.lines.append(line)

    def row_id(self, table: str, key: Hashable, row: Callable[[], dict[str, Any]]) -> int:
        """Return the id of the row with this key; if there is none, add the one that `row` returns."""
        number = self.numbers.get((table, key))
        if number is None:
            with self._lock:
                number = self.numbers.get((table, key))
                if number is None:
                    number = self.new(table, row())
                    self.numbers[table, key] = number
        return number

    def new(self, table: str, row: dict[str, Any]) -> int:
        """Append a row under the table's next id, and return the id."""
        with self._lock:
            self.lookups += 1
            number = self._last[table] = self._last.get(table, 0) + 1
            self.add(table, id=number, **row)
            return number

    def forked(self) -> None:
        """Replace the lock in a forked child: another thread may have held it."""
        self._lock = threading.RLock()
