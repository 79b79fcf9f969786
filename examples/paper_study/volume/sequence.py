"""Figures 14 and 15, their volumes: over the length of sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

import pandas as pd

from commtrace.formatting import format_bytes
from commtrace.theory.expected_calls import exact_wire_bytes
from examples.paper_study.parts import Section

from . import figures
from .model_parallel import within_layers
from .results import SEND, Recorded
from .runs import DATA_PARALLEL, shape_of
from .tables import LEAST, Results
from .words import COMMAND, CONFIRMED, CONTRADICTED, SHARPENED, between, finding, listed


def sections(results: Results) -> Iterator[Section]:
    """Figures 14 and 15."""
    some = results.of(results.plan.lengths)
    if some:
        missing = results.missing(results.plan.lengths)
        yield _gathers(some, missing)
        yield _messages(some, missing)


def by_length(some: list[Recorded], op: str) -> pd.DataFrame:
    """Return the payload of a step by sequence length.

    Columns `model`, `name`, `ranks`, `sequence`, `recorded_bytes`, `exact_bytes` (payload of a step, mean over ranks),
    `closed_form_bytes` (missing where the paper has none), `equal`.
    """
    rows = []
    for one in some:
        exact = _expected(one, op)
        recorded = float(one.per_rank(one.steady, "payload_bytes").get(op, 0.0))
        if recorded or exact:
            rows.append(
                {
                    "model": one.run.name,
                    "name": one.run.division,
                    "ranks": one.run.world,
                    "sequence": one.run.sequence or shape_of(one.run.model)["sequence"],
                    "recorded_bytes": recorded,
                    "exact_bytes": exact,
                    "closed_form_bytes": _form(one, op),
                    "equal": "yes" if one.equal and recorded == exact else "no",
                }
            )
    names = ["recorded_bytes", "exact_bytes", "closed_form_bytes"]
    columns = ["model", "name", "ranks", "sequence", *names, "equal"]
    table = pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(names, "float64"))
    return table.sort_values("sequence", kind="stable", ignore_index=True)


def _expected(one: Recorded, op: str) -> float | None:
    """Payload of a step, mean over the stages."""
    if not all(rank in one.predictions for rank in one.run.of_stages):
        return None
    told = [one.predictions[rank] for rank in one.run.of_stages]
    sums = [sum(each.bytes for each in of.step(of.steady) if each.op == op) for of in told]
    return sum(sums) / len(sums)


def _form(one: Recorded, op: str) -> float | None:
    """Equation 3 has two all_gathers of all parameters, 2 one; equation 4 is of all stages, half of it sent forward."""
    if op == "all_gather" and one.run.division in DATA_PARALLEL and one.closed_form:
        of_them = {"DDP": Fraction(0), "ZeRO-3": Fraction(2, 3)}.get(one.run.scheme, Fraction(1, 2))
        wire = float(of_them) * one.closed_form
        return wire / float(exact_wire_bytes("all_gather", one.run.data, one.run.data)) * one.run.data
    if op in (SEND, "recv") and one.form_of("pipeline"):
        return (one.form_of("pipeline") or 0.0) / one.run.pipeline / one.run.tensor
    return None


# ---- figure 14 -------------------------------------------------------------------------------------------------------


def _gathers(some: list[Recorded], missing: list[str]) -> Section:
    table = by_length(some, "all_gather")
    still, moving = _split(table)
    text = finding(
        "the all_gather volume, of data and model parallelism, does not change with the length of sequences.",
        SHARPENED if still and moving else CONFIRMED if still else CONTRADICTED,
        f"it does not for {listed(still)}" + ("; it does for " + _growths(table, moving) if moving else "."),
        _why_gathered(some, moving),
    )
    return Section(
        "14",
        "All_gather volume over the length of sequences",
        [text] if len(table) else [],
        figures=(
            {"figure-14": figures.by_length(table, "All_gathers of a step", "payload of a rank")} if len(table) else {}
        ),
        tables={"figure-14": table},
        commands=[COMMAND],
        missing=missing,
        look_for=f"{some[0].run.name} on {some[0].run.world} ranks. Lines are recorded, rings the exact expectation, "
        "dotted what the paper's formula has of it.",
    )


def _split(table: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Schemes whose volume is the same for all lengths, and the others."""
    kinds = table.groupby("name", sort=False)["recorded_bytes"].nunique()
    return [str(name) for name, n in kinds.items() if n == 1], [str(name) for name, n in kinds.items() if n > 1]


