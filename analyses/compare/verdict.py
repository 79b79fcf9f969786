"""Verdict on a run by the prediction rules: differing cells, the program's own calls, and what was not compared.

A cell is one operation of one parallel dimension in one step of one rank. It agrees if its payload, and the
sizes and number of its calls, are as expected. If the order of gradients and modules determines how many calls carry
the same bytes (`calls_max` of the table `expected`), their number only has to be within that bound. With a tolerance
above 0, only the payload is compared.

Extra calls are the program's own if their call site is not in a library that has rules, and if no expected call of the
cell is missing; otherwise they may replace expected calls. Calls in a group of one rank, which send nothing, are listed
with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

import numpy as np
import pandas as pd

from commtrace.analyses.fold_engine import Analysis, NamedTables
from commtrace.analyses.grouping import Array, group_rows, number_sequences, sum_groups
from commtrace.formatting import MAX_SINGLE, format_missing, format_ranks, merge_texts
from commtrace.reading.recorded_run import RecordedRun

from .call_keys import is_own
from .causes import PROGRAM_CAUSES, SPLIT_DIFFERENTLY, path_in_packages
from .counted_calls import last_steps, sums_in
from .reconciliation import compared_steps
from .run_calls import OwnCalls, sum_own_calls
from .step_comparison import EXPECTED

CELL: Final = ("rank", "step", "role", "op")
NUMBERS: Final = ("expected_calls", "measured_calls", "expected_bytes", "measured_bytes")
COLUMNS: Final = (*CELL, *NUMBERS, "calls_max", "causes", "sites")

_OWN_COLUMNS: Final = ("sites", "op", "rank", "measured_calls", "measured_bytes")
_LIBRARIES_WITH_RULES: Final = (
    "deepspeed/", "torch/", "mpu/mappings.py", "mpu/layers.py", "mpu/cross_entropy.py",
    "megatron/core/tensor_parallel/", "tensor_parallel/",
)  # fmt: skip
"""Prefixes of call sites in these libraries, for Megatron both in a checkout and installed."""


@dataclass(frozen=True)
class Verdict:
    """Differing cells, and ranks that could not be compared."""

    cells: int
    """Number of cells that were compared."""
    ranks: tuple[int, ...]
    """Ranks that were compared."""
    differences: pd.DataFrame
    """Cells that do not agree, with COLUMNS. Counts are of all calls; causes and sites are of those that differ."""
    own: Mapping[tuple[str, str], OwnCalls]
    """The program's own calls, by call site and operation; no cell counts them."""
    not_compared: tuple[str, ...]
    """What could not be compared with theory: sentences without a full stop."""

    @property
    def agrees(self) -> bool:
        """Whether all calls of every rank were compared, and nothing differs."""
        return not len(self.differences) and not self.not_compared


def declare_own(analysis: Analysis, patterns: Sequence[str]) -> Analysis:
    """Return the analysis `reconciliation` with the calls of these call sites moved to a table `declared`."""

    def finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
        first, groups = group_rows([table[name].cat.codes.to_numpy() for name in ("phase", "site")])
        own = [
            any(is_own(pattern, str(phase), path_in_packages(str(site))) for pattern in patterns)
            for phase, site in zip(table["phase"].iloc[first], table["site"].iloc[first], strict=True)
        ]
        declared = np.array(own, bool)[groups]
        steps = compared_steps(last_steps(table, len(run.processes)), run)
        calls = sums_in(table.loc[declared], steps)
        ranks = np.array([process.rank for process in run.processes], np.int64)[calls["process"]]
        texts = {"role": calls["role"].astype(str), "op": calls["op"].astype(str), "sites": calls["site"].astype(str)}
        calls = calls.assign(rank=ranks, **texts)
        calls = calls.rename(columns={"calls": "measured_calls", "payload_bytes": "measured_bytes"})
        return analysis.finish(table.loc[~declared], run) | {"declared": calls[["role", *_OWN_COLUMNS]]}

    return replace(analysis, finish=finish)


