"""Matching of expected and recorded calls of one step of one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

from commtrace.theory import ExpectedCall
from commtrace.theory.expected_calls import exact_wire_bytes

from .causes import is_framework_call, is_framework_site
from .counted_calls import EqualCalls

CellKey: TypeAlias = tuple[str, str]
"""Parallel dimension and operation."""

ExpectedCounts: TypeAlias = dict[tuple[int, int], int]
"""Number of calls by payload and group size; group size 0 stands for the size of the dimension's group."""


@dataclass(frozen=True)
class Cell:
    """One operation of one parallel dimension in one step of one rank: matched and unmatched calls."""

    key: CellKey
    matched_calls: int
    matched_bytes: int
    sites: tuple[str, ...]
    unmatched: tuple[EqualCalls, ...]
    below_bound: Fraction = Fraction(0)
    """Wire bytes minus the upper bound, summed over calls with data-dependent payload; never positive."""


def compare(
    expected: Iterable[ExpectedCall], measured: Iterable[EqualCalls], ranks_of: Callable[[str], int]
) -> list[Cell]:
    """Compare the calls of one step.

    Args:
        expected: The calls that theory expects.
        measured: The recorded calls.
        ranks_of: Function that returns the group size of a parallel dimension.

    Returns:
        A cell per parallel dimension and operation that has an expected or a recorded call, sorted.
    """
    counts: dict[CellKey, ExpectedCounts] = defaultdict(lambda: defaultdict(int))
    least: dict[CellKey, dict[int, int]] = defaultdict(dict)
    for call in expected:
        counts[call.role, call.op][call.payload, call.ranks or 0] += call.calls
        if call.min_payload is not None:
            least[call.role, call.op][call.payload] = call.min_payload
    calls_of: dict[CellKey, list[EqualCalls]] = defaultdict(list)
    for calls in measured:
        calls_of[calls.role, calls.op].append(calls)
    return [
        _match(key, counts[key], calls_of[key], ranks_of(key[0]), least[key]) for key in sorted({*counts, *calls_of})
    ]


def _match(
    key: CellKey, expected: ExpectedCounts, measured: Sequence[EqualCalls], ranks: int, least: Mapping[int, int]
) -> Cell:
    """Match call by call. `ranks` is the size of the dimension's group; `least` maps upper to lower bounds."""
    if any(calls.payload < 0 for calls in measured):
        return _match_sums(key, expected, measured, ranks, least)
    missing = dict(expected)
    below_bound = Fraction(0)
    matched_calls = matched_bytes = 0
    sites, unmatched = [], []
    for calls in sorted(measured, key=_match_priority):
        taken = 0
        for size, group in _candidates(calls, expected, least):
            count = min(calls.calls - taken, missing.get((size, group), 0))
            if count:
                missing[size, group] -= count
                taken += count
                below_bound += count * _wire_difference(key[1], calls.payload, size, group or ranks)
        if taken:
            matched_calls, matched_bytes = matched_calls + taken, matched_bytes + taken * calls.payload
            sites.append(calls.site)
        if calls.calls > taken:
            unmatched.append(_extra(calls, calls.calls - taken))
    unmatched += _missing(key, missing, ranks)
    return Cell(key, matched_calls, matched_bytes, tuple(sites), tuple(unmatched), below_bound)


def _match_priority(calls: EqualCalls) -> tuple[bool, bool, bool]:
    """Return the sort key of equal payloads: framework calls first, then training calls, then framework sites."""
    return not is_framework_call(calls), calls.phase == "evaluation", not is_framework_site(calls.site)


def _candidates(calls: EqualCalls, expected: ExpectedCounts, least: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the expected payloads and groups that calls may match: exact ones first, then bounds around them."""
    yield calls.payload, calls.ranks
    yield calls.payload, 0
    for most, group in expected:
        if most != calls.payload and group in (0, calls.ranks) and least.get(most, most) <= calls.payload <= most:
            yield most, group


def _wire_difference(op: str, size: int, most: int, ranks: int) -> Fraction:
    return Fraction(0) if size == most else exact_wire_bytes(op, size, ranks) - exact_wire_bytes(op, most, ranks)


def _match_sums(
    key: CellKey, expected: ExpectedCounts, measured: Sequence[EqualCalls], ranks: int, least: Mapping[int, int]
) -> Cell:
    """Match by count and total bytes, for calls without payloads: all calls, calls in training, or framework calls."""
    most = sum(size * count for (size, _), count in expected.items())
    low = sum(least.get(size, size) * count for (size, _), count in expected.items())
    framework_calls = [calls for calls in measured if is_framework_call(calls)]
    training_calls = [calls for calls in measured if calls.phase != "evaluation"]
    for candidates in (measured, training_calls, framework_calls):
        total = sum(calls.bytes for calls in candidates)
        if sum(calls.calls for calls in candidates) == sum(expected.values()) and low <= total <= most:
            group = max((size or ranks for _, size in expected), default=ranks)
            sites = tuple(calls.site for calls in candidates)
            rest = tuple(_extra(calls, calls.calls) for calls in measured if calls not in candidates)
            below_bound = _wire_difference(key[1], total, most, group)
            return Cell(key, sum(expected.values()), total, sites, rest, below_bound)
    extras = [_extra(calls, calls.calls) for calls in measured]
    return Cell(key, 0, 0, (), (*extras, *_missing(key, expected, ranks)))


def _extra(calls: EqualCalls, count: int) -> EqualCalls:
    wire = None if calls.wire is None else calls.wire * count / calls.calls
    return replace(calls, calls=count, bytes=calls.bytes * count // calls.calls, wire=wire)


def _missing(key: CellKey, counts: ExpectedCounts, ranks: int) -> Iterator[EqualCalls]:
    for (size, group), count in counts.items():
        if count:
            wire = exact_wire_bytes(key[1], size, group or ranks) * count
            yield EqualCalls(*key, size, -count, -count * size, -wire)
