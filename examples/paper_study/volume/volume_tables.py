"""Tables of many dry runs, as the page shows them and as they are written to data/."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import pandas as pd

from commtrace.analyses.grouping import rows_of
from commtrace.network.networks import Network
from commtrace.rank_ranges import parse_ranks
from commtrace.theory.closed_forms import parameter_count
from commtrace.theory.expected_calls import exact_wire_bytes
from examples.paper_study.parts import Options

from .dry_runs import DATA_PARALLEL, DryRun, Plan, shape_of
from .recorded_dry_run import SEND, RecordedDryRun, format_causes

LEAST_SHARE: Final = 0.0005
"""Share of the closed form below which a cause is not named in a table."""
_MESSAGES: Final = (SEND, "recv")
_DEEPSPEED: Final = "deepspeed/"
"""Prefix of DeepSpeed's call sites."""


@dataclass(frozen=True)
class Results:
    """What the dry runs of a study recorded."""

    options: Options
    plan: Plan
    recorded: dict[DryRun, RecordedDryRun]
    unreadable: dict[DryRun, str]
    """Results that cannot be read, and why."""

    def of(self, runs: Iterable[DryRun]) -> list[RecordedDryRun]:
        """Return those of these runs that are done."""
        return [self.recorded[run] for run in runs if run in self.recorded]

    def missing(self, runs: Iterable[DryRun]) -> list[str]:
        """Return the labels of those that are not done, with the reason if their result cannot be read."""
        return [
            f"{run.label}: {self.unreadable[run]}" if run in self.unreadable else run.label
            for run in runs
            if run not in self.recorded
        ]


def points(runs: Iterable[RecordedDryRun]) -> pd.DataFrame:
    """Return a row per rank that was run, for all its calls from start-up to the last step.

    Columns: `experiment`, `model`, `division`, `note`, `ranks`, `sequence`, `rank`, `calls`; payload `recorded_bytes`
    and `exact_bytes` (what `commtrace check` expects), `matched_bytes` (in calls found exactly as expected); `equal`;
    of a step of the lowest rank `sent_bytes`, `sent_exact_bytes` and `closed_form_bytes` (wire bytes);
    `why_not_closed_form`, and `difference` where `equal` is not "yes".
    """
    return pd.DataFrame([row for run in runs for row in _rank_rows(run)])


def _rank_rows(recorded: RecordedDryRun) -> Iterator[dict[str, object]]:
    theory = {int(row.rank): row for row in rows_of(recorded.theory["theory"])}
    different, _ = recorded.verdict.differing
    first = min(recorded.run.run)
    for rank in sorted(theory):
        expected = theory[rank]
        calls = recorded.calls.loc[recorded.calls["rank"] == rank]
        equal = rank not in different and expected.expected_bytes == expected.measured_bytes == expected.matched_bytes
        lowest = rank == first
        yield {
            "experiment": recorded.run.key,
            "model": recorded.run.name,
            "division": recorded.run.division,
            "note": recorded.run.note,
            "ranks": recorded.run.world,
            "sequence": recorded.run.sequence or None,
            "rank": rank,
            "calls": int(calls["calls"].sum()),
            "recorded_bytes": int(calls["payload_bytes"].sum()),
            "exact_bytes": expected.expected_bytes,
            "matched_bytes": expected.matched_bytes,
            "equal": "yes" if equal and recorded.last >= recorded.predictions[rank].steady else "no",
            "sent_bytes": recorded.sent(rank) if lowest else None,
            "sent_exact_bytes": recorded.sent_in_theory(rank) if lowest else None,
            "closed_form_bytes": recorded.closed_form if lowest else None,
            "why_not_closed_form": format_causes(recorded.causes(least=LEAST_SHARE)) if lowest else None,
            "difference": recorded.difference,
        }


# ---- volumes ---------------------------------------------------------------------------------------------------------


def by_operation(runs: Iterable[RecordedDryRun], steps: int | None = None) -> pd.DataFrame:
    """Return `model`, `name`, `ranks`, `op` and `payload_bytes`, mean over the ranks of the job.

    It is for one step or, with `steps`, for start-up and that many steps.
    """
    parts = []
    for run in runs:
        if steps is None:
            table = run.per_rank(run.steady, "payload_bytes").reset_index(name="payload_bytes")
        else:
            table = run.of_steps(steps)
        parts.append(table.assign(**_layout(run)))
    return _joined(parts, ["model", "name", "ranks", "op", "payload_bytes"])


