"""Comparison of the expected and the recorded calls of one step of one rank: what differs, and why."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from commtrace.analyses.table_specs import shared_columns as shared
from commtrace.analyses.table_specs.spec import TableSpec, column, count, text_column, word_column
from commtrace.formatting import format_count

from .call_keys import ANY, UNCOMPARED_SIZES, CallKey
from .causes import UNEXPLAINED, StepContext, explain
from .run_calls import Call, EqualCalls, GroupLabel, StepCalls
from .step_matching import Cell, match_calls, moved_calls

Lines: TypeAlias = Mapping[Call, frozenset[str]]
"""Lines of code that made a call."""

ExplainedCalls: TypeAlias = tuple[str, EqualCalls]
"""Label of a cause, and unmatched calls that it explains."""

NO_KEY: Final = CallKey("-", 0, "-", "-", "-", "-", "-", "-")

CALL_DIFFERENCES: Final = TableSpec("call_differences", "Calls that differ between two runs",
    "A row per call that differs, merged over ranks and steps with the same differences, by first step.", (
    word_column("kind", "kind", '"calls": different number; "order": different order; "rank": all calls of ranks '
        'that only one run has; "site": same calls, different call site.'),
    shared.ranks_column("ranks", "ranks", 'Ranks, such as "0-3,8".'),
    word_column("steps", "steps", 'Steps of the run that has more of them, such as "start-up and 0-4".'),
    shared.OP,
    column("bytes", format_count, "payload", "bytes each", "Payload of each call; -1: pickled objects."),
    word_column("dtype", "type", "Type of the elements."),
    word_column("reduce_op", "reduction", "Reduction."),
    shared.PHASE, shared.ROLE,
    word_column("group", "group", 'Shape of the group: "4/2" is 4 ranks with stride 2.'),
    word_column("peer", "peer", 'For a message "peer=+1", the distance in the group; for a collective "root=0".'),
    count("calls_a", "calls in A", "Calls of a rank and step in the first run; of all ranks, if kind is rank."),
    count("calls_b", "calls in B", "The same in the second run."),
    text_column("sites_a", "call sites in A", "Call sites that make more of these calls in the first run."),
    text_column("sites_b", "call sites in B", "The same in the second run."),
    column("bytes", format_count, "difference_bytes", "difference, bytes",
        "Payload of these calls in B minus A; missing for pickled objects."),
    text_column("cause", "cause", 'Most likely cause of the difference; "" if none is known.'),
    text_column("purpose", "purpose",
        "Why the calls that only one run has were made, as recorded, with their modules, units, buckets or stages."),
), merge_by="ranks")  # fmt: skip


class DifferenceRow(NamedTuple):
    """A row of the table `call_differences`, without ranks and steps."""

    kind: Literal["calls", "order", "rank", "site"]
    key: CallKey
    calls_a: int
    calls_b: int
    sites_a: str = ""
    sites_b: str = ""
    difference_bytes: int | None = 0
    cause: str = ""
    purpose: str = ""


Differences: TypeAlias = tuple[DifferenceRow, ...]
"""The differences in one group of one step."""


@dataclass(frozen=True, eq=False)
class ComparedStep:
    """The comparison of a step of a rank.

    Attributes:
        measured: The recorded calls.
        context: The expected calls, and what causes depend on.
        cells: The matched and unmatched calls of each cell.
        explained: The unmatched calls of all cells, with their causes.
    """

    measured: StepCalls
    context: StepContext
    cells: Sequence[Cell]
    explained: Sequence[ExplainedCalls]

    @property
    def expected(self) -> StepCalls:
        """The expected calls."""
        return self.context.expected


def compare_step(measured: StepCalls, context: StepContext) -> ComparedStep:
    """Compare the recorded calls of a step with the expected ones, in any order.

    Args:
        measured: The recorded calls.
        context: The expected calls, and what causes depend on.
    """
    cells = match_calls(context.expected, measured)
    unmatched = [calls for cell in cells for calls in cell.unmatched]
    return ComparedStep(measured, context, cells, explain(unmatched, context))


def differences(step: ComparedStep, shown: Iterable[ExplainedCalls], lines: tuple[Lines, Lines]) -> list[Differences]:
    """Return the differences in each group: calls, their order and, where both are equal, their call sites.

    Args:
        step: The comparison of a step.
        shown: The unmatched calls that count as differences.
        lines: Lines of code of the expected and the recorded calls.
    """
    rows: dict[GroupLabel, list[DifferenceRow]] = defaultdict(list)
    for row in _call_rows(step, shown, lines):
        rows[row.key.role, row.key.group].append(row)
    a, b = step.expected, step.measured
    for group in {*a.orders, *b.orders}:
        if a.orders.get(group) != b.orders.get(group):
            rows[group] += _order_rows(a, b, group, changed=bool(rows[group]))
        elif a.calls != b.calls:
            rows[group] += _site_rows(a, b, group)
    return [tuple(group_rows) for _, group_rows in sorted(rows.items()) if group_rows]


def _call_rows(
    step: ComparedStep, shown: Iterable[ExplainedCalls], lines: tuple[Lines, Lines]
) -> Iterator[DifferenceRow]:
    """Yield a row per key whose calls differ in number."""
    unmatched: Counter[tuple[CallKey, bool]] = Counter()
    for _, calls in step.explained:
        unmatched[calls.key, calls.calls > 0] += abs(calls.calls)
    by_key: dict[tuple[CallKey, bool], list[ExplainedCalls]] = defaultdict(list)
    for cause, calls in shown:
        by_key[calls.key, calls.calls > 0].append((cause, calls))
    for (key, is_extra), same in sorted(by_key.items(), key=lambda item: item[0]):
        in_a, in_b = (side.sites_by_key.get(key, Counter()) for side in (step.expected, step.measured))
        matched = (in_b if is_extra else in_a).total() - unmatched[key, is_extra]
        number = abs(sum(calls.calls for _, calls in same))
        if in_a and in_b:
            sites = in_a - in_b, in_b - in_a
        else:
            own = Counter(calls.site for _, calls in same)
            sites = (Counter(), own) if is_extra else (own, Counter())
        calls_a, calls_b = (matched, matched + number) if is_extra else (matched + number, matched)
        yield DifferenceRow(
            "calls",
            _displayed(key, step.context),
            calls_a,
            calls_b,
            _joined_lines(lines[0], key, sites[0]),
            _joined_lines(lines[1], key, sites[1]),
            None if key.payload in UNCOMPARED_SIZES else sum(calls.bytes for _, calls in same),
            "; ".join(dict.fromkeys(cause for cause, calls in same if cause not in (UNEXPLAINED, calls.purpose))),
            _purposes(calls for _, calls in same),
        )


def _purposes(same: Iterable[EqualCalls]) -> str:
    """Return the purposes of calls with their places: "parameters gathered for forward (layers.0, layers.1)"."""
    places: dict[str, dict[str, None]] = defaultdict(dict)
    for calls in same:
        places[calls.purpose].update({calls.place: None} if calls.place else {})
    return "; ".join(f"{purpose} ({', '.join(of)})" if of else purpose for purpose, of in places.items())


def _displayed(key: CallKey, context: StepContext) -> CallKey:
    """Return a key with "-" for labels that rules leave open, and the number of ranks of the dimension's group."""
    if ANY not in key:
        return key
    labels = (("-" if label == ANY else label) for label in key)
    size = context.prediction.ranks_of(key.role) if context.prediction and key.group == ANY else key.group
    return CallKey(*labels)._replace(group=str(size))  # type: ignore[arg-type]


