"""Verdict on a run: what differs from the expected calls, merged over ranks and steps with the same differences.

A cell is one operation of one parallel dimension in one step of one rank. It agrees if all of its calls match. If the
order of gradients and modules determines how many calls carry the same bytes (`calls_max` of the table `expected`),
their number only has to be within that bound. With a tolerance above 0, only the payload is compared.

Extra calls are the program's own, or of its activities, if their purpose says so (`own_calls`). If no purpose was
recorded, they are if no library with rules made them and no expected call of the cell is missing; otherwise they may
replace expected calls. Calls in a group of one rank, which send nothing, are listed with them.
Expected calls that may be missing from the log alone are not compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, TypeAlias

import numpy as np
import pandas as pd

from commtrace.analyses.grouping import Array
from commtrace.rank_ranges import format_ranks
from commtrace.reading.labels import NOT_RECORDED
from commtrace.statements import RankList, Statement, merge_texts

from .call_keys import CallKey, CellKey
from .causes import ENDS_WITHIN, SPLIT_DIFFERENTLY, purpose_label
from .compared_ranks import Comparison, EqualRanks
from .own_calls import EVALUATION, OwnCalls, OwnKey, OwnRow, is_own, sum_own_calls
from .run_calls import EqualCalls
from .step_differences import ComparedStep, DifferenceRow, Differences, ExplainedCalls, Lines, differences
from .step_matching import Cell

COLUMNS: Final = (
    "kind", "ranks", "steps", *CallKey._fields, "calls_a", "calls_b", "sites_a", "sites_b", "difference_bytes", "cause",
    "purpose",
)  # fmt: skip

_Volume: TypeAlias = tuple[int, int]
"""Calls, and their payload bytes."""


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison of the expected calls (a) with those of a run (b)."""

    table: pd.DataFrame
    """COLUMNS: per rank and step, how often a call is in a and in b, where that differs; merged
    over ranks and steps. Kinds: "calls": calls with different counts; "order": equal calls in
    another order; "rank": all calls of ranks that only one run has; "site": equal calls from
    different functions."""
    compared: tuple[frozenset[int], frozenset[int]]
    """Ranks and steps that were compared; start-up is step -1."""
    differing: tuple[frozenset[int], frozenset[int]]
    """Ranks and steps that differ."""
    volumes: tuple[_Volume, _Volume]
    """Calls and payload bytes of what was compared, in a and in b."""
    not_compared: tuple[str, ...]
    """Why parts could not be compared: sentences without their full stop."""
    own: Mapping[OwnKey, OwnCalls]
    """Calls of the program itself and of its activities, which are not compared."""
    notes: tuple[str, ...] = ()
    """What limits the comparison without being a fault of either run."""
    settings: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Settings that differ."""

    @property
    def equal(self) -> bool:
        """Whether nothing that was compared differs; call sites do not count."""
        return not (self.table["kind"] != "site").any()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was compared: no step of any rank, or no recorded call where parts could not be compared."""
        ranks, steps = self.compared
        return self.equal and not (ranks and steps and (self.volumes[1][0] or not self.not_compared))

    @property
    def agrees(self) -> bool:
        """Whether all calls of every rank were compared, and nothing differs."""
        return self.equal and not self.not_compared


