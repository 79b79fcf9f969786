"""Figures 11 to 13: stages of a pipeline, tensor parallelism, and both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pandas as pd

from commtrace.formatting import format_bytes
from examples.paper_study.parts import Section

from . import figures
from .results import SEND, Recorded, in_words
from .tables import LEAST, Results, by_operation, by_role, compared
from .words import COMMAND, CONFIRMED, CONTRADICTED, SHARPENED, between, finding, listed

_DEEPSPEED: Final = "deepspeed/"
"""Where lines of code of DeepSpeed begin."""
_LEAST: Final = 0.01
_EXTRA_OF_THE_PAPER: Final = 8 << 20


def sections(results: Results) -> Iterator[Section]:
    """Figures 11, 12 and 13."""
    some = results.of(results.plan.divided)
    if some:
        missing = results.missing(results.plan.divided)
        yield _totals(results, some, missing)
        yield _breakdown(results, some, missing)
        yield _against(results, some, missing)


def between_stages(some: list[Recorded]) -> pd.DataFrame:
    """What all stages of a pipeline send to each other in a step, beside equation 4 and the exact expectation."""
    staged = [one for one in some if one.run.pipeline > 1]
    return compared(
        staged,
        Recorded.between_stages,
        Recorded.between_stages_in_theory,
        lambda one: one.form_of("pipeline"),
        "pipeline",
    )


def within_layers(some: list[Recorded]) -> pd.DataFrame:
    """What rank 0 sends in a step for tensor parallelism, beside equation 5 and the exact expectation."""
    shared = [one for one in some if one.run.tensor > 1]
    return compared(
        shared,
        lambda one: one.sent_for("tensor"),
        lambda one: one.sent_for_in_theory("tensor"),
        lambda one: one.form_of("tensor"),
        "tensor",
    )


# ---- figure 11 -------------------------------------------------------------------------------------------------------


def _totals(results: Results, some: list[Recorded], missing: list[str]) -> Section:
    table = by_role(some)
    return Section(
        "11",
        "Total volume: pipeline and tensor parallelism",
        [*_more(table), *_impossible(results)],
        figures={"figure-11": figures.totals(table, "What a rank sends in a step, by dimension", "bytes sent")},
        tables={"figure-11": table},
        commands=[COMMAND],
        missing=missing,
        look_for="Mean over the ranks of the job, with one copy of the model and one micro-batch. What a rank sends to "
        "itself is nothing.",
    )


def _more(table: pd.DataFrame) -> Iterator[str]:
    sums = table.groupby(["model", "name"], sort=False)["wire_bytes"].sum()
    found = []
    for model in table["model"].drop_duplicates():
        mine = {str(name): float(value) for name, value in sums[model].items()}
        least, most = min(mine, key=lambda name: mine[name]), max(mine, key=lambda name: mine[name])
        found.append(f"{model}: from {format_bytes(mine[least])} ({least}) to {format_bytes(mine[most])} ({most})")
    yield f"Least and most that a rank sends in a step: {'; '.join(found)}."


def _impossible(results: Results) -> Iterator[str]:
    """The paper's footnote 4 among them."""
    reasons = {one.label: why for one, why in results.plan.impossible.items()}
    if not reasons:
        return
    heads = [one for one in results.plan.impossible if one.tensor > 1 and one.name == "125M"]
    if heads:
        yield finding(
            "the 125M-parameter model fails with pure tensor parallelism, as its heads are not divisible.",
            SHARPENED if any(run.tensor > 1 and run.name == "125M" for run in results.plan.divided) else CONFIRMED,
            f"it cannot be divided by {listed(str(one.tensor) for one in heads)} "
            f"({results.plan.impossible[heads[0]]}), and can by "
            f"{listed(str(run.tensor) for run in results.plan.divided if run.name == '125M' and run.tensor > 1)}.",
        )
    others = {run.label: why for run, why in results.plan.impossible.items() if run not in heads}
    if others:
        yield f"Not possible: {'; '.join(f'{label} ({why})' for label, why in others.items())}."


# ---- figure 12 -------------------------------------------------------------------------------------------------------


