"""Differences between the calls of two runs, merged over ranks and steps with the same differences.

Equal calls are counted, and their order in each group is compared, so one inserted call does not
shift the others. Calls that moved are found by aligning the two sequences.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from commtrace.formatting import format_plural, format_ranks, merge_texts
from commtrace.rank_ranges import select_steps

from .call_keys import Call, CallKey
from .run_calls import NO_CALLS, GroupLabel, RankCalls, RunCalls, StepCalls
from .settings import compare_settings

COLUMNS: Final = ("kind", "ranks", "steps", *CallKey._fields, "calls_a", "calls_b", "sites_a", "sites_b")

Difference: TypeAlias = Literal["calls", "order", "rank", "site"]

_ALIGNED_CALLS: Final = 4_000
"""Longest sequence that is aligned: the time is quadratic."""
_NO_KEY: Final = CallKey("-", 0, "-", "-", "-", "-", "-", "-")


class _Row(NamedTuple):
    kind: Difference
    key: CallKey
    calls_a: int
    calls_b: int
    sites_a: str = ""
    sites_b: str = ""


_Content: TypeAlias = tuple[_Row, ...]
"""The differences in one group of one step."""


@dataclass(frozen=True)
class RunDifferences:
    """Result of a comparison of runs a and b."""

    table: pd.DataFrame
    """COLUMNS: per rank and step, how often a call is in a and in b, where that differs; merged
    over ranks and steps. Kinds: "calls": calls with different counts; "order": equal calls in
    another order; "rank": all calls of ranks that only one run has; "site": equal calls from
    different functions."""
    settings: pd.DataFrame
    compared: tuple[frozenset[int], frozenset[int]]
    """Ranks and steps that were compared; start-up is step -1."""
    differing: tuple[frozenset[int], frozenset[int]]
    """Ranks and steps that differ."""
    volumes: tuple[tuple[int, int], tuple[int, int]]
    """Calls and payload bytes of what was compared, in a and in b."""
    not_compared: tuple[str, ...]
    """Why parts could not be compared: sentences without their full stop."""
    notes: tuple[str, ...]
    """What limits the comparison without being a fault of either run."""

    @property
    def equal(self) -> bool:
        """Whether nothing that was compared differs; call sites do not count."""
        return not (self.table["kind"] != "site").any()


def compare_calls(a: RunCalls, b: RunCalls) -> RunDifferences:
    """Compare two runs."""
    differences = functools.cache(functools.partial(_differences, run_a=a, run_b=b))
    places: dict[_Content, list[tuple[int, int]]] = defaultdict(list)
    reasons: dict[str, list[int]] = defaultdict(list)
    notes: dict[str, list[int]] = defaultdict(list)
    volumes = [[0, 0], [0, 0]]
    compared: list[int] = []
    steps: set[int] = set()
    differing: set[tuple[int, int]] = set()
    for rank in sorted({*a.ranks} & {*b.ranks}):
        both = [(run.name, run.ranks[rank]) for run in (a, b)]
        for name, calls in both:
            for reason in filter(None, (calls.losses, calls.problem)):
                reasons[f"{name}: {reason}"].append(rank)
        if any(calls.lost_records or calls.problem for _, calls in both):
            continue
        compared.append(rank)
        for name in (name for name, calls in both if not calls.ended):
            text = "did not exit cleanly (killed, or still running); its last step is not compared"
            reasons[f"{name}: {text}"].append(rank)
        selections = a.step_ranges, b.step_ranges
        pairs, open_steps = _step_pairs(a.ranks[rank], b.ranks[rank], a.last_step, b.last_step, selections)
        if any(selections):
            without = f", without step {open_steps[0]}, the last one of a run" if open_steps else ""
            notes[f"only steps that COMMTRACE_STEPS selected in both runs are compared{without}"].append(rank)
        elif a.last_step != b.last_step:
            longer, shorter = (a, b) if a.last_step > b.last_step else (b, a)
            notes[_describe_steps(longer, shorter, open_steps)].append(rank)
        for step, calls_a, calls_b in pairs:
            for content in differences(calls_a, calls_b):
                places[content].append((rank, step))
            steps.add(step)
            if calls_a.digest != calls_b.digest:
                differing.add((rank, step))
            for volume, step_calls in zip(volumes, (calls_a, calls_b), strict=True):
                volume[0] += step_calls.volume[0]
                volume[1] += step_calls.volume[1]
    return RunDifferences(
        pd.DataFrame([*_missing_ranks(a, b, notes), *_merged(places)], columns=[*COLUMNS]),
        compare_settings(a.facts, b.facts),
        (frozenset(compared), frozenset(steps)),
        (frozenset(rank for rank, _ in differing), frozenset(step for _, step in differing)),
        ((volumes[0][0], volumes[0][1]), (volumes[1][0], volumes[1][1])),
        tuple(_of_ranks(reasons, compared)),
        tuple(_of_ranks(notes, compared)),
    )


def _describe_steps(longer: RunCalls, shorter: RunCalls, open_steps: Sequence[int]) -> str:
    text = f"{longer.name} has {format_plural(longer.last_step + 1, 'step')}, {shorter.name} {shorter.last_step + 1}"
    if open_steps:
        return f"{text}; step {format_ranks(open_steps)} could not be compared: {shorter.name} has no repeating step"
    return f"{text}; the further steps are compared with these"


def _of_ranks(sentences: Mapping[str, Sequence[int]], compared: Sequence[int]) -> Iterator[str]:
    for text, ranks in merge_texts(sentences).items():
        yield text if {*ranks} == {*compared} and len(ranks) > 1 else f"rank {format_ranks(ranks)}: {text}"


def _missing_ranks(a: RunCalls, b: RunCalls, notes: dict[str, list[int]]) -> Iterator[tuple[Any, ...]]:
    """Yield a row for the ranks that only one run has; those that a dry run did not run become a note."""
    for run, other, is_a in ((a, b, True), (b, a, False)):
        only = sorted({*run.ranks} - {*other.ranks})
        if only and other.partial:
            notes[f"not in {other.name}, a dry run of other ranks; not compared"] = only
        elif only:
            calls = sum(step.volume[0] for rank in only for step in run.ranks[rank].steps.values())
            counts = (calls, 0) if is_a else (0, calls)
            yield ("rank", format_ranks(only), "-", *_NO_KEY, *counts, "", "")


# ---- steps -----------------------------------------------------------------------------------------------------------


_StepPair: TypeAlias = tuple[int, StepCalls, StepCalls]
"""Number of a step in the run that has more steps, and its calls in a and in b."""


def _step_pairs(
    a: RankCalls, b: RankCalls, last_a: int, last_b: int, selections: tuple[Sequence[range], Sequence[range]]
) -> tuple[list[_StepPair], list[int]]:
    """Return pairs of steps to compare, and the steps of the longer run without a counterpart.

    Steps with equal numbers are compared. The last step of a program also has what it communicates
    at its end: if one run has more steps, the last steps of both are compared, and a further step
    must equal a step of the other run. If it does not, it is compared with the other's last step
    but one, if that equals the step before it. If there are `selections`, only steps in all of them
    are compared, without the last step of the shorter run if its selection has further ones: it may
    be the last step of its program.
    """
    if last_a < last_b:
        swapped, open_steps = _step_pairs(b, a, last_b, last_a, selections[::-1])
        return [(step, calls_a, calls_b) for step, calls_b, calls_a in swapped], open_steps
    # The last step of a process that did not exit cleanly may be incomplete.
    end = min([last_a, *(max(rank.steps, default=-1) - 1 for rank in (a, b) if not rank.ended)])
    more = last_a > last_b
    further = range(max(last_b, 0) if more else end + 1, end + 1)
    compares_last = not more or not select_steps(np.array([last_b + 1]), selections[1]).all()
    stop = last_b + 1 if any(selections) and compares_last else further.start
    same = range(-1, min(stop, end + 1))
    steps = np.array(same, np.int64)
    for ranges in selections:
        steps = steps[select_steps(steps, ranges)]
    pairs = [(step, a.steps.get(step, NO_CALLS), b.steps.get(step, NO_CALLS)) for step in steps.tolist()]
    if any(selections):
        return pairs, [] if compares_last else [last_b]
    known = {(calls := b.steps.get(step, NO_CALLS)).digest: calls for step in range(int(last_b > 0), last_b + 1)}
    regular = [b.steps.get(step, NO_CALLS) for step in (last_b - 1, last_b - 2)] if last_b > 1 else []
    repeats = bool(regular) and regular[0].digest == regular[1].digest
    open_steps = []
    for step in further:
        calls = a.steps.get(step, NO_CALLS)
        if step == last_a and last_b > 0:
            pairs.append((step, calls, b.steps.get(last_b, NO_CALLS)))
        elif calls.digest in known:
            pairs.append((step, calls, known[calls.digest]))
        elif repeats:
            pairs.append((step, calls, regular[0]))
        else:
            open_steps.append(step)
    return pairs, open_steps


# ---- the differences of one step -------------------------------------------------------------------------------------


def _differences(a: StepCalls, b: StepCalls, run_a: RunCalls, run_b: RunCalls) -> list[_Content]:
    """Return the differences in each group; if the calls are equal, those of their call sites."""
    if a == b:
        return []
    keys_a, keys_b = _by_key(a.counts), _by_key(b.counts)
    contents = []
    for group in sorted({*a.orders, *b.orders}):
        keys = [key for key in sorted({*keys_a, *keys_b}) if (key.role, key.group) == group]
        sites = [(key, keys_a.get(key, Counter()), keys_b.get(key, Counter())) for key in keys]
        if a.orders.get(group) == b.orders.get(group):
            rows = [
                _Row("site", key, (moved := in_a - in_b).total(), moved.total(), _joined(moved), _joined(in_b - in_a))
                for key, in_a, in_b in sites
                if in_a != in_b
            ]
        else:
            rows = [
                _Row("calls", key, calls_a, calls_b, _lines(run_a, key, in_a - in_b), _lines(run_b, key, in_b - in_a))
                for key, in_a, in_b in sites
                if (calls_a := in_a.total()) != (calls_b := in_b.total())
            ]
            rows += _order_rows(a, b, group, changed=bool(rows))
        if rows:
            contents.append(tuple(rows))
    return contents


def _by_key(counts: Mapping[Call, int]) -> dict[CallKey, Counter[str]]:
    by_key: dict[CallKey, Counter[str]] = defaultdict(Counter)
    for (key, site), count in counts.items():
        by_key[key][site] += count
    return by_key


def _order_rows(a: StepCalls, b: StepCalls, group: GroupLabel, *, changed: bool) -> list[_Row]:
    """Return the calls that moved. `changed`: the numbers of calls differ, too."""
    before, after = a.sequences.get(group, ()), b.sequences.get(group, ())
    if changed and not (before and after):
        return []
    moved = _moved(before, after)
    if moved:
        return [_Row("order", key, count, count) for key, count in sorted(moved.items())]
    return [] if changed else [_Row("order", _NO_KEY._replace(role=group[0], group=group[1]), 0, 0)]


def _moved(a: Sequence[CallKey], b: Sequence[CallKey]) -> Counter[CallKey]:
    """Return the calls that both sequences have outside of their alignment; none for very long sequences."""
    begin = _equal_prefix(a, b)
    a, b = a[begin:], b[begin:]
    end = _equal_prefix(a[::-1], b[::-1])
    a, b = a[: len(a) - end], b[: len(b) - end]
    if max(len(a), len(b)) > _ALIGNED_CALLS:
        return Counter()
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


def _lines(run: RunCalls, key: CallKey, sites: Counter[str]) -> str:
    lines = [run.lines.get(Call(key, site)) or {site} for site in sites]
    return _joined(itertools.chain.from_iterable(lines))


def _joined(sites: Iterable[str]) -> str:
    return "; ".join(sorted({site for site in sites if site not in ("", "-")}))


# ---- equal differences -----------------------------------------------------------------------------------------------


def _merged(places: Mapping[_Content, Sequence[tuple[int, int]]]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of the table, sorted by their first step and rank."""
    merged: dict[tuple[_Content, tuple[int, ...]], list[int]] = defaultdict(list)
    for content, where in places.items():
        for rank, pairs in itertools.groupby(where, lambda place: place[0]):
            merged[content, tuple(step for _, step in pairs)].append(rank)
    ordered = sorted(merged.items(), key=lambda item: (item[0][1][0], item[1][0], item[0][0][0].key))
    for (content, steps), ranks in ordered:
        for row in content:
            place = format_ranks(ranks), format_steps(steps)
            yield (row.kind, *place, *row.key, row.calls_a, row.calls_b, row.sites_a, row.sites_b)


def format_steps(steps: Iterable[int]) -> str:
    """Return steps as text: "start-up and step 0-4"."""
    numbers = {*steps}
    training = format_ranks(step for step in numbers if step >= 0)
    return " and ".join(["start-up"] * (-1 in numbers) + [f"step {training}"] * bool(training))
