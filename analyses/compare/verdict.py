"""Verdict on a run: what differs from the expected calls, merged over ranks and steps with the same differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import pandas as pd

from commtrace.analyses.grouping import Array
from commtrace.formatting import format_ranks, merge_texts

from .call_keys import CallKey
from .own_calls import OwnCalls
from .step_comparison import DifferenceRow, Differences

COLUMNS: Final = (
    "kind", "ranks", "steps", *CallKey._fields, "calls_a", "calls_b", "sites_a", "sites_b", "difference_bytes", "cause",
)  # fmt: skip

Volume: TypeAlias = tuple[int, int]
"""Calls, and their payload bytes."""


@dataclass(frozen=True)
class JudgedStep:
    """What differs in a step, and the volumes of the expected and the recorded calls that were compared."""

    differences: Sequence[Differences]
    volumes: tuple[Volume, Volume]

    @property
    def differs(self) -> bool:
        """Whether anything but call sites differs."""
        return any(row.kind != "site" for rows in self.differences for row in rows)


@dataclass(frozen=True, eq=False)
class EqualRanks:
    """Ranks whose steps are compared alike.

    Attributes:
        ranks: The ranks.
        steps: Numbers of the compared steps, int64, shape (n,), ascending.
        compared: Number of the comparison of each step, int64, shape (n,).
    """

    ranks: list[int]
    steps: Array
    compared: Array

    def steps_by_number(self) -> dict[int, Array]:
        """Return the steps of each number in `compared`."""
        order = np.argsort(self.compared, kind="stable")
        numbers, begins = np.unique(self.compared[order], return_index=True)
        return dict(zip(numbers.tolist(), np.split(self.steps[order], begins[1:]), strict=False))


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
    volumes: tuple[Volume, Volume]
    """Calls and payload bytes of what was compared, in a and in b."""
    not_compared: tuple[str, ...]
    """Why parts could not be compared: sentences without their full stop."""
    notes: tuple[str, ...] = ()
    """What limits the comparison without being a fault of either run."""
    settings: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Settings that differ."""
    own: Mapping[tuple[str, str], OwnCalls] = field(default_factory=dict)
    """The program's own calls, which are not compared, by call site and operation."""

    @property
    def equal(self) -> bool:
        """Whether nothing that was compared differs; call sites do not count."""
        return not (self.table["kind"] != "site").any()

    @property
    def agrees(self) -> bool:
        """Whether all calls of every rank were compared, and nothing differs."""
        return self.equal and not self.not_compared


def judge_run(
    classes: Sequence[EqualRanks],
    judged: Sequence[JudgedStep],
    not_compared: Iterable[str],
    rank_rows: Iterable[tuple[Any, ...]] = (),
    **others: Any,
) -> Verdict:
    """Return the verdict on a run.

    Args:
        classes: The ranks that were compared.
        judged: The comparisons of steps by their numbers.
        not_compared: Why parts could not be compared.
        rank_rows: Rows of the table for ranks that only one run has.
        **others: Further attributes of the verdict.
    """
    places: dict[Differences, list[tuple[Sequence[int], Array]]] = defaultdict(list)
    differing: tuple[set[int], set[int]] = set(), set()
    volumes = np.zeros((2, 2), object)  # Python's integers have no limit
    for same in classes:
        for number, steps in same.steps_by_number().items():
            step = judged[number]
            volumes += np.array(step.volumes, object) * (len(steps) * len(same.ranks))
            if step.differs:
                differing[0].update(same.ranks)
                differing[1].update(steps.tolist())
        by_content: dict[Differences, list[Array]] = defaultdict(list)
        for number, steps in same.steps_by_number().items():
            for content in judged[number].differences:
                by_content[content].append(steps)
        for content, parts in by_content.items():
            places[content].append((same.ranks, np.sort(np.concatenate(parts))))
    ranks = frozenset(rank for same in classes for rank in same.ranks)
    steps = np.unique(np.concatenate([np.zeros(0, np.int64), *(same.steps for same in classes)]))
    (calls_a, bytes_a), (calls_b, bytes_b) = volumes.tolist()
    return Verdict(
        pd.DataFrame([*rank_rows, *_merged(places)], columns=[*COLUMNS]),
        (ranks, frozenset(steps.tolist())),
        (frozenset(differing[0]), frozenset(differing[1])),
        ((calls_a, bytes_a), (calls_b, bytes_b)),
        tuple(not_compared),
        **others,
    )


def _merged(places: Mapping[Differences, Sequence[tuple[Sequence[int], Array]]]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of the table, sorted by their first step and rank."""
    merged: dict[tuple[Differences, bytes], tuple[list[int], Array]] = {}
    for content, where in places.items():
        for ranks, steps in where:
            merged.setdefault((content, steps.tobytes()), ([], steps))[0].extend(ranks)
    ordered = sorted(merged.items(), key=lambda item: (item[1][1][0], min(item[1][0]), item[0][0][0].key))
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
        yield text if {*ranks} == everyone and len(ranks) > 1 else f"rank {format_ranks(ranks)}: {text}"