def _breakdown(results: Results, some: list[Recorded], missing: list[str]) -> Section:
    table = by_operation(some)
    mixed = [one for one in some if one.run.pipeline > 1 and one.run.tensor > 1]
    texts = [*_within_one([one for one in some if one.run.pipeline > 1 and one.run.tensor == 1]), *_gathers(mixed)]
    return Section(
        "12",
        "Volume of each operation: pipeline and tensor parallelism",
        texts,
        figures={"figure-12": figures.volumes(table, "Payload of each operation in a step", "payload of a rank")},
        tables={"figure-12": table, "figure-12-callers": _by_caller(some)},
        commands=[COMMAND, *(f"commtrace report DIR/volume/{one.folder.name}" for one in mixed[:1])],
        missing=missing,
        look_for="Payload, mean over the ranks: what a logger counts. An all_reduce within a group of one rank has "
        "payload, and sends nothing.",
    )


def _within_one(staged: list[Recorded]) -> Iterator[str]:
    """All_reduces of a group of one rank."""
    if not staged:
        return
    shares, wire, sites = [], 0.0, set()
    for one in staged:
        reduced = one.steady.loc[one.steady["op"] == "all_reduce"]
        alone = reduced.loc[reduced["group_size"] == 1]
        total = float(reduced["payload_bytes"].sum())
        shares.append(float(alone["payload_bytes"].sum()) / total if total else 0.0)
        wire += float(alone["wire_bytes"].sum())
        sites |= set(alone.sort_values("payload_bytes")["site"].tail(1))
    yield finding(
        "large all_reduces show up in the pure pipeline case, suspected to be internal to DeepSpeed.",
        CONFIRMED if min(shares) > 0.5 and all(site.startswith(_DEEPSPEED) for site in sites) else SHARPENED,
        f"{between(shares)} of the payload of all_reduces is called from {listed(sorted(sites))}, in groups of one "
        f"rank: {format_bytes(wire)} of it leaves the rank.",
    )


def _gathers(mixed: list[Recorded]) -> Iterator[str]:
    if not mixed:
        return
    ratios, of_all, of_deepspeed = [], [], []
    largest: list[str] = []
    seen = True  # by DeepSpeed's logger, as the largest
    for one in mixed:
        payload = one.per_rank(one.steady, "payload_bytes")
        ratios.append(float(payload.get("all_gather", 0.0)) / float(payload.get(SEND, 1.0) or 1.0))
        of_all.append(float(payload.get("all_gather", 0.0)) / float(payload.sum()))
        largest.append(str(payload.idxmax()))
        theirs = one.steady["site"].str.startswith(_DEEPSPEED) & (one.steady["group_size"] > 1)
        own = one.per_rank(one.steady.loc[theirs], "payload_bytes")
        seen &= len(own) > 0 and own.idxmax() == "all_gather"
        of_deepspeed.append(float(own.get("all_gather", 0.0)) / float(own.sum() or 1.0))
    most = all(value > 0.5 for value in of_all)
    of_own = (
        "Of what DeepSpeed's own lines communicate, which is all that its logger sees, and beyond one rank, they are "
        f"{between(of_deepspeed)}: the all_reduces of the layers are the model's own calls."
    )
    why = {label for one in mixed for label, more in one.reasons("tensor", _LEAST) if more > 0 and "gather" in label}
    yield finding(
        "all_gather dominates in any mix of pipeline and tensor parallelism, despite point-to-point operations.",
        CONFIRMED if most else SHARPENED if seen else CONTRADICTED,
        f"all_gathers have {between(ratios, 'times')} times the payload of sends, and are {between(of_all)} of all; "
        f"most is {listed(largest)}.",
        of_own,
        f"They are there because of: {listed(sorted(why))}." if why else "",
    )


def _by_caller(some: list[Recorded]) -> pd.DataFrame:
    """`model`, `name`, `caller` (DeepSpeed, or the program and torch), `op`, `payload_bytes` of a step, mean."""
    rows = []
    for one in some:
        own = one.steady["site"].str.startswith(_DEEPSPEED)
        for caller, part in (("DeepSpeed", one.steady.loc[own]), ("the model", one.steady.loc[~own])):
            for op, value in one.per_rank(part, "payload_bytes").items():
                told = {"model": one.run.name, "name": one.run.division, "caller": caller}
                rows.append({**told, "op": str(op), "payload_bytes": float(value)})
    return pd.DataFrame(rows, columns=["model", "name", "caller", "op", "payload_bytes"])


