"""A dry run's log, with theory beside it: what every figure of the volume part is made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Final, TypeAlias

import pandas as pd

from commtrace.analyses import reconciliation
from commtrace.analyses.check.verdict import Verdict, judge
from commtrace.analyses.check.verdict_text import lines
from commtrace.analyses.engine import NamedTables, fold, rows_of
from commtrace.analyses.reconciliation.causes import UNEXPLAINED
from commtrace.formatting import format_bytes
from commtrace.run import Run, open_run
from commtrace.theory import NotPredictedError, Prediction, predict
from commtrace.theory.expected_calls import exact_wire_bytes

from .runs import DryRun

SEND: Final = "send"
START_UP: Final = -1

Wanted: TypeAlias = Callable[[str, str], bool]
"""Of a role and an operation."""

_ALIKE: Final = ["rank", "step", "role", "op", "payload_bytes", "group_size", "group_ranks", "peer", "site"]


@dataclass(frozen=True)
class Recorded:
    """What one dry run recorded, and what it should have. Bytes are payload, or wire: what ranks must send at least."""

    run: DryRun
    folder: Path
    calls: pd.DataFrame
    """Calls that are alike: `rank`, `step` (-1: start-up), `role`, `op`, `size` (payload of a call), `group_size`,
    `group_ranks`, `peer`, `site`, `calls`, `payload_bytes`, `wire_bytes`."""
    theory: NamedTables
    """As `commtrace check` compares: `theory`, `expected`, `reconciliation`, `waterfall`, `waterfall_by_role`."""
    verdict: Verdict
    predictions: Mapping[int, Prediction]
    """Of each rank that theory has rules for."""
    parameters: int
    """Elements of the parameters of the lowest rank that was run: of the whole model, or of a stage's part."""

    @property
    def last(self) -> int:
        """The last step, which those that would follow are like."""
        return int(self.calls["step"].max())

    @property
    def equal(self) -> bool:
        """Every rank that was run made exactly the calls that theory expects, and the last step is a steady one."""
        steady = all(self.last >= prediction.steady for prediction in self.predictions.values())
        return self.verdict.agrees and steady

    @property
    def difference(self) -> str:
        """What `commtrace check` says where they are not equal; empty where they are."""
        if self.equal:
            return ""
        steady = max((prediction.steady for prediction in self.predictions.values()), default=0)
        early = [f"steps are alike from {steady} on, and the last one is {self.last}"] if self.last < steady else []
        return " ".join(line.strip() for line in ([] if self.verdict.agrees else lines(self.verdict))) + "".join(early)

    @cached_property
    def stages(self) -> pd.DataFrame:
        """The calls of the first rank of each stage, which stands for all of its stage."""
        return self.calls.loc[self.calls["rank"].isin(self.run.of_stages)]

    @cached_property
    def steady(self) -> pd.DataFrame:
        """Of the last step."""
        return self.stages.loc[self.stages["step"] == self.last]

    @cached_property
    def start(self) -> pd.DataFrame:
        """Of start-up."""
        return self.stages.loc[self.stages["step"] == START_UP]

    def of_steps(self, number: int) -> pd.DataFrame:
        """Of start-up and so many steps, the last one repeated: `op`, `payload_bytes`; mean over the job's ranks."""
        first = self.stages.loc[self.stages["step"] < min(self.last, number)]
        sums = self.per_rank(first, "payload_bytes")
        repeated = self.per_rank(self.steady, "payload_bytes") * max(number - self.last, 0)
        return sums.add(repeated, fill_value=0.0).rename_axis("op").reset_index(name="payload_bytes")

    def per_rank(self, calls: pd.DataFrame, column: str) -> pd.Series[float]:
        """By operation, mean over the ranks of the job: each stage has as many."""
        return calls.groupby("op")[column].sum() / len(self.run.of_stages)

    # ---- in the scope of a formula: a step of one rank, or between all stages ----------------------------------------

    def sent(self, rank: int = 0) -> float:
        """Wire bytes of a rank in a step."""
        return float(self.steady.loc[self.steady["rank"] == rank, "wire_bytes"].sum())

    def sent_in_theory(self, rank: int = 0) -> float | None:
        """The same, expected; None without rules."""
        return self._expected(rank, lambda role, op: True)

    def sent_for(self, role: str, rank: int = 0) -> float:
        """Wire bytes of a rank in a step, of one parallel dimension."""
        mine = self.steady.loc[(self.steady["rank"] == rank) & (self.steady["role"] == role)]
        return float(mine["wire_bytes"].sum())

    def sent_for_in_theory(self, role: str, rank: int = 0) -> float | None:
        """The same, expected."""
        return self._expected(rank, lambda its, op: its == role)

    def between_stages(self) -> float:
        """What the stages of one pipeline send to each other in a step, tensor-parallel ranks added up."""
        sends = self.steady.loc[(self.steady["op"] == SEND) & (self.steady["role"] == "pipeline")]
        return float(sends["payload_bytes"].sum()) * self.run.tensor

    def between_stages_in_theory(self) -> float | None:
        """The same, expected."""
        told = [self._expected(rank, lambda role, op: (role, op) == ("pipeline", SEND)) for rank in self.run.of_stages]
        known = [one for one in told if one is not None]
        return sum(known) * self.run.tensor if len(known) == len(told) else None

    def _expected(self, rank: int, wanted: Wanted) -> float | None:
        if rank not in self.predictions:
            return None
        prediction = self.predictions[rank]
        some = [one for one in prediction.step(prediction.steady) if wanted(one.role, one.op)]
        each = (
            exact_wire_bytes(one.op, one.payload, one.ranks or prediction.ranks_of(one.role)) * one.calls
            for one in some
        )
        return float(sum(each, Fraction(0)))

    @property
    def closed_form(self) -> float | None:
        """What the paper's formulas say, added as it adds them; None without rules."""
        first = self.predictions.get(min(self.run.run))
        return None if first is None else float(first.closed_form.bytes)

    def form_of(self, role: str) -> float | None:
        """The formula of one parallel dimension; None where it has none."""
        first = self.predictions.get(min(self.run.run))
        if first is None:
            return None
        forms = first.forms or (first.closed_form,)
        return next((float(form.bytes) for form in forms if form.role == role), None)

    def reasons(self, role: str | None = None, least: float = 0.0) -> list[tuple[str, int]]:
        """Why a rank sends more or less than the formula: the sentence of each cause, its wire bytes; largest first.

        `role`: of one dimension only; `least`: leave out what is less than this share of the formula.
        """
        table = self.theory["waterfall"] if role is None else self.theory["waterfall_by_role"]
        if role is not None and not len(table):
            table = self.theory["waterfall"]
        elif role is not None:
            table = table.loc[table["role"] == role]
        form = float(table.loc[table["kind"] == "closed form", "bytes"].sum())
        causes = [(str(row.label), int(row.bytes)) for row in rows_of(table) if row.kind in ("cause", UNEXPLAINED)]
        causes = [one for one in causes if -one[1] not in (more for _, more in causes)]  # what cancels out
        some = [one for one in causes if abs(one[1]) > least * form]
        return sorted(some, key=lambda one: -abs(one[1]))


