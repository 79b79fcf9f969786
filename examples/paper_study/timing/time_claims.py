"""Claims of the paper about time, each from tables of `time_tables`.

Claims that compare runs with each other get a verdict only if the machine was otherwise idle (`why_not_comparable`).
Claims about a single run (which rank waits for which) need no idle machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pandas as pd

from commtrace.analyses.grouping import rows_of
from commtrace.formatting import is_known
from examples.paper_study.claims import (
    CONFIRMED,
    CONTRADICTED,
    INCONCLUSIVE,
    REFINED,
    Claim,
    Measure,
    value_range,
)

from .receives import FIRST, HANDSHAKE, HIDDEN_STATES, LATER_FIRST, METADATA, START
from .trainings import HIDDEN, LARGER_HIDDEN

COMMAND: Final = "python -m examples.paper_study OUT --part time"
IDLE_CORES: Final = 0.2
"""Cores that other programs may keep busy (median over the runs) for times of runs to be comparable."""
COLD_FACTOR: Final = 2.0
"""A first call is cold if it takes this many times as long as later ones ..."""
COLD_NS: Final = 1e6
"""... and this much longer."""
_MOSTLY: Final = 0.9


def why_not_comparable(runs: pd.DataFrame) -> str:
    """Return why runs cannot be compared with each other; "" if they can. `runs`: `time_runs`."""
    others = runs["others_cores"].dropna().astype(float)
    if not len(others):
        return "load of the machine not known"
    if others.median() > IDLE_CORES:
        return f"machine busy: others used {others.median():.1f} of {int(runs['cores'].max())} cores (median)"
    if runs.groupby(["scheme", "hidden", "seq_length"])["repeat"].nunique().min() < 2:
        return "some points were run only once"
    return ""


def _claim(key: str, place: str, statement: str, verdict: str, measures: Sequence[Measure], reason: str = "") -> Claim:
    return Claim(key, place, statement, INCONCLUSIVE if reason else verdict, measures, COMMAND, reason)


def scale(points: pd.DataFrame, reason: str) -> Iterator[Claim]:
    """Yield the claim of figures 1 and 2. `points`: `time_points` of one sequence length.

    Confirmed if the share of communication grows with the width of the model under all schemes, contradicted if under
    none, else inconclusive: the number of ranks, which grows with scale, is not varied.
    """
    shares = points.pivot_table(index="scheme", columns="hidden", values="in_calls_share", sort=False)
    if not {HIDDEN, LARGER_HIDDEN} <= {*shares.columns}:
        return
    both = shares[[HIDDEN, LARGER_HIDDEN]].dropna()
    growing = int((both[LARGER_HIDDEN] > both[HIDDEN]).sum())
    undecided = (
        "" if growing in (0, len(both)) else f"grows for {growing} of {len(both)} schemes, number of ranks not varied"
    )
    yield _claim(
        "scale", "Figures 1, 2",
        "Communication begins to dominate computation at increasing scales, from 13 to 20 billion parameters.",
        CONFIRMED if growing else CONTRADICTED,
        [
            Measure(f"share of a step in calls, hidden size {width}", "share", _by_scheme(both[width]))
            for width in (HIDDEN, LARGER_HIDDEN)
        ],
        reason or undecided,
    )  # fmt: skip


def _by_scheme(values: pd.Series[Any]) -> dict[str, float]:
    return {str(scheme): float(value) for scheme, value in values.items()}


LENGTH_CLAIMS: Final[Mapping[str, tuple[str, str, float]]] = {
    "data-parallel-throughput": (
        "Figure 14", "2-2.5x more TFLOP/s per GPU from 512 to 4096 tokens, data parallelism and ZeRO.", 2
    ),
    "model-parallel-throughput": (
        "Figure 15", "Similar to the data-parallel results, an increase in throughput with the sequence length.", 1
    ),
}  # fmt: skip
"""Key: place, statement, and the least factor that it states."""


def throughput_over_lengths(key: str, points: pd.DataFrame, reason: str) -> Iterator[Claim]:
    """Yield a claim of figure 14 or 15 about longer sequences. `points`: `time_points` of one width.

    Confirmed if the GFLOP/s of all schemes rise beyond the spread of the runs by the stated factor, refined if by less,
    contradicted if none rises.
    """
    place, statement, factor = LENGTH_CLAIMS[key]
    ratios, rises = {}, []
    for scheme, part in points.groupby("scheme", sort=False):
        ordered = part.dropna(subset="gflop_per_s").sort_values("seq_length")
        if len(ordered) > 1:
            first, last = ordered.iloc[0], ordered.iloc[-1]
            ratios[str(scheme)] = float(last["gflop_per_s"] / first["gflop_per_s"])
            rises.append(bool(last["gflop_per_s_least"] > first["gflop_per_s_most"]))
    if not ratios:
        return
    if all(rises):
        verdict = CONFIRMED if min(ratios.values()) >= factor else REFINED
    else:
        verdict = INCONCLUSIVE if any(rises) else CONTRADICTED
    lengths = points["seq_length"]
    yield _claim(
        key, place, statement, verdict,
        [
            Measure(f"GFLOP/s at {lengths.max()} / at {lengths.min()} tokens", "factor", ratios),
            Measure("increase exceeds the spread", "count", {"schemes": sum(rises)}),
        ],
        reason,
    )  # fmt: skip


def zero_throughput(points: pd.DataFrame, base: str, reason: str) -> Iterator[Claim]:
    """Yield the claim of figure 14 about ZeRO. `points`: `time_points` of one width; `base`: data parallelism.

    Confirmed if most pairs of stage and length are slower in every run, contradicted if most are faster in every run.
    """
    slower, faster, pairs = count_differences(points, base)
    if not pairs:
        return
    verdict = CONFIRMED if 2 * slower > pairs else CONTRADICTED if 2 * faster > pairs else INCONCLUSIVE
    yield _claim(
        "zero-throughput", "Figure 14",
        "ZeRO optimizations will more often than not result in a decrease of flops for the given sequence length.",
        verdict,
        [
            Measure(
                f"pairs of stage and length, against {base}", "count",
                {"slower in every run": slower, "faster in every run": faster, "all": pairs},
            )
        ],
        reason or ("most pairs are within the spread" if verdict == INCONCLUSIVE else ""),
    )  # fmt: skip


def count_differences(points: pd.DataFrame, base: str) -> tuple[int, int, int]:
    """Count the points of other schemes: slower than `base` in every run, faster in every run, and all."""
    speeds = points.dropna(subset="tokens_per_s")
    pairs = speeds.loc[speeds["scheme"] != base].merge(
        speeds.loc[speeds["scheme"] == base], on="seq_length", suffixes=("", "_base")
    )
    slower = pairs["tokens_per_s_most"] < pairs["tokens_per_s_least_base"]
    faster = pairs["tokens_per_s_least"] > pairs["tokens_per_s_most_base"]
    return int(slower.sum()), int(faster.sum()), len(pairs)


def tensor_against_pipeline(points: pd.DataFrame, tensor: str, pipeline: str, reason: str) -> Iterator[Claim]:
    """Yield the claim of figure 15 about tensor parallelism and pipelines. `points`: `time_points` of one width.

    Confirmed if tensor parallelism is faster in every run at all lengths, contradicted if slower at all.
    """
    both = points.loc[points["scheme"].isin([tensor, pipeline])]
    slower, faster, pairs = count_differences(both, pipeline)
    if not pairs:
        return
    speeds = both.pivot_table(index="seq_length", columns="scheme", values="gflop_per_s")
    decided = pairs in (slower, faster)
    yield _claim(
        "tensor-pipeline", "Figure 15",
        "Tensor parallelism allows a higher TFLOP-per-GPU count than pipeline parallelism (up to almost 2x).",
        CONFIRMED if faster else CONTRADICTED,
        [
            value_range(f"GFLOP/s of {tensor} / {pipeline}", "factor", (speeds[tensor] / speeds[pipeline]).dropna()),
            Measure("lengths", "count", {"all": pairs, "faster in every run": faster, "slower in every run": slower}),
        ],
        reason or ("" if decided else "some lengths are within the spread"),
    )  # fmt: skip


def cold_operations(first_steps: pd.DataFrame, reason: str) -> Iterator[Claim]:
    """Yield the claim that only receives are cold. `first_steps`: `time_first_steps`.

    Contradicted if another operation waits or transfers COLD_FACTOR times as long in the first step as later (or if no
    receive does), else refined. Operations that the first step calls more often than later ones are left out.
    """
    medians = first_steps.groupby(["scheme", "op"], sort=False, as_index=False).median(numeric_only=True)
    medians = medians.loc[medians["first_calls"] <= 1.5 * medians["later_calls"]]
    measures, names = [], []
    for title, column in (("cold waits", "late_ns"), ("cold transfers", "transfer_ns")):
        first, later = medians[f"first_{column}"], medians[f"later_{column}"]
        cold = medians.loc[(first > COLD_FACTOR * later) & (first - later > COLD_NS)]
        cold_names = [f"{row.op} of {row.scheme}" for row in rows_of(cold)]
        names += cold_names
        for when in ("first", "later"):
            values = dict(zip(cold_names, map(float, cold[f"{when}_{column}"]), strict=True))
            measures.append(Measure(f"{title}, {when} step", "ns", values))
    only_receives = bool(names) and all(name.startswith("recv") for name in names)
    yield _claim(
        "cold-receive", "Section on figure 15",
        "The receive operation is the only one to suffer from cold-cache performance.",
        REFINED if only_receives else CONTRADICTED,
        [*measures, Measure("pairs of operation and scheme", "count", {"all": len(medians)})],
        reason,
    )  # fmt: skip


def cold_small_messages(kinds: pd.DataFrame) -> Iterator[Claim]:
    """Yield the claim about the first receive of a small message. `kinds`: `receives.by_kind` of one point.

    Refined if that receive is mostly waiting for the sender's first forward pass; confirmed if its transfer is cold,
    else contradicted.
    """
    rows: dict[Any, Any] = {(row.what, row.when): row for row in rows_of(kinds)}
    metadata, later = rows.get((METADATA, FIRST)), rows.get((HIDDEN_STATES, LATER_FIRST))
    if metadata is None or not is_known(metadata.late_ns_median):
        return
    waiting = metadata.late_ns / metadata.receive_ns
    slow = later is not None and metadata.transfer_ns_median > COLD_FACTOR * later.transfer_ns_median
    shown = {
        "handshake": rows.get((HANDSHAKE, START)),
        "metadata, first step": metadata,
        "hidden states that follow": rows.get((HIDDEN_STATES, FIRST)),
        "first hidden states of later steps": later,
    }
    known = {name: row for name, row in shown.items() if row is not None and is_known(row.late_ns)}
    computing = metadata.sender_computing_ns / metadata.late_ns if metadata.late_ns else 0.0
    yield _claim(
        "cold-small-message", "Section on figure 15",
        "This is so particularly in small message sizes (first receives can take thousands of milliseconds).",
        REFINED if waiting > _MOSTLY else CONFIRMED if slow else CONTRADICTED,
        [
            Measure("receive", "ns", {name: float(row.receive_ns_median) for name, row in known.items()}),
            Measure(
                "share before the sender calls send", "share",
                {name: float(row.late_ns / row.receive_ns) for name, row in known.items() if row.when != FIRST or
                 row is metadata},
            ),
            Measure("share of that in which the sender computes", "share", {"metadata, first step": float(computing)}),
        ],
    )  # fmt: skip
