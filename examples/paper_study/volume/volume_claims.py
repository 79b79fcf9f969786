"""Claims of the paper about volume, each from tables of `volume_tables`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import pandas as pd

from commtrace.analyses.fold_engine import NamedTables
from commtrace.formatting import format_plural
from examples.paper_study.claims import CONFIRMED, CONTRADICTED, REFINED, Claim, Measure, value_range

from .dry_runs import DDP, ZERO_1, ZERO_2, ZERO_3, Plan

COMMAND: Final = "python -m examples.paper_study OUT --part volume"
RUN_LENGTHS: Final = (1, 10, 100)
"""Steps of a run for which the share of start-up is computed."""
SMALL_MESSAGE_BYTES: Final = 1 << 20
METADATA_BYTES: Final = 8 << 20
"""Bytes that the paper found beyond equation 4."""
_ALIGNED: Final = 0.1
"""Relative difference up to which a prediction "aligns well"."""
_NOTABLE: Final = 0.005
"""Difference between two shares that counts."""


def _claim(key: str, place: str, statement: str, verdict: str, measures: Sequence[Measure]) -> Claim:
    return Claim(key, place, statement, verdict, measures, COMMAND)


def shares_by_model(table: pd.DataFrame, op: str) -> dict[str, float]:
    """Return the share of an operation in the payload of each model's rows."""
    totals = table.groupby("model", sort=False)["payload_bytes"].sum()
    parts = table.loc[table["op"] == op].groupby("model", sort=False)["payload_bytes"].sum()
    return {str(model): float(parts.get(model, 0.0)) / float(total) for model, total in totals.items() if total}


def operation_shares(step: pd.DataFrame, runs: pd.DataFrame) -> Iterator[Claim]:
    """Yield the claims of figure 7, from `figure-07-step` and `figure-07-run`.

    all_reduce: refined if its share exceeds a quarter but is the same for all models. broadcast: confirmed if its share
    falls with the size of the model under every scheme, refined if under some.
    """
    reduced = shares_by_model(step.loc[step["name"].isin([ZERO_1, ZERO_2])], "all_reduce")
    if reduced:
        depends_on_model = max(reduced.values()) - min(reduced.values()) >= 2 * _NOTABLE
        yield _claim(
            "all-reduce-share", "Figure 7",
            "all_reduce is still a significant portion in ZeRO-1/2, as all models but 13B fit onto one GPU with DDP.",
            CONTRADICTED if min(reduced.values()) < 0.25 else CONFIRMED if depends_on_model else REFINED,
            [Measure("share of all_reduce in a step of ZeRO-1 and ZeRO-2", "share", reduced)],
        )  # fmt: skip
    sharded = runs.loc[runs["name"] != DDP]
    middle = sharded.loc[sharded["steps"] == RUN_LENGTHS[1]]
    shares = {str(name): shares_by_model(part, "broadcast") for name, part in middle.groupby("name", sort=False)}
    shares = {name: by_model for name, by_model in shares.items() if len(by_model) > 1}
    if shares:
        falling = [_falls([*by_model.values()]) for by_model in shares.values()]
        by_length = {
            steps: shares_by_model(sharded.loc[sharded["steps"] == steps], "broadcast") for steps in RUN_LENGTHS
        }
        yield _claim(
            "broadcast-share", "Figure 7",
            "The impact of broadcast at the start decreases as the model size increases.",
            CONFIRMED if all(falling) else REFINED if any(falling) else CONTRADICTED,
            [
                *(
                    Measure(f"share of start-up and {RUN_LENGTHS[1]} steps, {name}", "share", by_model)
                    for name, by_model in shares.items()
                ),
                *(
                    value_range(f"ZeRO-1 to 3, {format_plural(n, 'step')}", "share", by_length[n].values())
                    for n in RUN_LENGTHS
                ),
            ],
        )  # fmt: skip


def _falls(values: Sequence[float]) -> bool:
    return all(before > after for before, after in pairwise(values)) and values[0] - values[-1] >= _NOTABLE


