"""A verdict as text: one paragraph per ranks, steps and group with the same differences."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from commtrace.analyses.grouping import rows_of
from commtrace.formatting import MAX_SINGLE, format_bytes, format_plural
from commtrace.rank_ranges import format_ranks, name_ranks, shorten_rank_list
from commtrace.reading.labels import NOT_RECORDED
from commtrace.statements import shortened

from .call_keys import SUMMED, UNCOMPARED_SIZES
from .own_calls import OwnCalls, OwnKey
from .verdict import Verdict, format_steps

MAX_PARAGRAPHS: Final = 40
"""Groups of differences, of equal steps and ranks, that the text shows."""
MAX_ROWS: Final = 40
"""Differing calls of a group that the text shows."""

_INDENT: Final = " " * 4
_MAX_RANGES: Final = 8


def shows_all_ranks(ranks: Iterable[int], *, per_rank: bool) -> bool:
    """Return whether lists of ranks are shown in full: with `per_rank`, or of up to MAX_SINGLE ranks."""
    return per_rank or len({*ranks}) <= MAX_SINGLE


def verdict_lines(
    verdict: Verdict, names: tuple[str, str], width: int, all_differences: str, *, all_ranks: bool = True
) -> Iterator[str]:
    """Yield what could not be compared, what was compared, and the differences.

    Args:
        verdict: The result of the comparison.
        names: Labels of the expected calls and of the run.
        width: Characters of the longest line.
        all_differences: Where all differences are, for the text after the first ones.
        all_ranks: Whether lists of ranks are shown in full.
    """
    yield from _setting_lines(verdict, names, width)
    for text in verdict.not_compared:
        yield from wrapped(f"not compared: {text if all_ranks else shortened(text)}.", width)
    yield from _compared_lines(verdict, width)
    yield from _difference_lines(verdict, names, width, all_differences)
    for text in verdict.notes:
        yield from wrapped(f"note: {text if all_ranks else shortened(text)}.", width)
    yield from _own_lines(verdict.own, width, all_ranks=all_ranks)


def heading(verdict: Verdict, equal: str, different: str, nothing: str) -> str:
    """Return the result in one line: `equal`, `different` or, if `nothing` was compared, that.

    It begins with "partly compared" if that is so, and ends with the volume of the program's own calls.
    """
    if verdict.is_empty:
        return nothing
    text = ("partly compared, " if verdict.not_compared else "") + (equal if verdict.equal else different)
    if verdict.own:
        calls = sum(own.calls for own in verdict.own.values())
        size = sum(own.payload_bytes for own in verdict.own.values())
        text += f"; in addition, {format_plural(calls, 'call')}, {format_plural(size, 'byte')} of the program itself"
    return text


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return the lines of a text; further lines are indented below the first."""
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent + _INDENT, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def _setting_lines(verdict: Verdict, names: tuple[str, str], width: int) -> Iterator[str]:
    """Yield the settings that differ: those that can explain different calls, then those that can change times."""
    settings = verdict.settings
    for explains, rows in settings.groupby("explains") if len(settings) else ():
        what = "settings that can change times" if explains == "times" else "settings"
        cause = ", a possible cause" if explains == "calls" and not verdict.equal else ""
        yield f"differing {what}{cause} ({names[0]} -> {names[1]}):"
        for setting in rows_of(rows):
            of_ranks = f", {name_ranks(setting.ranks)}" if setting.ranks else ""
            yield from wrapped(f"{setting.name}: {setting.a} -> {setting.b}{of_ranks}", width, _INDENT)


def _compared_lines(verdict: Verdict, width: int) -> Iterator[str]:
    """Yield what was compared, and in which ranks and steps something differs."""
    ranks, steps = verdict.compared
    if not steps:
        yield "no step of any rank could be compared"
        return
    (calls_a, bytes_a), (calls_b, bytes_b) = verdict.volumes
    where = f"compared: {_place(ranks, steps)}, "
    if not any(verdict.differing):
        yield from wrapped(f"{where}{format_plural(calls_b, 'call')} of {format_bytes(bytes_b)}", width)
        return
    yield from wrapped(f"{where}calls {calls_a:,} -> {calls_b:,}, payload {bytes_a:,} -> {bytes_b:,} bytes", width)
    yield from wrapped(f"differing: {_place(*verdict.differing)}", width)


def _place(ranks: Iterable[int], steps: Iterable[int]) -> str:
    return f"{_short(format_steps(steps))} of rank {_short(format_ranks(ranks))}"