def compute_verdict(
    tables: Mapping[str, pd.DataFrame],
    ranks: Iterable[int],
    world_size: int | None,
    tolerance: Fraction = Fraction(0),
    *,
    strict: bool = False,
    losses: Iterable[str] = (),
) -> Verdict:
    """Compute the verdict from the tables of `reconciliation.DIFFERENCES`.

    Args:
        tables: The tables by name, also those of `declare_own`.
        ranks: The ranks that left a log, and those excluded from recording.
        world_size: The number of ranks of the job; None: not known, and no rank counts as missing.
        tolerance: Share of the expected payload of a cell by which the measured payload may differ.
        strict: Whether only declared calls are the program's own.
        losses: Sentences on what recording lost: calls that were not compared.
    """
    expected, rows, matching_cells = _differing_cells(tables)
    own_rows = _is_own(rows) & (not strict)
    cells = compared_cells(expected, rows.loc[~own_rows])
    agrees = _agree(cells, tolerance)
    theory = tables["theory"]
    compared = theory.loc[theory["not_predicted"].isna(), "rank"]
    declared = [tables["declared"]] if "declared" in tables else []
    own = pd.concat([*declared, rows.loc[own_rows, ["role", *_OWN_COLUMNS]]])
    own["sites"] += (own["role"] == "self").map({True: " (in a group of one rank, sends nothing)", False: ""})
    own = own.groupby([*_OWN_COLUMNS[:3]], as_index=False, sort=False)[[*_OWN_COLUMNS[3:]]].sum()
    return Verdict(
        len(cells) + matching_cells,
        tuple(sorted({int(rank) for rank in compared})),
        cells.loc[~agrees].reset_index(drop=True),
        sum_own_calls(own[[*_OWN_COLUMNS]].itertuples(index=False, name=None)),
        (*losses, *_not_compared(theory, {*ranks}, world_size)),
    )


def describe_losses(losses: Sequence[tuple[int, str]], *, per_rank: bool = False) -> list[str]:
    """Return a sentence per rank on what it lost; for many ranks, unless `per_rank`, a sentence per loss."""
    if per_rank or len(losses) <= MAX_SINGLE:
        return [f"rank {rank}: {loss}" for rank, loss in losses]
    by_loss: dict[str, list[int]] = {}
    for rank, loss in losses:
        by_loss.setdefault(loss, []).append(rank)
    return [f"rank {format_ranks(ranks)}: {loss}" for loss, ranks in merge_texts(by_loss).items()]


def _differing_cells(tables: Mapping[str, pd.DataFrame]) -> tuple[pd.DataFrame, pd.DataFrame, int]:
    """Return the rows of `expected` and `reconciliation` of differing cells, and the number of matching cells."""
    expected, reconciliation = tables["expected"], tables["reconciliation"]
    differs = reconciliation["cause"].to_numpy() != EXPECTED
    _, numbers = _number_cells(pd.concat([expected[[*CELL]], reconciliation[[*CELL]]]))
    differing = np.unique(numbers[len(expected) :][differs])
    shown = np.isin(numbers, differing)
    matching_cells = int(tables["theory"]["cells"].sum()) - len(differing)
    return expected.loc[shown[: len(expected)]], reconciliation.loc[shown[len(expected) :]], matching_cells


def _number_cells(rows: pd.DataFrame) -> tuple[Array, Array]:
    """Return the index of one row of each cell, and the number of each row's cell."""
    return group_rows([pd.factorize(rows[name])[0] for name in CELL])