def in_words(reasons: list[tuple[str, int]]) -> str:
    """Causes with their bytes, signed."""
    return "; ".join(f"{label} ({'+' if more > 0 else '-'}{format_bytes(abs(more))})" for label, more in reasons)


def read(run: DryRun, folder: Path) -> Recorded:
    """What the dry run left in `folder`. Raises LogError."""
    log = open_run(folder)
    theory = fold(log, [reconciliation.ANALYSIS])
    verdict = judge(theory, log.ranks, None)
    return Recorded(run, folder, _calls(log), theory, verdict, _predictions(log), _parameters(log))


def _calls(log: Run) -> pd.DataFrame:
    events = log.events()
    events = events.astype({"role": str, "op": str, "site": str, "group_ranks": str})
    # All of a group of ranks that a call has no peer in are alike; of messages the neighbour matters.
    told = events.assign(peer=events["peer"].where(events["op"].isin((SEND, "recv")), -1), calls=1)
    sums = told.assign(size=told["payload_bytes"]).groupby(_ALIKE, dropna=False, as_index=False, observed=True)
    table = sums.agg(calls=("calls", "sum"), sum_bytes=("size", "sum"), wire_bytes=("wire_bytes", "sum"))
    return table.rename(columns={"payload_bytes": "size", "sum_bytes": "payload_bytes"})


def _predictions(log: Run) -> dict[int, Prediction]:
    found: dict[int, Prediction] = {}
    for process in log.processes:
        jobs = [*process.tables.jobs.values()]
        if len(jobs) == 1:
            try:
                found[process.rank] = predict(jobs[0])
            except NotPredictedError:
                continue
    return found


def _parameters(log: Run) -> int:
    job = log.job or {}
    return sum(math.prod(one["shape"]) for one in job.get("parameters", ()))