def _order_rows(a: StepCalls, b: StepCalls, group: GroupLabel, *, changed: bool) -> list[DifferenceRow]:
    """Return the calls that moved. `changed`: the numbers of calls differ, too."""
    before, after = a.sequences.get(group, ()), b.sequences.get(group, ())
    if changed and not (before and after):
        return []
    moved = moved_calls(before, after)
    if moved:
        return [DifferenceRow("order", key, count, count) for key, count in sorted(moved.items())]
    return [] if changed else [DifferenceRow("order", NO_KEY._replace(role=group[0], group=group[1]), 0, 0)]


def _site_rows(a: StepCalls, b: StepCalls, group: GroupLabel) -> list[DifferenceRow]:
    """Return the calls of a group that other functions make."""
    keys = sorted(key for key in a.sites_by_key if (key.role, key.group) == group)
    pairs = [(key, a.sites_by_key[key], b.sites_by_key[key]) for key in keys]
    return [
        DifferenceRow("site", key, (moved := in_a - in_b).total(), moved.total(), _joined(moved), _joined(in_b - in_a))
        for key, in_a, in_b in pairs
        if in_a != in_b
    ]


def _joined_lines(lines: Lines, key: CallKey, sites: Iterable[str]) -> str:
    return _joined(itertools.chain.from_iterable(lines.get(Call(key, site)) or {site} for site in sites))


def _joined(sites: Iterable[str]) -> str:
    return "; ".join(sorted({site for site in sites if site not in ("", "-")}))