def by_role(runs: Iterable[RecordedDryRun]) -> pd.DataFrame:
    """Return `model`, `name`, `ranks`, `role`, `wire_bytes`, `payload_bytes` of a step, mean over the job's ranks."""
    parts = []
    for run in runs:
        sums = run.steady.groupby("role", as_index=False)[["payload_bytes", "wire_bytes"]].sum()
        sums[["payload_bytes", "wire_bytes"]] /= len(run.run.of_stages)
        parts.append(sums.assign(**_layout(run)))
    return _joined(parts, ["model", "name", "ranks", "role", "wire_bytes", "payload_bytes"])


def by_caller(runs: Iterable[RecordedDryRun]) -> pd.DataFrame:
    """Return `model`, `name`, `caller` ("DeepSpeed" or "the model"), `op`, `payload_bytes` of a step, mean."""
    parts = []
    for run in runs:
        own = run.steady["site"].str.startswith(_DEEPSPEED)
        for caller, part in (("DeepSpeed", run.steady.loc[own]), ("the model", run.steady.loc[~own])):
            table = run.per_rank(part, "payload_bytes").reset_index(name="payload_bytes")
            parts.append(table.assign(caller=caller, **_layout(run)))
    return _joined(parts, ["model", "name", "caller", "op", "payload_bytes"])


def sizes_of(runs: Iterable[RecordedDryRun], op: str) -> pd.DataFrame:
    """Return `model`, `ranks`, `size`, `calls`, `payload_bytes` of a step, of one operation."""
    parts = []
    for run in runs:
        calls = run.steady.loc[run.steady["op"] == op]
        sums = calls.groupby("size", as_index=False)[["calls", "payload_bytes"]].sum()
        parts.append(sums.assign(**_layout(run)))
    return _joined(parts, ["model", "ranks", "size", "calls", "payload_bytes"])


def _layout(recorded: RecordedDryRun) -> dict[str, Any]:
    return {"model": recorded.run.name, "name": recorded.run.division, "ranks": recorded.run.world}


def _joined(parts: Sequence[pd.DataFrame], columns: list[str]) -> pd.DataFrame:
    if not parts:
        text = ("model", "name", "caller", "op", "role")
        return pd.DataFrame({name: pd.Series(dtype=object if name in text else "float64") for name in columns})
    return pd.concat(parts, ignore_index=True)[columns]


# ---- recorded against predicted --------------------------------------------------------------------------------------

Value = Callable[[RecordedDryRun], float | None]


def against_formula(runs: Iterable[RecordedDryRun]) -> pd.DataFrame:
    """Compare what rank 0 sends in a step with the closed form and the expected calls."""
    return _compared(
        runs, RecordedDryRun.sent, RecordedDryRun.sent_in_theory, lambda recorded: recorded.closed_form, None
    )


def between_stages(runs: Iterable[RecordedDryRun]) -> pd.DataFrame:
    """Compare what all stages of a pipeline send to each other in a step with equation 4 and the expected calls."""
    return _compared(
        [recorded for recorded in runs if recorded.run.pipeline > 1],
        RecordedDryRun.between_stages,
        RecordedDryRun.between_stages_in_theory,
        lambda recorded: recorded.form_of("pipeline"),
        "pipeline",
    )


def within_layers(runs: Iterable[RecordedDryRun]) -> pd.DataFrame:
    """Compare what rank 0 sends in a step for tensor parallelism with equation 5 and the expected calls."""
    return _compared(
        [recorded for recorded in runs if recorded.run.tensor > 1],
        lambda recorded: recorded.sent_for("tensor"),
        lambda recorded: recorded.sent_for_in_theory("tensor"),
        lambda recorded: recorded.form_of("tensor"),
        "tensor",
    )


def _compared(
    runs: Iterable[RecordedDryRun], recorded: Value, exact: Value, form: Value, role: str | None
) -> pd.DataFrame:
    """Compare recorded bytes with both expectations; a row per run.

    Columns: `model`, `name`, `ranks`, `sequence`, `recorded_bytes`, `exact_bytes`, `closed_form_bytes`, `equal`,
    `times` (recorded / closed form), `why_not_closed_form`. `role`: the parallel dimension; None: all.
    """
    rows = []
    for run in runs:
        values = {"recorded_bytes": recorded(run), "exact_bytes": exact(run), "closed_form_bytes": form(run)}
        closed, measured = values["closed_form_bytes"], values["recorded_bytes"]
        rows.append(
            {
                **_layout(run),
                "sequence": run.run.sequence or None,
                **values,
                "equal": "yes" if run.equal and values["recorded_bytes"] == values["exact_bytes"] else "no",
                "times": measured / closed if closed and measured is not None else None,
                "why_not_closed_form": format_causes(run.causes(role, LEAST_SHARE)),
            }
        )
    columns = ["recorded_bytes", "exact_bytes", "closed_form_bytes", "times"]
    names = ["model", "name", "ranks", "sequence", *columns[:3], "equal", "times", "why_not_closed_form"]
    return pd.DataFrame(rows, columns=names).astype(dict.fromkeys(columns, "float64"))


