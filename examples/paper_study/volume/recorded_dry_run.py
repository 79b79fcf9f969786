"""The log of a dry run and its comparison with theory, from which every figure of the volume part is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Final, TypeAlias

import pandas as pd

from commtrace.analyses.compare.causes import UNEXPLAINED
from commtrace.analyses.compare.rules_verdict import check_by_rules
from commtrace.analyses.compare.verdict import Verdict
from commtrace.analyses.compare.verdict_text import verdict_lines
from commtrace.analyses.fold_engine import NamedTables
from commtrace.analyses.grouping import rows_of
from commtrace.formatting import format_bytes, format_signed
from commtrace.job_row import JobRow
from commtrace.run import Run, open_run
from commtrace.theory import NotPredictedError, Prediction, predict
from commtrace.theory.expected_calls import exact_wire_bytes

from .dry_runs import DryRun

SEND: Final = "send"
START_UP: Final = -1

CallFilter: TypeAlias = Callable[[str, str], bool]
"""Whether calls of a role and an operation count."""

_CALL_KEY: Final = ["rank", "step", "role", "op", "payload_bytes", "group_size", "group_ranks", "peer", "site"]


@dataclass(frozen=True)
class RecordedDryRun:
    """Recorded and expected calls of one dry run."""

    run: DryRun
    folder: Path
    calls: pd.DataFrame
    """Equal calls, counted: `rank`, `step` (-1: start-up), `role`, `op`, `size` (payload of a call), `group_size`,
    `group_ranks`, `peer`, `site`, `calls`, `payload_bytes`, `wire_bytes`."""
    theory: NamedTables
    """Tables of `commtrace check`: `theory`, `expected`, `reconciliation`, `waterfall`, `waterfall_by_role`."""
    verdict: Verdict
    predictions: Mapping[int, Prediction]
    """By rank, if theory has rules for it."""
    parameters: int
    """Number of parameters on the lowest rank that was run: of the whole model, or of its stage."""

    @property
    def last(self) -> int:
        """The last step; all that would follow equal it."""
        return int(self.calls["step"].max())

    @property
    def equal(self) -> bool:
        """Whether every rank made exactly the expected calls, and the last step is a steady one."""
        steady = all(self.last >= prediction.steady for prediction in self.predictions.values())
        return self.verdict.agrees and steady

    @property
    def difference(self) -> str:
        """The differences that `commtrace check` reports; empty if there are none."""
        if self.equal:
            return ""
        steady = max((prediction.steady for prediction in self.predictions.values()), default=0)
        early = [f"steps are equal from {steady} on, but the last one is {self.last}"] if self.last < steady else []
        differing = [] if self.verdict.agrees else verdict_lines(self.verdict, ("expected", "recorded"), 120, "the log")
        return " ".join(line.strip() for line in differing) + "".join(early)

    @cached_property
    def stages(self) -> pd.DataFrame:
        """The calls of the first rank of each stage, which represents its stage."""
        return self.calls.loc[self.calls["rank"].isin(self.run.of_stages)]

    @cached_property
    def steady(self) -> pd.DataFrame:
        """The calls of the last step."""
        return self.stages.loc[self.stages["step"] == self.last]

    @cached_property
    def start(self) -> pd.DataFrame:
        """The calls of start-up."""
        return self.stages.loc[self.stages["step"] == START_UP]

    def of_steps(self, number: int) -> pd.DataFrame:
        """Return `op`, `payload_bytes` of start-up and `number` steps, the last one repeated; mean over the ranks."""
        first = self.stages.loc[self.stages["step"] < min(self.last, number)]
        sums = self.per_rank(first, "payload_bytes")
        repeated = self.per_rank(self.steady, "payload_bytes") * max(number - self.last, 0)
        return sums.add(repeated, fill_value=0.0).rename_axis("op").reset_index(name="payload_bytes")

    def per_rank(self, calls: pd.DataFrame, column: str) -> pd.Series[float]:
        """Sum a column by operation, as the mean over the ranks of the job (all stages have equally many)."""
        return calls.groupby("op")[column].sum() / len(self.run.of_stages)

    # ---- in the scope of a formula: a step of one rank, or between all stages ----------------------------------------

    def sent(self, rank: int = 0) -> float:
        """Return the wire bytes of a rank in a step."""
        return float(self.steady.loc[self.steady["rank"] == rank, "wire_bytes"].sum())

    def sent_in_theory(self, rank: int = 0) -> float | None:
        """Return the expected wire bytes of a rank in a step; None without rules."""
        return self._expected(rank, lambda role, op: True)

    def sent_for(self, role: str, rank: int = 0) -> float:
        """Return the wire bytes of a rank in a step, of one parallel dimension."""
        chosen = (self.steady["rank"] == rank) & (self.steady["role"] == role)
        return float(self.steady.loc[chosen, "wire_bytes"].sum())

    def sent_for_in_theory(self, role: str, rank: int = 0) -> float | None:
        """Return the expected wire bytes of a rank in a step, of one parallel dimension; None without rules."""
        return self._expected(rank, lambda call_role, op: call_role == role)

    def between_stages(self) -> float:
        """Return the bytes that all stages of a pipeline send to each other in a step, of all tensor-parallel ranks."""
        sends = self.steady.loc[(self.steady["op"] == SEND) & (self.steady["role"] == "pipeline")]
        return float(sends["payload_bytes"].sum()) * self.run.tensor

    def between_stages_in_theory(self) -> float | None:
        """Return the expected bytes between all stages in a step; None without rules."""
        total = 0.0
        for rank in self.run.of_stages:
            expected = self._expected(rank, lambda role, op: (role, op) == ("pipeline", SEND))
            if expected is None:
                return None
            total += expected
        return total * self.run.tensor

    def _expected(self, rank: int, counts: CallFilter) -> float | None:
        if rank not in self.predictions:
            return None
        prediction = self.predictions[rank]
        total = Fraction(0)
        for call in prediction.step(prediction.steady):
            if counts(call.role, call.op):
                total += (
                    exact_wire_bytes(call.op, call.payload, call.ranks or prediction.ranks_of(call.role)) * call.calls
                )
        return float(total)

    @property
    def closed_form(self) -> float | None:
        """The sum of the paper's formulas; None without rules."""
        first = self.predictions.get(min(self.run.run))
        return None if first is None else float(first.closed_form.bytes)

    def form_of(self, role: str) -> float | None:
        """Return the formula of one parallel dimension; None if it has none."""
        first = self.predictions.get(min(self.run.run))
        if first is None:
            return None
        forms = first.forms or (first.closed_form,)
        return next((float(form.bytes) for form in forms if form.role == role), None)

    def causes(self, role: str | None = None, least: float = 0.0) -> list[tuple[str, int]]:
        """Return the causes of what a rank sends beyond or below the closed form, with wire bytes, largest first.

        Args:
            role: Parallel dimension of the causes; None: all.
            least: Leave out causes with less than this share of the closed form.
        """
        table = self.theory["waterfall"] if role is None else self.theory["waterfall_by_role"]
        if role is not None and not len(table):
            table = self.theory["waterfall"]
        elif role is not None:
            table = table.loc[table["role"] == role]
        form = float(table.loc[table["kind"] == "closed form", "bytes"].sum())
        causes = [(str(row.label), int(row.bytes)) for row in rows_of(table) if row.kind in ("cause", UNEXPLAINED)]
        amounts = {extra for _, extra in causes}
        significant = [(label, extra) for label, extra in causes if -extra not in amounts and abs(extra) > least * form]
        return sorted(significant, key=lambda cause: -abs(cause[1]))