# ---- figure 13 -------------------------------------------------------------------------------------------------------


def _against(results: Results, some: list[Recorded], missing: list[str]) -> Section:
    pipeline, tensor = between_stages(some), within_layers(some)
    batches = between_stages(results.of(results.plan.batches))
    drawn, tables = {}, {}
    for name, table, axis in (
        ("figure-13-pipeline", pipeline, "sent between all stages"),
        ("figure-13-tensor", tensor, "sent by a rank"),
    ):
        if len(table):
            drawn[name] = figures.against(table, f"Recorded against predicted: {axis}, in a step", axis)
            tables[name] = table
    if len(batches):
        tables["figure-13-micro-batches"] = batches
    return Section(
        "13",
        "Recorded against theory: pipeline and tensor parallelism",
        [*_extra(results, some), *_more_than_5(some, tensor)],
        figures=drawn,
        tables=tables,
        commands=[COMMAND, *(f"commtrace check DIR/volume/{one.folder.name}" for one in some[:1])],
        missing=missing,
        look_for="First equation 4, of all stages together; then equation 5, of a rank. x is recorded by closed form.",
    )


def _extra(results: Results, some: list[Recorded]) -> Iterator[str]:
    """What is sent beyond equation 4, over each boundary between stages and in each micro-batch."""
    pure = [one for one in some if one.run.pipeline > 1 and one.run.tensor == 1]
    extras: dict[int, list[str]] = {}
    for one in [*pure, *results.of(results.plan.batches)]:
        form = one.form_of("pipeline")
        if form:
            each = (one.between_stages() - form) / ((one.run.pipeline - 1) * one.run.micro_batches)
            extras.setdefault(round(each), []).append(one.run.name)
    if not extras:
        return
    why = listed(label for one in pure for label, more in one.reasons("pipeline", LEAST) if more > 0)
    told = "; ".join(f"{format_bytes(each)} ({listed(names)})" for each, names in sorted(extras.items()))
    met = any(each == _EXTRA_OF_THE_PAPER for each in extras)
    yield finding(
        "send operations contain up to an extra eight megabytes, believed to be metadata of the sender.",
        SHARPENED if met else CONTRADICTED,
        f"over each boundary between stages and in each micro-batch, beyond equation 4: {told}.",
        f"What it is: {why}." if why else "",
    )


def _more_than_5(some: list[Recorded], tensor: pd.DataFrame) -> Iterator[str]:
    known = tensor["times"].dropna()
    if not len(known):
        return
    pure = [one for one in some if one.run.tensor > 1 and one.run.pipeline == 1]
    why = {in_words(one.reasons(least=LEAST)): one for one in pure}
    first = next(iter(why.values()), None)
    told = in_words(first.reasons("tensor", LEAST)) if first is not None else ""
    alone = tensor.loc[~tensor["name"].str.startswith("pipeline"), "times"].dropna()
    yield finding(
        "tensor parallelism has a larger volume than predicted, believed to be due to DeepSpeed internals.",
        SHARPENED if len(alone) and alone.min() > 1 else CONTRADICTED,
        f"a rank sends {between(alone, 'times') if len(alone) else '-'} times equation 5 where there is no pipeline.",
        f"For {first.run.name}, {first.run.division}: {told}." if first is not None and told else "",
        f"DeepSpeed's own lines have {_share_of_deepspeed(pure)} of it." if pure else "",
    )


def _share_of_deepspeed(pure: list[Recorded]) -> str:
    shares = []
    for one in pure:
        mine = one.steady.loc[one.steady["role"] == "tensor"]
        own = mine.loc[mine["site"].str.startswith(_DEEPSPEED), "wire_bytes"].sum()
        shares.append(float(own) / float(mine["wire_bytes"].sum() or 1))
    return between(shares)