def _is_own(rows: pd.DataFrame) -> pd.Series[bool]:
    """Return which rows are extra calls that are the program's own or in groups of one rank."""
    is_extra = (rows["expected_calls"] == 0) & (rows["cause"] != EXPECTED)
    missing = (rows["expected_calls"] - rows["measured_calls"]).clip(lower=0)
    examples, cells = _number_cells(rows)
    is_short = sum_groups(missing.to_numpy(np.int64), cells, len(examples)) > 0
    in_library = [site for site in rows["sites"].unique() if path_in_packages(site).startswith(_LIBRARIES_WITH_RULES)]
    of_program = rows["cause"].isin(PROGRAM_CAUSES) & ~rows["sites"].isin(in_library)
    return is_extra & (of_program | (rows["role"] == "self")) & ~is_short[cells]


def compared_cells(expected: pd.DataFrame, reconciliation: pd.DataFrame) -> pd.DataFrame:
    """Return a row, with COLUMNS, per cell that has expected or measured calls."""
    rows = pd.concat([expected[[*CELL]], reconciliation[[*CELL]]])
    examples, numbers = _number_cells(rows)
    of_expected, of_reconciliation = np.split(numbers, [len(expected)])
    cells = rows.iloc[examples].reset_index(drop=True)
    for name in NUMBERS:
        cells[name] = sum_groups(reconciliation[name].to_numpy(np.int64), of_reconciliation, len(cells))
    calls_max = pd.Series(expected["calls_max"].array, of_expected)
    cells["calls_max"] = calls_max.loc[~calls_max.index.duplicated()].reindex(cells.index)
    differs = reconciliation["cause"].to_numpy() != EXPECTED
    for name, column in (("causes", "cause"), ("sites", "sites")):
        texts = reconciliation[column].to_numpy()[differs]
        cells[name] = _joined_items(texts, of_reconciliation[differs], len(cells))
    return cells.sort_values([*CELL], ignore_index=True)[[*COLUMNS]]


def _joined_items(texts: Array, cells: Array, count: int) -> Array:
    """Return the joined distinct items of the strings of each cell. `cells` has the number of each string's cell."""
    order = np.argsort(cells, kind="stable")
    codes, items = pd.factorize(texts[order])
    begins = np.flatnonzero(np.diff(cells[order], prepend=-1))
    numbers, examples = number_sequences(codes, begins)
    ends = np.append(begins[1:], len(codes))
    joined = [_join_items(items[codes[begins[at] : ends[at]]]) for at in examples]
    result = np.full(count, "", object)
    result[cells[order[begins]]] = np.array(joined, object)[numbers]
    return result


def _join_items(texts: Iterable[str]) -> str:
    return "; ".join(sorted({item for text in texts for item in text.split("; ") if item}))


def _agree(cells: pd.DataFrame, tolerance: Fraction) -> Array:
    """Return whether each cell agrees, bool, shape (cells,)."""
    expected, measured = (cells[name].to_numpy(np.int64) for name in ("expected_bytes", "measured_bytes"))
    if tolerance:
        pairs = zip(expected.tolist(), np.abs(measured - expected).tolist(), strict=True)
        return np.array([difference <= tolerance * size for size, difference in pairs], bool)
    within_bound = (cells["measured_calls"] > 0) & (cells["measured_calls"] <= cells["calls_max"]).fillna(False)
    split_differently = within_bound & (cells["causes"] == SPLIT_DIFFERENTLY)
    agrees: Array = (measured == expected) & ((cells["causes"] == "") | split_differently).to_numpy(bool)
    return agrees


def _not_compared(theory: pd.DataFrame, ranks: set[int], world_size: int | None) -> Iterator[str]:
    reasons = theory.loc[theory["not_predicted"].notna()].groupby("not_predicted")["rank"]
    for reason, of_reason in merge_texts({str(reason): of_reason for reason, of_reason in reasons}).items():
        yield f"rank {format_ranks(of_reason)}: {reason}"
    if missing := format_missing(ranks, world_size or 0):
        yield f"rank {missing} of {world_size}: no log"
    if not len(theory):
        yield "no process of the run left a log"