def judge(
    comparison: Comparison,
    not_compared: Iterable[str],
    *,
    strict: bool = True,
    tolerance: Fraction = Fraction(0),
    rank_rows: Iterable[tuple[Any, ...]] = (),
    **others: Any,
) -> Verdict:
    """Return the verdict on a run.

    Args:
        comparison: Its comparison with the expected calls.
        not_compared: Why parts could not be compared.
        strict: Whether only declared calls are the program's own.
        tolerance: Share of the expected payload of a cell by which the recorded payload may differ.
        rank_rows: Rows of the table for ranks that only one run has.
        **others: Further attributes of the verdict.
    """
    expected, measured = comparison.runs
    lines = expected.lines, measured.lines
    judged = [_judge_step(step, lines, tolerance, strict=strict) for step in comparison.steps]
    sums = _Sums(judged)
    for equal_ranks in comparison.ranks:
        sums.add(equal_ranks)
    steps = np.unique(np.concatenate([np.zeros(0, np.int64), *(equal.pairs.steps for equal in comparison.ranks)]))
    return Verdict(
        pd.DataFrame([*rank_rows, *_merged(sums.places)], columns=[*COLUMNS]),
        (frozenset(rank for equal in comparison.ranks for rank in equal.ranks), frozenset(steps.tolist())),
        (frozenset(sums.differing[0]), frozenset(sums.differing[1])),
        ((sums.volumes[0], sums.volumes[1]), (sums.volumes[2], sums.volumes[3])),
        (*not_compared, *_with_ranks(", ", sums.gaps)),
        {**measured.own, **sum_own_calls(sums.own)},
        **others,
    )


# ---- one step --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _JudgedStep:
    differences: Sequence[Differences]
    volumes: tuple[int, int, int, int]
    """Calls and payload bytes that were compared, expected and recorded."""
    own: Sequence[EqualCalls]
    """The program's own calls."""
    incomplete: frozenset[str]
    """Causes of expected calls that may be missing from the log alone."""

    @property
    def differs(self) -> bool:
        """Whether anything but call sites differs."""
        return any(row.kind != "site" for rows in self.differences for row in rows)


def _judge_step(step: ComparedStep, lines: tuple[Lines, Lines], tolerance: Fraction, *, strict: bool) -> _JudgedStep:
    unmatched: dict[CellKey, list[ExplainedCalls]] = defaultdict(list)
    for cause, calls in step.explained:
        unmatched[calls.key.cell].append((cause, calls))
    own: list[EqualCalls] = []
    differing: list[ExplainedCalls] = []
    for cell in step.cells:
        of_cell = unmatched[cell.key]
        is_short = any(calls.calls < 0 for _, calls in of_cell)
        program = [] if strict else [calls for _, calls in of_cell if _is_own(calls, is_short=is_short)]
        own += program
        rest = [(cause, calls) for cause, calls in of_cell if calls not in program]
        if not _agrees(cell, rest, tolerance, step.expected.max_calls.get(cell.key)):
            differing += rest
    if step.context.log_ends_within:  # calls may be missing, also before those that are too many
        differing = [(ENDS_WITHIN, calls) for _, calls in differing]
    incomplete = frozenset(cause for cause, _ in differing if step.context.is_incomplete(cause))
    shown = [(cause, calls) for cause, calls in differing if cause not in incomplete]
    number, size = step.measured.volume
    compared = number - sum(calls.calls for calls in own), size - sum(calls.bytes for calls in own)
    return _JudgedStep(
        differences(step, shown, lines),
        (*step.expected.volume, *compared),
        [*step.measured.declared, *own],
        incomplete,
    )


def _is_own(calls: EqualCalls, *, is_short: bool) -> bool:
    """Return whether calls are the program's own. In a short cell, those of unknown purpose may replace others."""
    if calls.calls < 0 or (is_short and calls.purpose == NOT_RECORDED):
        return False
    return (
        is_own(calls.site, calls.purpose, calls.key.phase) or calls.key.phase == EVALUATION or calls.key.role == "self"
    )


def _agrees(cell: Cell, rest: Sequence[ExplainedCalls], tolerance: Fraction, most: int | None) -> bool:
    """Return whether a cell agrees.

    Args:
        cell: The cell.
        rest: Its unmatched calls that are not the program's own.
        tolerance: Share of the expected payload by which the recorded payload may differ.
        most: The most calls in any order of gradients and modules; None if their number is certain.
    """
    difference = sum(calls.bytes for _, calls in rest)
    if tolerance:
        missing_bytes = -sum(calls.bytes for _, calls in rest if calls.calls < 0)
        return abs(difference) <= tolerance * (cell.matched_bytes + missing_bytes)
    if rest and most is not None:
        measured_calls = cell.matched_calls + sum(calls.calls for _, calls in rest if calls.calls > 0)
        return difference == 0 and 0 < measured_calls <= most and all(cause == SPLIT_DIFFERENTLY for cause, _ in rest)
    return not rest


