"""Tables of many dry runs, as the sections show them and as they are written to data/."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd

from commtrace.analyses.engine import rows_of
from examples.paper_study.parts import Options

from .results import Recorded, in_words
from .runs import DryRun, Plan

LEAST: Final = 0.0005
"""Share of the formula below which a cause is not named in a table."""


@dataclass(frozen=True)
class Results:
    """What the study has to show."""

    options: Options
    plan: Plan
    recorded: dict[DryRun, Recorded]
    failed: dict[DryRun, str]
    """Results that cannot be read, and why."""

    def of(self, runs: Iterable[DryRun]) -> list[Recorded]:
        """Those that are done."""
        return [self.recorded[run] for run in runs if run in self.recorded]

    def missing(self, runs: Iterable[DryRun]) -> list[str]:
        """Those that are not."""
        return [run.label for run in runs if run not in self.recorded]


def points(some: Iterable[Recorded]) -> pd.DataFrame:
    """Every point: a row for each rank that was run, all its calls from start-up to the last step.

    `experiment`, `model`, `division`, `ranks`, `sequence`, `rank`, `calls`; payload `recorded_bytes` and `exact_bytes`
    (what `commtrace check` expects), `matched_bytes` (in calls found exactly as expected); `equal`; of a step of the
    lowest rank `sent_bytes`, `sent_exact_bytes` and `closed_form_bytes` (wire); `why_not_closed_form`, and `difference`
    where `equal` is not "yes".
    """
    return pd.DataFrame([row for one in some for row in _points(one)])


def _points(one: Recorded) -> Iterator[dict[str, object]]:
    theory = {int(row.rank): row for row in rows_of(one.theory["theory"])}
    wrong = {int(rank) for rank in one.verdict.differences["rank"]}
    first = min(one.run.run)
    for rank in sorted(theory):
        told = theory[rank]
        mine = one.calls.loc[one.calls["rank"] == rank]
        equal = rank not in wrong and told.expected_bytes == told.measured_bytes == told.matched_bytes
        lowest = rank == first
        yield {
            "experiment": one.run.key,
            "model": one.run.name,
            "division": one.run.division,
            "note": one.run.note,
            "ranks": one.run.world,
            "sequence": one.run.sequence or None,
            "rank": rank,
            "calls": int(mine["calls"].sum()),
            "recorded_bytes": int(mine["payload_bytes"].sum()),
            "exact_bytes": told.expected_bytes,
            "matched_bytes": told.matched_bytes,
            "equal": "yes" if equal and one.last >= one.predictions[rank].steady else "no",
            "sent_bytes": one.sent(rank) if lowest else None,
            "sent_exact_bytes": one.sent_in_theory(rank) if lowest else None,
            "closed_form_bytes": one.closed_form if lowest else None,
            "why_not_closed_form": in_words(one.reasons(least=LEAST)) if lowest else None,
            "difference": one.difference,
        }


def by_operation(some: Iterable[Recorded], steps: int | None = None) -> pd.DataFrame:
    """Return `model`, `name`, `ranks`, `op`, `payload_bytes`, a mean over the ranks of the job.

    Bytes are those of a step, or with `steps` those of start-up and so many steps.
    """
    parts = []
    for one in some:
        if steps is None:
            table = one.per_rank(one.steady, "payload_bytes").reset_index(name="payload_bytes")
        else:
            table = one.of_steps(steps)
        parts.append(table.assign(model=one.run.name, name=one.run.division, ranks=one.run.world))
    return _joined(parts, ["model", "name", "ranks", "op", "payload_bytes"])


def by_role(some: Iterable[Recorded]) -> pd.DataFrame:
    """`model`, `name`, `ranks`, `role`, `wire_bytes` and `payload_bytes` of a step, mean over the ranks of the job."""
    parts = []
    for one in some:
        sums = one.steady.groupby("role", as_index=False)[["payload_bytes", "wire_bytes"]].sum()
        sums[["payload_bytes", "wire_bytes"]] /= len(one.run.of_stages)
        parts.append(sums.assign(model=one.run.name, name=one.run.division, ranks=one.run.world))
    return _joined(parts, ["model", "name", "ranks", "role", "wire_bytes", "payload_bytes"])


def sizes_of(some: Iterable[Recorded], op: str) -> pd.DataFrame:
    """`model`, `ranks`, `size`, `calls`, `payload_bytes` of a step, of one operation."""
    parts = []
    for one in some:
        mine = one.steady.loc[one.steady["op"] == op]
        sums = mine.groupby("size", as_index=False)[["calls", "payload_bytes"]].sum()
        parts.append(sums.assign(model=one.run.name, ranks=one.run.world))
    return _joined(parts, ["model", "ranks", "size", "calls", "payload_bytes"])


Value = Callable[[Recorded], float | None]


def compared(some: Iterable[Recorded], recorded: Value, exact: Value, form: Value, role: str | None) -> pd.DataFrame:
    """Compare recorded bytes with the exact expectation and the closed form, a row per run.

    Columns: `model`, `name`, `ranks`, `sequence`, `recorded_bytes`, `exact_bytes`, `closed_form_bytes`, `equal`,
    `times` (recorded / closed form), `why_not_closed_form`. `role`: the parallel dimension to compare; None: all.
    """
    rows = []
    for one in some:
        values = {"recorded_bytes": recorded(one), "exact_bytes": exact(one), "closed_form_bytes": form(one)}
        closed, seen = values["closed_form_bytes"], values["recorded_bytes"]
        rows.append(
            {
                "model": one.run.name,
                "name": one.run.division,
                "ranks": one.run.world,
                "sequence": one.run.sequence or None,
                **values,
                "equal": "yes" if one.equal and values["recorded_bytes"] == values["exact_bytes"] else "no",
                "times": seen / closed if closed and seen is not None else None,
                "why_not_closed_form": in_words(one.reasons(role, LEAST)),
            }
        )
    columns = ["recorded_bytes", "exact_bytes", "closed_form_bytes", "times"]
    names = ["model", "name", "ranks", "sequence", *columns[:3], "equal", "times", "why_not_closed_form"]
    return pd.DataFrame(rows, columns=names).astype(dict.fromkeys(columns, "float64"))


def _joined(parts: Sequence[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    if not parts:
        return pd.DataFrame({name: pd.Series(dtype=_type(name)) for name in columns})
    return pd.concat(parts, ignore_index=True)[columns]


def _type(column: str) -> Any:
    return object if column in ("model", "name", "op", "role") else "float64"