def volume_ratios(against: pd.DataFrame) -> Iterator[Claim]:
    """Yield the claims of figure 8, from `figure-10`: confirmed if all ratios are within 1 % of the paper's."""
    sent = {(str(row["model"]), str(row["name"])): float(row["recorded_bytes"]) for _, row in against.iterrows()}
    for scheme, stated, amount in ((ZERO_1, 1.0, "the"), (ZERO_2, 1.0, "the"), (ZERO_3, 1.5, "1.5 times the")):
        ratios = {
            model: value / sent[model, DDP]
            for (model, name), value in sent.items()
            if name == scheme and sent.get((model, DDP))
        }
        if ratios:
            near = all(abs(ratio / stated - 1) < 0.01 for ratio in ratios.values())
            yield _claim(
                f"{scheme.lower()}-volume", "Figure 8",
                f"{scheme} has {amount} communication volume of data parallelism.",
                CONFIRMED if near else CONTRADICTED,
                [Measure("bytes sent in a step / those of DDP", "ratio", ratios)],
            )  # fmt: skip


def message_sizes(sizes: pd.DataFrame) -> Iterator[Claim]:
    """Yield the claims of figure 9, from `figure-09`.

    More sizes: confirmed if no model has fewer sizes than a smaller one, refined if the largest has more than the
    smallest. Small messages: refined if they are most of the calls, but below 1 % of the bytes.
    """
    kinds = {str(model): int(part["size"].nunique()) for model, part in sizes.groupby("model", sort=False)}
    counts = [*kinds.values()]
    grows = len(counts) > 1 and all(less <= more for less, more in pairwise(counts)) and counts[-1] > counts[0]
    yield _claim(
        "message-sizes", "Figure 9",
        "As the model size increases, more message sizes are utilized for each communication call.",
        CONFIRMED if grows else REFINED if counts[-1] > counts[0] else CONTRADICTED,
        [Measure("sizes of all_gather in a step of ZeRO-3", "count", kinds)],
    )  # fmt: skip
    small = sizes["size"] < SMALL_MESSAGE_BYTES
    calls, carried = (_small_share(sizes, small, column) for column in ("calls", "payload_bytes"))
    many, light = min(calls.values()) > 0.5, max(carried.values()) < 0.01
    yield _claim(
        "small-messages", "Figure 9",
        "Optimizations at smaller message sizes should be treated as equally important.",
        CONTRADICTED if not many else REFINED if light else CONFIRMED,
        [
            Measure("all_gathers below 1 MiB, share of calls", "share", calls),
            Measure("share of bytes", "share", carried),
        ],
    )  # fmt: skip


def _small_share(sizes: pd.DataFrame, small: pd.Series[bool], column: str) -> dict[str, float]:
    totals = sizes.groupby("model", sort=False)[column].sum()
    parts = sizes.loc[small].groupby("model", sort=False)[column].sum()
    return {str(model): float(parts.get(model, 0)) / float(total) for model, total in totals.items()}


def prediction(against: pd.DataFrame) -> Iterator[Claim]:
    """Yield the claim of figure 10, from `figure-10`: contradicted if a point is more than 10 % off."""
    known = against.dropna(subset="times")
    if not len(known):
        return
    ratios = known.groupby("name", sort=False)["times"]
    farthest = {str(name): float(max(part, key=lambda ratio: abs(ratio - 1))) for name, part in ratios}
    off = max(abs(ratio - 1) for ratio in farthest.values())
    yield _claim(
        "prediction", "Figure 10",
        "The prediction aligns well with the volume observed, across all model sizes and schemes.",
        CONTRADICTED if off > _ALIGNED else CONFIRMED,
        [
            Measure("recorded / closed form, farthest from 1", "ratio", farthest),
            Measure("points", "count", {"all": len(against), "equal to the expected calls": _equal(against)}),
        ],
    )  # fmt: skip


def _equal(table: pd.DataFrame) -> int:
    return int((table["equal"] == "yes").sum())


def indivisible_heads(plan: Plan) -> Iterator[Claim]:
    """Yield the claim of footnote 4: refined if 125M can be divided by some numbers of tensor-parallel ranks."""
    refused = sorted({run.tensor for run in plan.impossible if run.tensor > 1 and run.name == "125M"})
    possible = sorted({run.tensor for run in plan.divided if run.tensor > 1 and run.name == "125M"})
    if refused:
        values = {f"tensor {ranks}": float(ranks in possible) for ranks in sorted([*refused, *possible])}
        yield _claim(
            "heads", "Footnote 4",
            "The 125M-parameter model fails with pure tensor parallelism, as its heads are not divisible.",
            REFINED if possible else CONFIRMED,
            [Measure("heads divisible (1: yes)", "count", values)],
        )  # fmt: skip