def format_causes(causes: list[tuple[str, int]]) -> str:
    """Format causes with their signed bytes."""
    return "; ".join(f"{label} ({format_signed(extra, format_bytes)})" for label, extra in causes)


def read(run: DryRun, folder: Path) -> RecordedDryRun:
    """Read the log of a dry run. Raises LogError."""
    log = open_run(folder)
    verdict, comparison = check_by_rules(log, strict=True)
    theory = comparison.tables(include_matching_steps=True)
    return RecordedDryRun(run, folder, _calls(log), theory, verdict, _predictions(log), _parameters(log))


def _calls(log: Run) -> pd.DataFrame:
    events = log.events()
    events = events.astype({"role": str, "op": str, "site": str, "group_ranks": str})
    # Collectives of a group are equal whatever their root; messages differ by peer.
    keyed = events.assign(peer=events["peer"].where(events["op"].isin((SEND, "recv")), -1), calls=1)
    sums = keyed.assign(size=keyed["payload_bytes"]).groupby(_CALL_KEY, dropna=False, as_index=False, observed=True)
    table = sums.agg(calls=("calls", "sum"), sum_bytes=("size", "sum"), wire_bytes=("wire_bytes", "sum"))
    return table.rename(columns={"payload_bytes": "size", "sum_bytes": "payload_bytes"})


def _predictions(log: Run) -> dict[int, Prediction]:
    predictions: dict[int, Prediction] = {}
    for process in log.processes:
        jobs = [*process.tables.jobs.values()]
        if len(jobs) == 1:
            try:
                predictions[process.rank] = predict(jobs[0])
            except NotPredictedError:
                continue
    return predictions


def _parameters(log: Run) -> int:
    return JobRow.read(log.job or {"parameters": []}).elements
