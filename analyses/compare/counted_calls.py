"""The recorded calls of a run by rank and step, counted without their order, as the fold engine can sum them.

They need far less memory than `recorded_calls`, and may come from summaries.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.analyses.grouping import (
    Array,
    concatenated_ranges,
    group_rows,
    merge_sums,
    rows_of,
    sort_rows,
    sum_sorted,
)
from commtrace.analyses.record_blocks import RecordBlock
from commtrace.reading.labels import RunLabels

from .call_keys import SUMMED, UNKNOWN, CallKey
from .own_calls import is_declared, path_in_packages
from .run_calls import NO_CALLS, EqualCalls, RankCalls, StepCalls

DETAILED_STEPS: Final = 64
"""Number of steps that keep message sizes. Later ones have SUMMED, so that the table of a long log stays small."""

_CALL: Final = ("role", "op", "phase", "site", "purpose", "place", "payload", "ranks", "dtype", "reduce_op")
"""Fields that are the same in equal calls, besides process and step."""

_LABELS: Final = ("role", "op", "phase", "site", "purpose", "place", "dtype", "reduce_op")

_MAX_CODE: Final = (1 << 64) - 1

_SUMS: Final = ("calls", "payload_bytes", "wire_parts", "wire_unknown")


def partial(block: RecordBlock) -> pd.DataFrame:
    """Return how each step of a process differs from the step before.

    Training repeats its steps, so there are far fewer differences than steps.

    Returns:
        `process`, the fields of _CALL, `step`, and the changes of the sums of `calls`, `payload_bytes`, `wire_parts`
        (wire bytes times `ranks`) and `wire_unknown` since the step before. `ranks` is the size of the call's group.
        Wire bytes are multiples of 1/`ranks` byte, so sums of `wire_parts` are exact.
    """
    distinct, rows = block.distinct_calls, block.distinct_calls_by("process", "step")
    ranks = block.labels.group_sizes(distinct["group"])
    ids = {name: block.labels.ids(name, distinct) for name in _LABELS}
    call = {name: block.labels.codes(name, column) for name, column in ids.items()}
    unknown = block.labels.payload_unknown(distinct["kind"])
    call |= {"payload": np.where(unknown, UNKNOWN, distinct["payload"].astype(np.int64)), "ranks": ranks}
    # Each call with its payload, then each without; many of these are equal.
    calls = pd.concat([pd.DataFrame(call), pd.DataFrame({**call, "payload": np.where(unknown, UNKNOWN, SUMMED)})])
    examples, numbers = group_rows([calls[name].to_numpy() for name in _CALL])
    number = numbers[rows.call + np.where(rows["step"] < DETAILED_STEPS, 0, len(distinct))]
    order, begins = sort_rows([rows["process"], number, rows["step"]])
    columns = {"process": rows["process"], "call": number, "step": rows["step"]}
    keys = {name: column[order[begins]] for name, column in columns.items()}
    sums = {name: sum_sorted(values[order], begins) for name, values in zip(_SUMS, _values(rows, ranks), strict=True)}
    changes = _changes(keys, sums)
    example = examples[changes.pop("call")]
    return merge([pd.DataFrame({**changes, **{name: calls[name].to_numpy()[example] for name in _CALL}}, copy=False)])


def _values(rows: RecordBlock, ranks: Array) -> Iterator[Array]:
    """Yield the columns _SUMS of rows, given the group sizes of their distinct calls."""
    yield rows.calls
    yield rows.volumes["payload_bytes"]
    yield np.rint(rows.volumes["wire_bytes"] * ranks[rows.call]).astype(np.int64)
    yield rows.volumes["wire_unknown"]


def _changes(keys: Mapping[str, Array], sums: Mapping[str, Array]) -> dict[str, Array]:
    """Return sums by `process`, `call` and `step`, in this order, as differences from the step before."""
    follows = np.zeros(len(keys["step"]) + 1, bool)  # the same call as in the row before, one step later
    follows[1:-1] = np.logical_and.reduce([key[1:] == key[:-1] + (name == "step") for name, key in keys.items()])
    changed = np.logical_or.reduce([value != 0 for value in sums.values()])
    as_before = np.logical_and.reduce([value[1:] == value[:-1] for value in sums.values()])
    changed[1:] = np.where(follows[1:-1], ~as_before, changed[1:])
    differs, ends = np.flatnonzero(changed), np.flatnonzero(~follows[1:])
    begins = ~follows[differs]
    changes = {
        name: np.append(key[differs], key[ends] + (name == "step")).astype(np.int64) for name, key in keys.items()
    }
    for name, value in sums.items():
        changes[name] = np.append(value[differs] - np.where(begins, 0, value[differs - 1]), -value[ends])
    return changes


_merge_sums: Final = merge_sums("process", *_CALL, "step")


def merge(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the sums of the differences of all tables, in the order of the keys."""
    table = _merge_sums(tables)
    return table[np.any([table[name] != 0 for name in _SUMS], axis=0)]