def model_parallel_operations(tables: NamedTables) -> Iterator[Claim]:
    """Yield the claims of figure 12, from `figure-11`, `figure-12` and `figure-12-callers`.

    all_reduce: confirmed if most of its payload is in groups of one rank and called by DeepSpeed. all_gather: confirmed
    if it has most of the payload, refined if only among DeepSpeed's own calls between ranks.
    """
    payload = _by_layout(tables["figure-12"], "op")
    deepspeed = _by_layout(_called_by_deepspeed(tables), "op")
    roles = _by_layout(tables["figure-11"], "role")
    staged = [
        layout
        for layout, by_op in payload.items()
        if layout[1].startswith("pipeline") and "tensor" not in layout[1] and by_op.get("all_reduce")
    ]
    if staged:
        reduced = {layout: payload[layout]["all_reduce"] for layout in staged}
        alone = [roles[layout].get("self", 0.0) / reduced[layout] for layout in staged]
        own = [deepspeed[layout].get("all_reduce", 0.0) / reduced[layout] for layout in staged]
        sent = tables["figure-11"].query("role == 'self'")["wire_bytes"]
        yield _claim(
            "pipeline-all-reduce", "Figure 12",
            "Large all_reduces show up in the pure pipeline case, suspected to be internal to DeepSpeed.",
            CONFIRMED if min(alone) > 0.5 and min(own) > 0.5 else REFINED,
            [
                value_range("all_reduce payload in groups of one rank", "share", alone),
                value_range("called by DeepSpeed", "share", own),
                Measure("bytes sent in groups of one rank", "bytes", {"most": float(sent.max())}),
            ],
        )  # fmt: skip
    mixed = [layout for layout, by_op in payload.items() if " x tensor" in layout[1] and by_op.get("send")]
    if mixed:
        gathered = {layout: payload[layout].get("all_gather", 0.0) for layout in mixed}
        of_all = [gathered[layout] / sum(payload[layout].values()) for layout in mixed]
        # Everything in a group of one rank is DeepSpeed's own all_reduce.
        between_ranks = {
            layout: {
                **deepspeed[layout],
                "all_reduce": deepspeed[layout].get("all_reduce", 0.0) - roles[layout].get("self", 0.0),
            }
            for layout in mixed
        }
        of_own = [gathered[layout] / sum(between_ranks[layout].values()) for layout in mixed]
        largest = all(gathered[layout] == max(between_ranks[layout].values()) for layout in mixed)
        yield _claim(
            "mixed-all-gather", "Figure 12",
            "all_gather dominates in any mix of pipeline and tensor parallelism, despite point-to-point operations.",
            CONFIRMED if min(of_all) > 0.5 else REFINED if largest else CONTRADICTED,
            [
                value_range("all_gather / send", "ratio", [gathered[key] / payload[key]["send"] for key in mixed]),
                value_range("share of all payload", "share", of_all),
                value_range("share of DeepSpeed's own calls between ranks", "share", of_own),
            ],
        )  # fmt: skip


def _called_by_deepspeed(tables: NamedTables) -> pd.DataFrame:
    callers = tables["figure-12-callers"]
    return callers.loc[callers["caller"] == "DeepSpeed"]


def _by_layout(table: pd.DataFrame, column: str) -> dict[tuple[str, str], dict[str, float]]:
    """Return the payload by model and layout, then by operation or role."""
    sums: dict[tuple[str, str], dict[str, float]] = {}
    for row in table.to_dict("records"):
        by_value = sums.setdefault((str(row["model"]), str(row["name"])), {})
        by_value[str(row[column])] = by_value.get(str(row[column]), 0.0) + float(row["payload_bytes"])
    return sums


