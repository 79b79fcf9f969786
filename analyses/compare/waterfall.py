"""Waterfall from the closed form to the measured bytes of a step, cause by cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Final, TypeAlias

from commtrace.theory import Prediction
from commtrace.theory.expected_calls import WaterfallBar

from .causes import UNEXPLAINED
from .run_calls import EqualCalls
from .step_matching import Cell

BELOW: Final = "sizes that depend on the data: below their bound"

RoleBar: TypeAlias = tuple[str, str, Fraction, str]
"""Role, label, wire bytes and kind of a bar."""
WaterfallRows: TypeAlias = tuple[list[dict[str, object]], list[dict[str, object]]]
"""Rows of `waterfall` and of `waterfall_by_role`."""


def waterfall(
    prediction: Prediction,
    cells: Iterable[Cell],
    explained: Iterable[tuple[str, EqualCalls]],
    measured: Iterable[EqualCalls],
    label: str,
) -> WaterfallRows:
    """Return the rows of `waterfall` and of `waterfall_by_role` for one step of one rank.

    Args:
        prediction: The prediction for the job.
        cells: The compared calls of the step.
        explained: The unmatched calls of the cells with their causes.
        measured: The calls of the step; all their wire bytes are known.
        label: The text of the last row.
    """
    bars: list[RoleBar] = [(bar.role, bar.label, bar.bytes, "cause") for bar in prediction.bars]
    for cause, calls in explained:
        wire = calls.wire or Fraction(0)
        bars.append((calls.key.role, cause, wire, UNEXPLAINED if cause == UNEXPLAINED else "cause"))
    bars += [(cell.key[0], BELOW, cell.below_bound, "cause") for cell in cells]
    totals: dict[str, Fraction] = defaultdict(Fraction)
    for calls in measured:
        totals[calls.key.role] += calls.wire or Fraction(0)
    rows = _rows(prediction.closed_form, bars, sum(totals.values(), Fraction(0)), label)
    return rows, [*_rows_by_role(prediction, bars, totals, label)]


def _rows_by_role(
    prediction: Prediction, bars: Sequence[RoleBar], totals: Mapping[str, Fraction], label: str
) -> Iterator[dict[str, object]]:
    """Return the rows of each role, none if the closed form has a single role."""
    forms = {form.role: form for form in prediction.forms}
    for role in [*forms, *sorted(({bar[0] for bar in bars} | {*totals}) - {*forms})] if forms else ():
        form = forms.get(role, WaterfallBar("no closed form", Fraction(0), role))
        total = totals.get(role, Fraction(0))
        of_role = [bar for bar in bars if bar[0] == role]
        if total or form.bytes or any(size for _, _, size, _ in of_role):
            yield from ({"role": role, **row} for row in _rows(form, of_role, total, label))


def _rows(form: WaterfallBar, bars: Sequence[RoleBar], total: Fraction, label: str) -> list[dict[str, object]]:
    """Return the rows from a closed form to the measured total, in whole bytes; bars of one label are added up."""
    sums: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for _, cause, size, kind in bars:
        sums[cause, kind] += size
    sums[UNEXPLAINED, UNEXPLAINED] += total - form.bytes - sum(sums.values(), Fraction(0))
    rows: list[dict[str, object]] = []
    running = Fraction(0)
    # Each bar leads from one rounded running sum to the next.
    for (text, kind), size in {(form.label, "closed form"): form.bytes, **sums}.items():
        if size or not rows:
            rows.append({"label": text, "bytes": round(running + size) - round(running), "kind": kind})
            running += size
    return [*rows, {"label": label, "bytes": round(total), "kind": "measured"}]