def _difference_lines(verdict: Verdict, names: tuple[str, str], width: int, all_differences: str) -> Iterator[str]:
    table = verdict.table
    rows_by_place = itertools.groupby(
        rows_of(table.loc[table["kind"] != "site"]), lambda row: (row.ranks, row.steps, row.role, row.group)
    )
    paragraphs = [[*rows] for _, rows in rows_by_place]
    for rows in paragraphs[:MAX_PARAGRAPHS]:
        yield from _paragraph(rows, names, width)
    if len(paragraphs) > MAX_PARAGRAPHS:
        yield f"... and {len(paragraphs) - MAX_PARAGRAPHS:,} more; all are in {all_differences}"
    sites = table.loc[table["kind"] == "site", ["sites_a", "sites_b", "calls_a"]]
    for row in rows_of(sites.groupby(["sites_a", "sites_b"], as_index=False).sum()):
        text = f"same calls, different call site: {row.sites_a or 'not recorded'} -> {row.sites_b or 'not recorded'}"
        yield from wrapped(text, width)


def _paragraph(rows: list[Any], names: tuple[str, str], width: int) -> Iterator[str]:
    first = rows[0]
    if first.kind == "rank":
        run, calls = (names[0], first.calls_a) if first.calls_a else (names[1], first.calls_b)
        yield f"rank {_short(first.ranks)}: only in {run}, {format_plural(calls, 'call')}"
        return
    yield f"rank {_short(first.ranks)}, {_short(first.steps)}, {_group(first)}:"
    by_origin = sorted(rows, key=lambda row: (row.kind, *_origin(row)))
    for (sites, purpose, cause), same in itertools.groupby(by_origin[:MAX_ROWS], _origin):
        if sites:
            yield from wrapped(f"from {sites}", width, "  ")
        if purpose not in ("", NOT_RECORDED):
            yield from wrapped(f"purpose: {purpose}", width, "  ")
        if cause:
            yield from wrapped(f"most likely cause: {cause}", width, "  ")
        for row in same:
            yield from wrapped(_row(row), width, _INDENT)
    if len(rows) > MAX_ROWS:
        yield f"{_INDENT}... and {len(rows) - MAX_ROWS:,} more"


def _origin(row: Any) -> tuple[str, str, str]:
    """Return the call sites of a difference, its purpose and its cause."""
    return str(row.sites_b if row.calls_b > row.calls_a else row.sites_a), str(row.purpose), str(row.cause)


def _row(row: Any) -> str:
    if row.kind == "order":
        return f"~ {_calls(row.calls_a, row)}, in another order" if row.calls_a else "~ same calls, in another order"
    change = f" ({row.calls_a:,} -> {row.calls_b:,})" if row.calls_a and row.calls_b else ""
    return f"{'+' if row.calls_b > row.calls_a else '-'} {_calls(abs(row.calls_b - row.calls_a), row)}{change}"


def _calls(number: int, row: Any) -> str:
    size = UNCOMPARED_SIZES.get(row.payload) or format_plural(row.payload, "byte")
    if row.payload == SUMMED:
        size = f"{format_plural(abs(int(row.difference_bytes)), 'byte')}{' together' * (number > 1)}"
    elements = " ".join(label for label in (row.dtype, row.reduce_op) if label != "-")
    phase = f"in {row.phase}" if row.phase != "-" else ""
    texts = (f"{number:,} {row.op} of {size}", elements, row.peer.replace("=", " ").strip("-"), phase)
    return ", ".join(text for text in texts if text)


def _group(row: Any) -> str:
    size = re.match(r"([1-9]\d*)(?:/(\d+))?", row.group)
    if size is None:
        return "group not known"
    stride = f" with stride {size[2]}" if size[2] else ""
    return f"{row.role} group of {format_plural(int(size[1]), 'rank')}{stride}"


def _own_lines(own: Mapping[OwnKey, OwnCalls], width: int, *, all_ranks: bool) -> Iterator[str]:
    """Yield lines that list the calls of the program itself and of its activities, by purpose."""
    if own:
        yield "calls of the program itself and of its activities, not compared:"
    for purpose, of_purpose in itertools.groupby(sorted(own.items()), lambda item: item[0][0]):
        yield f"  {'purpose ' * (purpose == NOT_RECORDED)}{purpose}"
        for (_, site, op), calls in of_purpose:
            volume = f"{format_plural(calls.calls, op, op)}, {format_plural(calls.payload_bytes, 'byte')}"
            ranks = format_ranks(calls.ranks)
            ranks = ranks if all_ranks else shorten_rank_list(ranks)
            text = f"{site or 'call site not recorded'}: {volume}, rank {ranks}"
            yield from wrapped(text, width, _INDENT)


def _short(ranges: str) -> str:
    """Shorten a list of many ranges: "0,2,4,...,98 (50 ranges)"."""
    items = ranges.split(",")
    return ranges if len(items) <= _MAX_RANGES else f"{','.join(items[:3])},...,{items[-1]} ({len(items):,} ranges)"