def count_steps(
    table: pd.DataFrame, labels: RunLabels, processes: int, own: Sequence[str] = ()
) -> tuple[list[StepCalls], list[RankCalls]]:
    """Return the distinct steps, the first one empty, and the calls of each process.

    Args:
        table: The merged table, with labels.
        labels: The labels of the run.
        processes: Number of processes of the run.
        own: Patterns of call sites whose calls are the program's own.
    """
    # A row's sums hold until the step of the next row. In the last row of a process and fields, they are 0.
    rows = table[[*_CALL]].assign(**{name: table[name].cumsum() for name in _SUMS})
    process, step = (table[name].to_numpy(np.int64) for name in ("process", "step"))
    low, high = step.min(initial=0), step.max(initial=0)
    moment = process * (high - low + 1) + (step - low)
    first, distinct = group_rows([pd.factorize(rows[name])[0] for name in rows.columns])
    holds = np.flatnonzero(rows["calls"] != 0)

    # Steps are equal if the random codes of their rows have the same sum, except with a probability of 2 ** -64.
    codes = np.zeros(len(rows), np.uint64)
    codes[holds] = np.random.default_rng(0).integers(_MAX_CODE, size=len(first), dtype=np.uint64)[distinct[holds]]
    order = np.argsort(moment, kind="stable")
    is_last = np.diff(moment[order], append=-1) != 0
    sums = np.cumsum(np.diff(codes, prepend=np.uint64(0))[order])[is_last]
    periods = order[is_last]
    content = pd.factorize(np.append(np.uint64(0), sums))[0][1:]

    # An example of each content except the empty one, in the order of time, and the rows that hold at that time.
    examples, at = np.unique(content, return_index=True)
    at = moment[periods[at[examples > 0]]]
    in_time = np.argsort(at)
    begins, ends = (np.searchsorted(at[in_time], moment[holds + later]) for later in (0, 1))
    of_content = in_time[concatenated_ranges(begins, ends - begins)]
    calls = [_equal_calls(row) if row.calls else None for row in rows_of(rows.iloc[first])]
    contents: list[list[EqualCalls]] = [[] for _ in range(len(at))]
    for number, row in zip(of_content.tolist(), np.repeat(distinct[holds], ends - begins).tolist(), strict=True):
        contents[number].append(calls[row])
    bounds = np.searchsorted(process[periods], np.arange(processes + 1)).tolist()
    by_process = [RankCalls(step[periods][begin:end], content[begin:end]) for begin, end in itertools.pairwise(bounds)]
    return [NO_CALLS, *(_step_calls(equal, own) for equal in contents)], by_process


def _step_calls(calls: Sequence[EqualCalls], own: Sequence[str]) -> StepCalls:
    declared = tuple(equal for equal in calls if is_declared(own, equal.key.phase, path_in_packages(equal.site)))
    return StepCalls(tuple(equal for equal in calls if equal not in declared), declared=declared)


def _equal_calls(row: Any) -> EqualCalls:
    wire = Fraction(int(row.wire_parts), int(row.ranks)) if row.ranks and not row.wire_unknown else None
    dtype, reduction = str(row.dtype) or "-", str(row.reduce_op).lower() or "-"
    key = CallKey(str(row.op), int(row.payload), dtype, reduction, str(row.phase), str(row.role), str(row.ranks), "-")
    numbers = int(row.calls), int(row.payload_bytes)
    return EqualCalls(key, *numbers, str(row.site), wire, purpose=str(row.purpose), place=str(row.place))
