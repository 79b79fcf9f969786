"""Differences of two runs as text: one paragraph per ranks, steps and group with the same differences."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from commtrace.analyses.grouping import rows_of
from commtrace.formatting import MAX_SINGLE, format_bytes, format_plural, format_ranks, shorten_ranks

from .call_differences import RunDifferences, format_steps
from .call_keys import OBJECTS
from .run_calls import OwnCalls

MAX_PARAGRAPHS: Final = 40
MAX_ROWS: Final = 40

_INDENT: Final = " " * 4
_MAX_RANGES: Final = 8


def difference_lines(differences: RunDifferences, names: tuple[str, str], width: int) -> Iterator[str]:
    """Yield the differences, what could not be compared, and the settings that differ.

    Args:
        differences: The result of the comparison.
        names: Labels of the two runs.
        width: Characters of the longest line.
    """
    table = differences.table
    rows_by_place = itertools.groupby(
        rows_of(table.loc[table["kind"] != "site"]), lambda row: (row.ranks, row.steps, row.role, row.group)
    )
    paragraphs = [[*rows] for _, rows in rows_by_place]
    for rows in paragraphs[:MAX_PARAGRAPHS]:
        yield from _paragraph(rows, names, width)
    if len(paragraphs) > MAX_PARAGRAPHS:
        yield f"... and {len(paragraphs) - MAX_PARAGRAPHS:,} more; `commtrace diff --json` has all of them"
    sites = table.loc[table["kind"] == "site", ["sites_a", "sites_b", "calls_a"]]
    for row in rows_of(sites.groupby(["sites_a", "sites_b"], as_index=False).sum()):
        text = f"same calls, different call site: {row.sites_a or 'not recorded'} -> {row.sites_b or 'not recorded'}"
        yield from wrapped(text, width)
    for text in differences.not_compared:
        yield from wrapped(f"not compared: {text}.", width)
    for text in differences.notes:
        yield from wrapped(f"note: {text}.", width)
    if not differences.equal and len(differences.settings):
        yield f"differing settings, a possible cause ({names[0]} -> {names[1]}):"
        for setting in rows_of(differences.settings):
            yield from wrapped(f"{setting.name}: {setting.a} -> {setting.b}", width, _INDENT)


def shortened_lines(lines: Iterable[str], ranks: Iterable[int], *, per_rank: bool) -> Iterator[str]:
    """Yield the lines. Above MAX_SINGLE ranks, shorten lists of ranks, unless `per_rank`."""
    return iter(lines) if per_rank or len({*ranks}) <= MAX_SINGLE else map(shorten_ranks, lines)


def compared_lines(differences: RunDifferences, width: int) -> Iterator[str]:
    """Yield what was compared, and in which ranks and steps something differs."""
    ranks, steps = differences.compared
    if not steps:
        yield "no step of any rank could be compared"
        return
    (calls_a, bytes_a), (calls_b, bytes_b) = differences.volumes
    where = f"compared: {_place(ranks, steps)}, "
    if not any(differences.differing):
        yield from wrapped(f"{where}{format_plural(calls_b, 'call')} of {format_bytes(bytes_b)}", width)
        return
    yield from wrapped(f"{where}calls {calls_a:,} -> {calls_b:,}, payload {bytes_a:,} -> {bytes_b:,} bytes", width)
    yield from wrapped(f"differing: {_place(*differences.differing)}", width)


def _place(ranks: Iterable[int], steps: Iterable[int]) -> str:
    return f"{_short(format_steps(steps))} of rank {_short(format_ranks(ranks))}"


def own_lines(own: Mapping[tuple[str, str], OwnCalls], width: int) -> Iterator[str]:
    """Yield lines that list the program's own calls."""
    if own:
        yield "calls of the program itself:"
    for (site, op), calls in sorted(own.items()):
        volume = f"{format_plural(calls.calls, op, op)}, {format_plural(calls.payload_bytes, 'byte')}"
        text = f"{site or 'call site not recorded'}: {volume}, rank {format_ranks(calls.ranks)}"
        yield from wrapped(text, width, _INDENT)


def own_volume(own: Iterable[OwnCalls]) -> str:
    """Return the number and bytes of the program's own calls: "12 calls, 48 bytes"."""
    calls = [*own]
    numbers = sum(item.calls for item in calls), sum(item.payload_bytes for item in calls)
    return f"{format_plural(numbers[0], 'call')}, {format_plural(numbers[1], 'byte')}"


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return the lines of a text; further lines are indented below the first."""
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent + _INDENT, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def _short(ranges: str) -> str:
    """Shorten a list of many ranges: "0,2,4,...,98 (50 ranges)"."""
    items = ranges.split(",")
    return ranges if len(items) <= _MAX_RANGES else f"{','.join(items[:3])},...,{items[-1]} ({len(items):,} ranges)"


def _paragraph(rows: list[Any], names: tuple[str, str], width: int) -> Iterator[str]:
    first = rows[0]
    if first.kind == "rank":
        run, calls = (names[0], first.calls_a) if first.calls_a else (names[1], first.calls_b)
        yield f"rank {_short(first.ranks)}: only in {run}, {format_plural(calls, 'call')}"
        return
    yield f"rank {_short(first.ranks)}, {_short(first.steps)}, {_group(first)}:"
    by_site = sorted(rows, key=lambda row: (row.kind, _sites(row)))
    for sites, same in itertools.groupby(by_site[:MAX_ROWS], _sites):
        if sites:
            yield from wrapped(f"from {sites}", width, "  ")
        for row in same:
            yield from wrapped(_row(row), width, _INDENT)
    if len(rows) > MAX_ROWS:
        yield f"{_INDENT}... and {len(rows) - MAX_ROWS:,} more"


def _sites(row: Any) -> str:
    return str(row.sites_b if row.calls_b > row.calls_a else row.sites_a)


def _row(row: Any) -> str:
    if row.kind == "order":
        return f"~ {_calls(row.calls_a, row)}, in another order" if row.calls_a else "~ same calls, in another order"
    change = f" ({row.calls_a:,} -> {row.calls_b:,})" if row.calls_a and row.calls_b else ""
    return f"{'+' if row.calls_b > row.calls_a else '-'} {_calls(abs(row.calls_b - row.calls_a), row)}{change}"


def _calls(number: int, row: Any) -> str:
    size = "pickled objects" if row.payload == OBJECTS else format_plural(row.payload, "byte")
    elements = " ".join(label for label in (row.dtype, row.reduce_op) if label != "-")
    texts = (f"{number:,} {row.op} of {size}", elements, row.peer.replace("=", " ").strip("-"), f"in {row.phase}")
    return ", ".join(text for text in texts if text)


def _group(row: Any) -> str:
    if row.group == "-":
        return "group not known"
    size, stride = re.match(r"(\d+)(?:/(\d+))?", row.group).groups()  # type: ignore[union-attr]
    return f"{row.role} group of {format_plural(int(size), 'rank')}" + (f" with stride {stride}" if stride else "")
