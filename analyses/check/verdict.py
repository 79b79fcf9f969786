"""The verdict on a run: the cells of the reconciliation that differ, and what could not be compared.

A cell is one operation of one parallel dimension in one step of one rank. It agrees if its payload is the expected one,
and if its calls are the expected ones in size and number. If the order of gradients and modules determines how many
calls carry the same bytes (`calls_max` of the table `expected`), their number only has to stay within that bound. With
a tolerance above 0 the payload alone is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import pandas as pd

from commtrace.analyses.fold_engine import rows_of
from commtrace.analyses.reconciliation import EXPECTED
from commtrace.analyses.reconciliation.causes import OTHER_PIECES
from commtrace.formatting import format_ranks

CELL: Final = ("rank", "step", "role", "op")
NUMBERS: Final = ("expected_calls", "measured_calls", "expected_bytes", "measured_bytes")
COLUMNS: Final = (*CELL, *NUMBERS, "calls_max", "causes", "sites")


@dataclass(frozen=True)
class Verdict:
    """Differing cells, and ranks that could not be compared."""

    cells: int
    """Number of cells that were compared."""
    ranks: tuple[int, ...]
    """Ranks that were compared."""
    differences: pd.DataFrame
    """Cells that do not agree: COLUMNS. Calls are all calls of the cell; causes and sites are those of what differs."""
    not_compared: tuple[str, ...]
    """Why ranks could not be compared with theory: sentences without their full stop."""

    @property
    def agrees(self) -> bool:
        """Whether every rank of the run was compared, and nothing differs."""
        return not len(self.differences) and not self.not_compared


def judge(
    tables: Mapping[str, pd.DataFrame], ranks: Iterable[int], world_size: int | None, tolerance: Fraction = Fraction(0)
) -> Verdict:
    """Judge the tables of `reconciliation`.

    Args:
        tables: The tables by name.
        ranks: The ranks that left a log.
        world_size: The number of ranks of the job; None: not known, and no rank counts as missing.
        tolerance: Share of the expected payload of a cell by which the measured payload may differ.
    """
    cells = compared_cells(tables["expected"], tables["reconciliation"])
    differs = [not _agrees(cell, tolerance) for cell in rows_of(cells)]
    theory = tables["theory"]
    compared = theory.loc[theory["not_predicted"].isna(), "rank"]
    return Verdict(
        len(cells),
        tuple(sorted({int(rank) for rank in compared})),
        cells.loc[differs].reset_index(drop=True),
        tuple(_not_compared(theory, {*ranks}, world_size)),
    )


def compared_cells(expected: pd.DataFrame, reconciliation: pd.DataFrame) -> pd.DataFrame:
    """Return COLUMNS, a row per cell that has expected or measured calls."""
    keys = [*CELL]
    sums = reconciliation.groupby(keys, as_index=False)[[*NUMBERS]].sum()
    differing = reconciliation.loc[reconciliation["cause"] != EXPECTED]
    causes = differing.groupby(keys, as_index=False).agg(causes=("cause", _join_items), sites=("sites", _join_items))
    cells = sums.merge(causes, how="left", on=keys).merge(expected[[*keys, "calls_max"]], how="outer", on=keys)
    defaults: dict[str, Any] = dict.fromkeys(NUMBERS, 0) | {"causes": "", "sites": ""}
    return cells.fillna(defaults).sort_values(keys, ignore_index=True)[[*COLUMNS]]


def _join_items(texts: Iterable[str]) -> str:
    return "; ".join(sorted({item for text in texts for item in text.split("; ") if item}))


def _agrees(cell: Any, tolerance: Fraction) -> bool:
    difference = abs(int(cell.measured_bytes) - int(cell.expected_bytes))
    if tolerance:
        return difference <= tolerance * int(cell.expected_bytes)
    if difference or not cell.causes:
        return not difference
    within_bound = not pd.isna(cell.calls_max) and 0 < cell.measured_calls <= cell.calls_max
    return bool(within_bound and cell.causes == OTHER_PIECES)


def _not_compared(theory: pd.DataFrame, ranks: set[int], world_size: int | None) -> Iterator[str]:
    for reason, processes in theory.loc[theory["not_predicted"].notna()].groupby("not_predicted"):
        yield f"rank {format_ranks(processes['rank'])}: {reason}"
    missing = {*range(world_size or 0)} - ranks
    if missing:
        yield f"rank {format_ranks(missing)} of {world_size}: no log"
    if not len(theory):
        yield "no process of the run left a log"