def parameters(runs: Iterable[RecordedDryRun]) -> pd.DataFrame:
    """Compare equation 1 with the elements of the parameters: `model`, `equation_1`, `parameters`, `difference`."""
    rows = {}
    for recorded in runs:
        shape = shape_of(recorded.run.model)
        counted = parameter_count(shape["vocabulary"], shape["hidden"], shape["layers"], shape["sequence"])
        if recorded.parameters:
            share = counted / recorded.parameters - 1
            rows[recorded.run.name] = (recorded.run.name, counted, recorded.parameters, f"{share:+.2%}")
    return pd.DataFrame([*rows.values()], columns=["model", "equation_1", "parameters", "difference"])


# ---- over the length of sequences ------------------------------------------------------------------------------------


def by_length(runs: Iterable[RecordedDryRun], op: str) -> pd.DataFrame:
    """Return the payload of one operation in a step by sequence length, mean over the stages.

    Columns: `model`, `name`, `ranks`, `sequence`, `recorded_bytes`, `exact_bytes`, `closed_form_bytes` (missing where
    the paper has none), `equal`.
    """
    rows = []
    for run in runs:
        exact = _expected_payload(run, op)
        recorded = float(run.per_rank(run.steady, "payload_bytes").get(op, 0.0))
        if recorded or exact:
            rows.append(
                {
                    **_layout(run),
                    "sequence": run.run.sequence or shape_of(run.run.model)["sequence"],
                    "recorded_bytes": recorded,
                    "exact_bytes": exact,
                    "closed_form_bytes": _formula(run, op),
                    "equal": "yes" if run.equal and recorded == exact else "no",
                }
            )
    names = ["recorded_bytes", "exact_bytes", "closed_form_bytes"]
    table = pd.DataFrame(rows, columns=["model", "name", "ranks", "sequence", *names, "equal"])
    return table.astype(dict.fromkeys(names, "float64")).sort_values("sequence", kind="stable", ignore_index=True)


def within_layers_by_length(runs: Sequence[RecordedDryRun]) -> pd.DataFrame:
    """Return `within_layers` by sequence length, with the length of the model's file where none is given."""
    table = within_layers(runs)
    usual = shape_of(runs[0].run.model)["sequence"]
    table = table.assign(sequence=table["sequence"].fillna(usual).astype(int))
    return table.sort_values("sequence", kind="stable", ignore_index=True)


def _expected_payload(recorded: RecordedDryRun, op: str) -> float | None:
    if not all(rank in recorded.predictions for rank in recorded.run.of_stages):
        return None
    predictions = [recorded.predictions[rank] for rank in recorded.run.of_stages]
    sums = [
        sum(call.bytes for call in prediction.step(prediction.steady) if call.op == op) for prediction in predictions
    ]
    return sum(sums) / len(sums)


def _formula(recorded: RecordedDryRun, op: str) -> float | None:
    """Return the paper's formula for an operation, as payload of a rank.

    Equation 3 has two all_gathers of all parameters, equation 2 one; equation 4 is for all stages, and half of it is
    sent forward.
    """
    if op == "all_gather" and recorded.run.division in DATA_PARALLEL and recorded.closed_form:
        share = {"DDP": Fraction(0), "ZeRO-3": Fraction(2, 3)}.get(recorded.run.scheme, Fraction(1, 2))
        wire = float(share) * recorded.closed_form
        return wire / float(exact_wire_bytes("all_gather", recorded.run.data, recorded.run.data)) * recorded.run.data
    if op in _MESSAGES and recorded.form_of("pipeline"):
        return (recorded.form_of("pipeline") or 0.0) / recorded.run.pipeline / recorded.run.tensor
    return None


# ---- agreement with theory -------------------------------------------------------------------------------------------