# ---- all ranks and steps ---------------------------------------------------------------------------------------------


class _Sums:
    """What was found in the steps of ranks, added up over their ranks and steps."""

    def __init__(self, judged: Sequence[_JudgedStep]) -> None:
        self._judged = judged
        self.places: dict[tuple[Differences, bytes], tuple[list[int], Array]] = {}
        """Ranks and steps of each difference; ranks with the same steps share an entry."""
        self.differing: tuple[set[int], set[int]] = set(), set()
        self.volumes = [0, 0, 0, 0]
        self.own: list[OwnRow] = []
        self.gaps: dict[str, list[int]] = defaultdict(list)
        """Ranks by text on their steps that are not in the log completely."""

    def add(self, equal_ranks: EqualRanks) -> None:
        """Add ranks whose steps are compared alike."""
        ranks = equal_ranks.ranks
        steps_of: dict[Differences, list[Array]] = defaultdict(list)
        for index, steps in equal_ranks.steps_by_comparison().items():
            step = self._judged[index]
            for at, number in enumerate(step.volumes):
                self.volumes[at] += number * len(steps) * len(ranks)
            if step.differs:
                self.differing[0].update(ranks)
                self.differing[1].update(steps.tolist())
            for content in step.differences:
                steps_of[content].append(steps)
            for calls in step.own:
                numbers = calls.calls * len(steps), calls.bytes * len(steps)
                self.own += [(_origin(calls), rank, *numbers) for rank in ranks]
            for cause in step.incomplete:
                self.gaps[f"{format_steps(steps.tolist())}: {cause}"] += ranks
        for content, parts in steps_of.items():
            places = np.sort(np.concatenate(parts))
            self.places.setdefault((content, places.tobytes()), ([], places))[0].extend(ranks)


def _origin(calls: EqualCalls) -> OwnKey:
    alone = " (in a group of one rank, sends nothing)" if calls.key.role == "self" else ""
    return purpose_label(calls) or NOT_RECORDED, f"{calls.site}{alone}", calls.key.op


def _merged(places: Mapping[tuple[Differences, bytes], tuple[list[int], Array]]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of the table, sorted by their first step and rank."""
    ordered = sorted(places.items(), key=lambda item: (item[1][1][0], min(item[1][0]), item[0][0][0].key))
    for (content, _), (ranks, steps) in ordered:
        for row in content:
            yield table_row(row, format_ranks(ranks), format_steps(steps.tolist()))


def table_row(row: DifferenceRow, ranks: str, steps: str) -> tuple[Any, ...]:
    """Return a row of the table, with COLUMNS."""
    kind, key, *numbers = row
    return (kind, ranks, steps, *key, *numbers)


def format_steps(steps: Iterable[int]) -> str:
    """Return steps as text: "start-up and step 0-4"."""
    numbers = {*steps}
    training = format_ranks(step for step in numbers if step >= 0)
    return " and ".join(["start-up"] * (-1 in numbers) + [f"step {training}"] * bool(training))


def sentences_of_ranks(ranks_by_text: Mapping[str, Sequence[int]], compared: Iterable[int]) -> Iterator[str]:
    """Yield each sentence with its ranks, unless these are all compared ranks."""
    everyone = {*compared}
    for text, ranks in merge_texts(ranks_by_text).items():
        yield text if {*ranks} == everyone and len(ranks) > 1 else of_ranks(ranks, text)


def of_ranks(ranks: Iterable[int], text: str, separator: str = ": ") -> Statement:
    """Return a sentence with its ranks before it."""
    return Statement.joined(separator, (Statement("rank {}", RankList.of(ranks)), text))


def _with_ranks(separator: str, ranks_by_text: Mapping[str, Sequence[int]]) -> Iterator[str]:
    return (of_ranks(ranks, text, separator) for text, ranks in merge_texts(ranks_by_text).items())