def _growths(table: pd.DataFrame, names: list[str]) -> str:
    told = []
    for name in names:
        part = table.loc[table["name"] == name].sort_values("sequence")
        low, high = part.iloc[0], part.iloc[-1]
        told.append(
            f"{name}: {format_bytes(low['recorded_bytes'])} for {low['sequence']:,} tokens, "
            f"{format_bytes(high['recorded_bytes'])} for {high['sequence']:,}"
        )
    return "; ".join(told) + "."


def _why_gathered(some: list[Recorded], moving: list[str]) -> str:
    """Dimension and line of the all_gathers that grow."""
    told = set()
    for one in some:
        if one.run.division in moving:
            mine = one.steady.loc[(one.steady["op"] == "all_gather") & (one.steady["role"] != "data")]
            told |= {(str(role), str(site)) for role, site in zip(mine["role"], mine["site"], strict=True)}
    return f"What grows is gathered over {listed(sorted({f'{role} ({site})' for role, site in told}))}." if told else ""


# ---- figure 15 -------------------------------------------------------------------------------------------------------


def _messages(some: list[Recorded], missing: list[str]) -> Section:
    sends, receives = by_length(some, SEND), by_length(some, "recv")
    tensor = _sequences(within_layers(some), some)
    texts = [
        _doubling("receive volumes double with the length", receives),
        _doubling("send volumes double, or grow slightly more than twofold", sends, _beyond(some)),
    ]
    if len(tensor):
        texts.append(_doubling("volumes of tensor parallelism increase with the length", tensor))
    return Section(
        "15",
        "Send, receive and all_reduce volumes over the length of sequences",
        [text for text in texts if text],
        figures={
            name: figures.by_length(table, title, axis)
            for name, table, title, axis in (
                ("figure-15-send", sends, "Sends of a step", "payload of a rank"),
                ("figure-15-recv", receives, "Receives of a step", "payload of a rank"),
                ("figure-15-tensor", tensor, "Tensor parallelism", "bytes sent by rank 0"),
            )
            if len(table)
        },
        tables={"figure-15-send": sends, "figure-15-recv": receives, "figure-15-tensor": tensor},
        commands=[COMMAND],
        missing=missing,
        look_for=f"{some[0].run.name} on {some[0].run.world} ranks; dotted the paper's formula. Mean over the stages.",
    )


def _sequences(table: pd.DataFrame, some: list[Recorded]) -> pd.DataFrame:
    """With the length that the model's file says, where none is given."""
    usual = shape_of(some[0].run.model)["sequence"]
    filled = table.assign(sequence=table["sequence"].fillna(usual).astype(int))
    return filled.sort_values("sequence", kind="stable", ignore_index=True)


def _beyond(some: list[Recorded]) -> str:
    """What stages send to each other that the formula does not count."""
    staged = [one for one in some if (one.steady["op"] == SEND).any()]
    why = listed(label for one in staged for label, more in one.reasons("pipeline", LEAST) if more > 0)
    return f"What is beyond the formula: {why}." if why != "none" else ""


def _doubling(paper: str, table: pd.DataFrame, why: str = "") -> str:
    """By how much the volume grows from one length to its double (or the next one that was run)."""
    told, all_ratios = [], []
    for name, part in table.groupby("name", sort=False):
        values = part.sort_values("sequence")
        pairs = pairwise(zip(values["sequence"], values["recorded_bytes"], strict=True))
        ratios = [(more / less) ** (1 / math.log2(longer / length)) for (length, less), (longer, more) in pairs if less]
        if ratios:
            all_ratios += ratios
            told.append(f"{name} {between(ratios, 'times')}")
    if not told:
        return ""
    verdict = CONFIRMED if all(1.99 < ratio < 2.01 for ratio in all_ratios) else SHARPENED
    closed = (table["recorded_bytes"] - table["closed_form_bytes"]).dropna()
    more = f"Beyond the formula are {between(closed.clip(lower=0), 'bytes')}." if len(closed) else ""
    return finding(f"{paper}.", verdict, f"with every doubling of the length: {'; '.join(told)}.", more, why)