def model_parallel_volumes(tables: NamedTables) -> Iterator[Claim]:
    """Yield the claims of figure 13, from `figure-13-pipeline`, `figure-13-tensor` and the tables of figures 11 and 12.

    Pipeline: refined if 8 MiB are sent beyond equation 4 over a boundary between stages (they are no metadata). Tensor:
    refined if the volume is larger than equation 5 (the cause is not DeepSpeed).
    """
    if "figure-13-pipeline" in tables:
        table = tables["figure-13-pipeline"]
        pure = table.loc[~table["name"].str.contains("tensor")].dropna(subset="closed_form_bytes")
        boundaries = pure["name"].str.extract(r"pipeline (\d+)", expand=False).astype(int) - 1
        extra = ((pure["recorded_bytes"] - pure["closed_form_bytes"]) / boundaries).groupby(pure["model"], sort=False)
        if len(pure):
            by_model = {str(model): float(value) for model, value in extra.max().items()}
            yield _claim(
                "pipeline-extra", "Figure 13",
                "Send operations contain up to an extra eight megabytes, believed to be metadata of the sender.",
                REFINED if METADATA_BYTES in by_model.values() else CONTRADICTED,
                [Measure("sent beyond equation 4 over a boundary between stages", "bytes", by_model)],
            )  # fmt: skip
    if "figure-13-tensor" in tables:
        table = tables["figure-13-tensor"]
        ratios = table.loc[~table["name"].str.startswith("pipeline"), "times"].dropna()
        if len(ratios):
            deepspeed = _by_layout(_called_by_deepspeed(tables), "op")
            own = [
                (sum(deepspeed.get(layout, {}).values()) - roles.get("self", 0.0)) / roles["tensor"]
                for layout, roles in _by_layout(tables["figure-11"], "role").items()
                if layout[1].startswith("tensor")
            ]
            yield _claim(
                "tensor-volume", "Figure 13",
                "Tensor parallelism has a larger volume than predicted, believed to be due to DeepSpeed internals.",
                REFINED if ratios.min() > 1 else CONTRADICTED,
                [
                    value_range("recorded / equation 5", "ratio", ratios),
                    value_range("share called by DeepSpeed", "share", own),
                ],
            )  # fmt: skip


def gathered_over_lengths(table: pd.DataFrame) -> Iterator[Claim]:
    """Yield the claim of figure 14, from `figure-14`: refined if the volume grows under some schemes only."""
    growth = {
        str(name): float(ordered.iloc[-1] / ordered.iloc[0])
        for name, part in table.groupby("name", sort=False)
        if len(ordered := part.sort_values("sequence")["recorded_bytes"])
    }
    constant = [name for name, part in table.groupby("name", sort=False) if part["recorded_bytes"].nunique() == 1]
    if growth:
        shortest, longest = int(table["sequence"].min()), int(table["sequence"].max())
        yield _claim(
            "all-gather-length", "Figure 14",
            "The all_gather volume, of data and model parallelism, does not change with the length of sequences.",
            CONFIRMED if len(constant) == len(growth) else REFINED if constant else CONTRADICTED,
            [Measure(f"volume at {longest:,} / at {shortest:,} tokens", "ratio", growth)],
        )  # fmt: skip


_DOUBLING: Final = {
    "figure-15-recv": ("recv-length", "Receive volumes double with the length."),
    "figure-15-send": ("send-length", "Send volumes double, or grow slightly more than twofold."),
    "figure-15-tensor": ("tensor-length", "Volumes of tensor parallelism increase with the length."),
}


def volumes_over_lengths(tables: NamedTables) -> Iterator[Claim]:
    """Yield the claims of figure 15: confirmed if every doubling of the length doubles the volume within 1 %."""
    for name, (key, statement) in _DOUBLING.items():
        growth = {layout: ratios for layout, ratios in _growth_per_doubling(tables[name]) if ratios}
        if growth:
            exact = all(1.99 < ratio < 2.01 for ratios in growth.values() for ratio in ratios)
            extra = (tables[name]["recorded_bytes"] - tables[name]["closed_form_bytes"]).dropna().clip(lower=0)
            measures = [
                value_range(f"growth per doubling, {layout}", "ratio", ratios) for layout, ratios in growth.items()
            ]
            if len(extra):
                measures.append(value_range("bytes beyond the formula", "bytes", extra))
            yield _claim(key, "Figure 15", statement, CONFIRMED if exact else REFINED, measures)


def _growth_per_doubling(table: pd.DataFrame) -> Iterator[tuple[str, list[float]]]:
    for name, part in table.groupby("name", sort=False):
        ordered = part.sort_values("sequence")
        points = zip(ordered["sequence"], ordered["recorded_bytes"], strict=True)
        yield (
            str(name),
            [
                (more / less) ** (1 / math.log2(longer / length))
                for (length, less), (longer, more) in pairwise(points)
                if less
            ],
        )
