"""Matching of the expected and the recorded calls of one step of one rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from fractions import Fraction
from typing import Final

from .call_keys import ANY, SUMMED, CallKey, CellKey
from .own_calls import ACTIVITY_NAMES, is_library_site, is_own
from .run_calls import EqualCalls, StepCalls

_ALIGNED_CALLS: Final = 4_000
"""Longest sequence that is aligned: the time is quadratic."""


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


def match_calls(expected: StepCalls, measured: StepCalls) -> list[Cell]:
    """Match the calls of a step, in any order.

    Returns:
        A cell per parallel dimension and operation that has an expected or a recorded call, sorted.
    """
    cells: dict[CellKey, tuple[list[EqualCalls], list[EqualCalls]]] = defaultdict(lambda: ([], []))
    for side, step in enumerate((expected, measured)):
        for calls in step.calls:
            cells[calls.key.cell][side].append(calls)
    return [_match(key, *sides) for key, sides in sorted(cells.items())]


def _match(key: CellKey, expected: Sequence[EqualCalls], measured: Sequence[EqualCalls]) -> Cell:
    if any(calls.key.payload == SUMMED for calls in measured):
        return _match_sums(key, expected, measured)
    missing = _Missing(expected)
    below_bound = Fraction(0)
    matched_calls = matched_bytes = 0
    sites, unmatched = [], []
    taken = [missing.take_same_origin(calls) for calls in measured]
    for calls, count in sorted(zip(measured, taken, strict=True), key=lambda pair: _priority(pair[0])):
        for pattern in missing.candidates(calls):
            number = missing.take(pattern, calls.calls - count)
            below_bound += number * _wire_difference(pattern, calls.key.payload)
            count += number
        if count:
            matched_calls, matched_bytes = matched_calls + count, matched_bytes + calls.bytes * count // calls.calls
            sites.append(calls.site)
        if calls.calls > count:
            unmatched.append(calls.number(calls.calls - count))
    return Cell(key, matched_calls, matched_bytes, tuple(sites), (*unmatched, *missing.rest()), below_bound)


class _Missing:
    """Expected calls that have not been matched yet."""

    def __init__(self, expected: Sequence[EqualCalls]) -> None:
        self._patterns: dict[CallKey, list[EqualCalls]] = defaultdict(list)
        self._bounds = [calls for calls in expected if calls.min_payload is not None]
        self._left: dict[int, int] = {}
        for calls in expected:
            self._patterns[calls.key].append(calls)
            self._left[id(calls)] = calls.calls

    def take_same_origin(self, calls: EqualCalls) -> int:
        """Match calls with equal ones from the same call site for the same purpose, and return their number."""
        same = (pattern for pattern in self._patterns.get(calls.key, ()) if pattern.origin == calls.origin)
        return sum(self.take(pattern, calls.calls) for pattern in same)

    def take(self, pattern: EqualCalls, most: int) -> int:
        """Match at most this many calls of a pattern, and return their number."""
        count = min(most, self._left[id(pattern)])
        self._left[id(pattern)] -= count
        return count

    def candidates(self, calls: EqualCalls) -> Iterator[EqualCalls]:
        """Yield the expected calls that calls may match: exact ones first, then bounds around them.

        Rules expect calls of an activity, such as a checkpoint, as such: they match no others. Other calls match those
        last.
        """
        yield from self._patterns.get(calls.key, ())
        opened = calls.key._replace(dtype=ANY, reduce_op=ANY, phase=ANY, peer=ANY)
        keys = (opened._replace(group=group) for group in (calls.key.group, ANY))
        patterns = [pattern for key in keys for pattern in self._patterns.get(key, ())]
        of_activities = [pattern for pattern in patterns if pattern.purpose in ACTIVITY_NAMES]
        if calls.purpose in ACTIVITY_NAMES:
            yield from of_activities
            return
        yield from (pattern for pattern in patterns if pattern.purpose not in ACTIVITY_NAMES)
        yield from of_activities
        payload = calls.key.payload
        for bound in self._bounds:
            key, least = bound.key, bound.min_payload or 0
            if key.payload != payload and key.group in (ANY, calls.key.group) and least <= payload <= key.payload:
                yield bound

    def rest(self) -> Iterator[EqualCalls]:
        """Yield the calls that were not matched."""
        for pattern in (calls for same in self._patterns.values() for calls in same):
            if self._left[id(pattern)]:
                yield pattern.number(-self._left[id(pattern)])


def _priority(calls: EqualCalls) -> tuple[bool, bool, bool]:
    """Return the sort key of equal payloads: calls of the training first, then library sites."""
    phase = calls.key.phase
    return is_own(*calls.origin[:2], phase), phase == "evaluation", not is_library_site(calls.site)


def _wire_difference(pattern: EqualCalls, payload: int) -> Fraction:
    """Return the wire bytes of a call minus those of its upper bound. Wire bytes are linear in the payload."""
    if pattern.wire is None or payload == pattern.key.payload:
        return Fraction(0)
    return pattern.wire / pattern.bytes * (payload - pattern.key.payload)


def _match_sums(key: CellKey, expected: Sequence[EqualCalls], measured: Sequence[EqualCalls]) -> Cell:
    """Match by count and total bytes, for calls without payloads: all calls, calls in training, or library calls."""
    count, most = sum(calls.calls for calls in expected), sum(calls.bytes for calls in expected)
    low = sum(calls.bytes if calls.min_payload is None else calls.min_payload * calls.calls for calls in expected)
    wire = sum((calls.wire or Fraction(0) for calls in expected), Fraction(0))
    library_calls = [calls for calls in measured if not is_own(*calls.origin[:2], calls.key.phase)]
    training_calls = [calls for calls in measured if calls.key.phase != "evaluation"]
    for candidates in (measured, training_calls, library_calls):
        total = sum(calls.bytes for calls in candidates)
        if sum(calls.calls for calls in candidates) == count and low <= total <= most:
            below_bound = wire / most * (total - most) if most else Fraction(0)
            rest = tuple(calls for calls in measured if calls not in candidates)
            return Cell(key, count, total, tuple(calls.site for calls in candidates), rest, below_bound)
    return Cell(key, 0, 0, (), (*measured, *(calls.number(-calls.calls) for calls in expected)))


# ---- order -----------------------------------------------------------------------------------------------------------


def moved_calls(a: Sequence[CallKey], b: Sequence[CallKey]) -> Mapping[CallKey, int]:
    """Return the calls that both sequences have outside of their alignment; none for very long sequences."""
    begin = _equal_prefix(a, b)
    a, b = a[begin:], b[begin:]
    end = _equal_prefix(a[::-1], b[::-1])
    a, b = a[: len(a) - end], b[: len(b) - end]
    if max(len(a), len(b)) > _ALIGNED_CALLS:
        return {}
    outside_a: Counter[CallKey] = Counter()
    outside_b: Counter[CallKey] = Counter()
    for tag, from_a, to_a, from_b, to_b in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag != "equal":
            outside_a.update(a[from_a:to_a])
            outside_b.update(b[from_b:to_b])
    return outside_a & outside_b


def _equal_prefix(a: Sequence[CallKey], b: Sequence[CallKey]) -> int:
    """Return how many calls at the beginning are equal."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (key_a, key_b) in pairs if key_a != key_b), min(len(a), len(b)))
