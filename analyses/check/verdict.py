"""From the tables of theory to a verdict.

A cell is one operation of one parallel dimension in one step of one rank. It agrees where its payload is that which is
expected, and its calls are those which are expected, one by one, in size and number; where theory says that the order
of gradients and modules decides how many calls carry the same bytes (`calls_max` of the table `expected`), their number
need only stay within that bound. With a tolerance above 0 the payload alone is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import pandas as pd

from commtrace.analyses.engine import rows_of
from commtrace.analyses.reconciliation import EXPECTED
from commtrace.analyses.reconciliation.causes import OTHER_PIECES
from commtrace.formatting import format_ranks

CELL: Final = ("rank", "step", "role", "op")
NUMBERS: Final = ("expected_calls", "measured_calls", "expected_bytes", "measured_bytes")
COLUMNS: Final = (*CELL, *NUMBERS, "calls_max", "causes", "sites")


@dataclass(frozen=True)
class Verdict:
    """What differs, and what could not be compared."""

    cells: int
    """Cells that were compared."""
    ranks: tuple[int, ...]
    """Ranks that were compared."""
    differences: pd.DataFrame
    """Cells that do not agree: COLUMNS. Calls are all calls of the cell; causes and sites are those of what differs."""
    not_compared: tuple[str, ...]
    """Why theory cannot be held against every rank: sentences without their full stop."""

    @property
    def agrees(self) -> bool:
        """Every rank of the run was compared, and nothing differs."""
        return not len(self.differences) and not self.not_compared


def judge(
    tables: Mapping[str, pd.DataFrame], ranks: Iterable[int], world_size: int | None, tolerance: Fraction = Fraction(0)
) -> Verdict:
    """The verdict on the tables of `reconciliation`. `ranks`: those that left a log, of `world_size`.

    `tolerance`: by which share of the expected payload a cell's may differ.
    """
    cells = cells_of(tables["expected"], tables["reconciliation"])
    wrong = [not _agrees(cell, tolerance) for cell in rows_of(cells)]
    told = tables["theory"]
    compared = told.loc[told["not_predicted"].isna(), "rank"]
    return Verdict(
        len(cells),
        tuple(sorted({int(rank) for rank in compared})),
        cells.loc[wrong].reset_index(drop=True),
        tuple(_not_compared(told, {*ranks}, world_size)),
    )


def cells_of(expected: pd.DataFrame, reconciliation: pd.DataFrame) -> pd.DataFrame:
    """COLUMNS, a row per cell that is expected or measured."""
    keys = [*CELL]
    sums = reconciliation.groupby(keys, as_index=False)[[*NUMBERS]].sum()
    differing = reconciliation.loc[reconciliation["cause"] != EXPECTED]
    words = differing.groupby(keys, as_index=False).agg({"cause": _joined, "sites": _joined})
    words = words.rename(columns={"cause": "causes"})
    bounds = expected[[*keys, "calls_max"]]
    cells = sums.merge(words, how="left", on=keys).merge(bounds, how="outer", on=keys)
    filled: dict[str, Any] = dict.fromkeys(NUMBERS, 0) | {"causes": "", "sites": ""}
    return cells.fillna(filled).sort_values(keys, ignore_index=True)[[*COLUMNS]]


def _joined(words: Iterable[str]) -> str:
    return "; ".join(sorted({part for word in words for part in word.split("; ") if part}))


def _agrees(cell: Any, tolerance: Fraction) -> bool:
    off = abs(int(cell.measured_bytes) - int(cell.expected_bytes))
    if tolerance:
        return off <= tolerance * int(cell.expected_bytes)
    if off or not cell.causes:
        return not off
    within = not pd.isna(cell.calls_max) and 0 < cell.measured_calls <= cell.calls_max
    return bool(within and cell.causes == OTHER_PIECES)


def _not_compared(told: pd.DataFrame, ranks: set[int], world_size: int | None) -> Iterator[str]:
    for reason, some in told.loc[told["not_predicted"].notna()].groupby("not_predicted"):
        yield f"rank {format_ranks(some['rank'])}: {reason}"
    missing = {*range(world_size or 0)} - ranks
    if missing:
        yield f"rank {format_ranks(missing)} of {world_size}: no log is there"
    if not len(told):
        yield "no process of the run left a log"