def agreement(results: Results) -> pd.DataFrame:
    """Return how many points equal the expected calls: `compared`, `points`, `equal`."""
    plan = results.plan
    rows = []
    for title, runs in (
        ("data parallelism on one or two nodes (figure 10)", plan.node),
        ("data parallelism on up to 1,024 ranks", (*plan.node, *plan.sizes, *plan.scaled) if plan.scaled else ()),
        ("pipeline, tensor and data parallelism on 1,024 ranks", plan.combined),
        ("all dry runs", plan.all),
    ):
        done = results.of(dict.fromkeys(runs))
        if done:
            rows.append((title, len(done), sum(recorded.equal for recorded in done)))
    ranks = points(results.recorded.values())
    if len(ranks):
        rows.append(("all ranks that were run", len(ranks), int((ranks["equal"] == "yes").sum())))
    alike = [_stages_alike(recorded) for recorded in results.of(plan.alike)]
    if alike:
        rows.append(("runs in which all ranks of a stage make the same calls", len(alike), sum(alike)))
    return pd.DataFrame(rows, columns=["compared", "points", "equal"])


def _stages_alike(recorded: RecordedDryRun) -> bool:
    """Return whether ranks of the same stage make the same calls, so that one of them represents the others."""
    calls_of_stage: dict[int, set[frozenset[Any]]] = {}
    for rank, part in recorded.calls.groupby("rank"):
        sums = part.groupby(["step", "role", "op", "size", "group_size"])["calls"].sum()
        stage = int(str(rank)) // (recorded.run.world // recorded.run.pipeline)
        calls_of_stage.setdefault(stage, set()).add(frozenset(sums.items()))
    return all(len(kinds) == 1 for kinds in calls_of_stage.values())


# ---- times on a network ----------------------------------------------------------------------------------------------


def times_on(network: Network, runs: Sequence[RecordedDryRun]) -> pd.DataFrame:
    """Predict the communication time of a step by operation, for the rank that communicates longest.

    It is a sum that assumes no overlap. Columns: `model`, `name`, `ranks`, `rank`, `op`, `calls`,
    `calls_without_time`, `latency_us`, `bandwidth_us`, `time_us`, `how`.
    """
    columns = [
        "model", "name", "ranks", "rank", "op", "calls", "calls_without_time", "latency_us", "bandwidth_us", "time_us",
        "how",
    ]  # fmt: skip
    parts = []
    for run in runs:
        rows = [_predicted_time(network, row) for row in rows_of(run.steady)]
        if rows:
            table = pd.DataFrame(rows).groupby(["rank", "op"], as_index=False).agg(
                calls=("calls", "sum"), calls_without_time=("calls_without_time", "sum"),
                latency_us=("latency_us", "sum"), bandwidth_us=("bandwidth_us", "sum"), time_us=("time_us", "sum"),
                how=("how", "max"),
            )  # fmt: skip
            longest = table.groupby("rank")["time_us"].sum().idxmax()
            parts.append(table.loc[table["rank"] == longest].assign(**_layout(run)))
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


def _predicted_time(network: Network, row: Any) -> dict[str, object]:
    members = [int(row.rank), int(row.peer)] if row.op in _MESSAGES else parse_ranks(str(row.group_ranks))
    hosts = len({member // network.ranks_per_node for member in members})
    calls = int(row.calls)
    times: dict[str, object] = {"latency_us": 0.0, "bandwidth_us": 0.0, "time_us": 0.0, "how": ""}
    expected = network.expected(str(row.op), int(row.size), len(members), hosts)
    if expected is not None:
        latency, bandwidth = expected.latency_us * calls, expected.bandwidth_us * calls
        times = {
            "latency_us": latency, "bandwidth_us": bandwidth, "time_us": latency + bandwidth, "how": expected.source
        }  # fmt: skip
    without = calls if expected is None else 0
    return {"rank": int(row.rank), "op": str(row.op), "calls": calls, "calls_without_time": without, **times}


def fastest_and_slowest(networks: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return a row per network and model: `fastest`, `fastest_us`, `slowest`, `slowest_us` layouts of `times_on`."""
    rows = []
    for network, table in networks.items():
        for model, part in table.groupby("model", sort=False):
            sums = part.groupby("name", sort=False)["time_us"].sum()
            rows.append((network, model, sums.idxmin(), sums.min(), sums.idxmax(), sums.max()))
    columns = ["network", "model", "fastest", "fastest_us", "slowest", "slowest_us"]
    return pd.DataFrame(rows, columns=columns)
