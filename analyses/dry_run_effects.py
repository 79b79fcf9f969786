"""What a dry run did not do: values that it did not compute, files that it did not write."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

from commtrace.formatting import format_bytes, format_plural
from commtrace.rank_ranges import format_ranks
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.table_reader import Row

_MAX_FILES: Final = 30
"""Number of files that a report lists."""


def uncomputed_values(run: RecordedRun) -> list[str]:
    """Return the lines of the program that read values that were not computed."""
    notices = [row for process in run.processes for row in process.tables.notices]
    texts = (f"{row.get('file')}:{row.get('line')} {row.get('function')}: {row.get('what')}" for row in notices)
    return list(dict.fromkeys(texts))


def unwritten_files(run: RecordedRun) -> list[str]:
    """Return the files that ranks would have changed, each with its ranks; the largest first."""
    ranks: dict[tuple[str, str], list[int]] = defaultdict(list)
    sizes: dict[tuple[str, str], int | None] = {}
    for process in run.processes:
        rank = int(process.tables.process.get("rank") or 0)
        for row in process.tables.writes:
            key = str(row.get("path")), str(row.get("change"))
            ranks[key].append(rank)
            sizes[key] = _larger(sizes.get(key), row)
    ordered = sorted(ranks, key=lambda key: (-(sizes[key] or 0), key))
    texts = [
        f"{path}: {change}{'' if (size := sizes[path, change]) is None else f', {format_bytes(size)}'}, "
        f"by rank {format_ranks(ranks[path, change])}"
        for path, change in ordered[:_MAX_FILES]
    ]
    more = len(ordered) - _MAX_FILES
    return [*texts, f"and {format_plural(more, 'other')}"] if more > 0 else texts


def failures(run: RecordedRun) -> list[str]:
    """Return a sentence for each rank that failed."""
    rows = [process.tables.process for process in run.processes]
    return [
        f"Rank {row.get('rank')} {row['failure']} in the dry run: only its calls until then are known."
        for row in rows
        if row.get("failure")
    ]


def _larger(size: int | None, row: Row) -> int | None:
    value: Any = row.get("bytes")
    return max(size or 0, value) if isinstance(value, int) else size
