"""What the paper states about time, and whether what was measured confirms, sharpens or contradicts it.

Verdicts that compare runs with each other are given only where the machine was quiet; on a busy one the numbers stand
there, and nothing is concluded. What happens within a run (who waits for whom) needs no quiet machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pandas as pd

from commtrace.analyses.engine import rows_of
from commtrace.formatting import format_bytes, format_duration, format_share, is_known
from examples.paper_study.volume.words import CONFIRMED, CONTRADICTED, SHARPENED, finding, listed

from .points import HIDDEN, LARGER_HIDDEN
from .receives import FIRST, HAND_SHAKE, HIDDEN_STATES, LATER_FIRST, METADATA, START
from .words import spread

NOT_TOLD: Final = "Cannot be told here"
QUIET: Final = 0.2
"""Cores that others may keep at work (median over the runs) for times to be compared between runs."""
COLDER: Final = 2.0
"""A first transfer that takes so many times a later one's is called cold ..."""
NOTICED_NS: Final = 1e6
"""... where it takes so much longer, too."""
MOSTLY: Final = 0.9


def busy(runs: pd.DataFrame) -> str:
    """Why runs cannot be compared with each other; "" where they can. `runs`: `time_runs`."""
    others = runs["others_cores"].dropna().astype(float)
    if not len(others):
        return "it is not known what else the machine did."
    if others.median() > QUIET:
        return (
            f"other programs kept {others.median():.1f} of {int(runs['cores'].max())} cores at work meanwhile (median)."
        )
    if runs.groupby(["scheme", "hidden", "seq_length"])["repeat"].nunique().min() < 2:
        return "not every point was run twice."
    return ""


def of_scale(points: pd.DataFrame, why_not: str) -> Iterator[str]:
    """Figures 1 and 2. `points`: `time_points`, of one sequence length."""
    shares = points.pivot_table(index="scheme", columns="hidden", values="in_calls_share", sort=False)
    if not {HIDDEN, LARGER_HIDDEN} <= {*shares.columns}:
        return
    both = shares[[HIDDEN, LARGER_HIDDEN]].dropna()
    grows = int((both[LARGER_HIDDEN] > both[HIDDEN]).sum())
    told = listed(
        f"{name} {format_share(low)} to {format_share(high)}"
        for name, (low, high) in zip(both.index, both.to_numpy(), strict=True)
    )
    verdict = CONFIRMED if grows == len(both) else CONTRADICTED if not grows else NOT_TOLD
    yield finding(
        '"communication begins to dominate computation at increasing scales", from 13 to 20 billion parameters.',
        NOT_TOLD if why_not else verdict,
        why_not,
        f"From hidden size {HIDDEN} to {LARGER_HIDDEN}, about four times the parameters and the computation per token, "
        f"the share of a step that a rank stands in calls goes from and to: {told}; it grows in {grows} of {len(both)} "
        "schemes. More ranks, which is what grows at scale, this machine does not have.",
    )


def of_lengths(points: pd.DataFrame, statement: str, least: float, why_not: str) -> Iterator[str]:
    """Figures 14b and 15c: more throughput with longer sequences, `least` times as much. `points`: one width."""
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
        verdict = CONFIRMED if min(ratios.values()) >= least else SHARPENED
    else:
        verdict = NOT_TOLD if any(rises) else CONTRADICTED
    lengths = points["seq_length"]
    yield finding(
        statement,
        NOT_TOLD if why_not else verdict,
        why_not,
        f"From {lengths.min()} to {lengths.max()} tokens the GFLOP/s of a rank change by a factor of "
        f"{listed(f'{ratio:.2f} ({name})' for name, ratio in ratios.items())}; they rise beyond the spread in "
        f"{sum(rises)} of {len(rises)} schemes.",
    )


def of_zero(points: pd.DataFrame, base: str, why_not: str) -> Iterator[str]:
    """Figure 14b: ZeRO against data parallelism, length by length. `points`: one width."""
    below, above, both = compared(points, base)
    if not both:
        return
    verdict = CONFIRMED if 2 * below > both else CONTRADICTED if 2 * above > both else NOT_TOLD
    yield finding(
        '"ZeRO optimizations will more often than not result in a decrease of flops for the given sequence length."',
        NOT_TOLD if why_not else verdict,
        why_not,
        f"Of {both} pairs of stage and length {below} are slower than {base} in every run, {above} faster in every "
        f"run, and {both - below - above} within the spread.",
    )


def compared(points: pd.DataFrame, base: str) -> tuple[int, int, int]:
    """Points of other schemes slower in every run than that of `base` with their length, faster in every, and all."""
    speeds = points.dropna(subset="tokens_per_s")
    pairs = speeds.loc[speeds["scheme"] != base].merge(
        speeds.loc[speeds["scheme"] == base], on="seq_length", suffixes=("", "_base")
    )
    below = pairs["tokens_per_s_most"] < pairs["tokens_per_s_least_base"]
    above = pairs["tokens_per_s_least"] > pairs["tokens_per_s_most_base"]
    return int(below.sum()), int(above.sum()), len(pairs)


def of_tensor(points: pd.DataFrame, tensor: str, pipeline: str, why_not: str) -> Iterator[str]:
    """Figure 15c: tensor parallelism against a pipeline. `points`: one width."""
    both = points.loc[points["scheme"].isin([tensor, pipeline])]
    _, above, pairs = compared(both, pipeline)
    if not pairs:
        return
    speeds = both.pivot_table(index="seq_length", columns="scheme", values="gflop_per_s")
    ratios = (speeds[tensor] / speeds[pipeline]).dropna()
    below, _, _ = compared(both, pipeline)
    verdict = CONFIRMED if above == pairs else CONTRADICTED if below == pairs else NOT_TOLD
    yield finding(
        '"the use of tensor parallelism will allow for a higher TFLOP-per-GPU count over pipeline parallelism (up to '
        'almost 2x more)".',
        NOT_TOLD if why_not else verdict,
        why_not,
        f"Two tensor-parallel ranks have {ratios.min():.2f} to {ratios.max():.2f} times the GFLOP/s of two stages with "
        f"four micro-batches; more in every run at {above} of {pairs} lengths, less at {below}.",
    )


def of_operations(first_steps: pd.DataFrame, why_not: str) -> Iterator[str]:
    """Whether receives alone are slow in the first step. `first_steps`: `time_first_steps`."""
    found = first_steps.groupby(["scheme", "op"], sort=False, as_index=False).median(numeric_only=True)
    same = found.loc[found["first_calls"] <= 1.5 * found["later_calls"]]
    waits, moves = _slower(same, "late_ns"), _slower(same, "transfer_ns")
    others = [name for name in [*waits, *moves] if not name.startswith("recv ")]
    receives = [name for name in [*waits, *moves] if name.startswith("recv ")]
    verdict = CONTRADICTED if others else SHARPENED if receives else CONTRADICTED
    yield finding(
        '"the receive operation is the only one to suffer from cold-cache performance".',
        NOT_TOLD if why_not else verdict,
        why_not,
        f"Held against later steps, the first one waits more than {COLDER:g} times as long for another rank (and a "
        f"millisecond longer) in: {listed(waits)}. It moves its bytes more than {COLDER:g} times as slowly, from when "
        f"all ranks are there, in: {listed(moves)}. Of {len(same)} pairs of operation and scheme; what the first step "
        "does more often than later ones is left out.",
    )


def _slower(found: pd.DataFrame, measure: str) -> list[str]:
    first, later = found[f"first_{measure}"], found[f"later_{measure}"]
    chosen = found.loc[(first > COLDER * later) & (first - later > NOTICED_NS)]
    return [
        f"{row.op} of {row.scheme} ({format_duration(one)}; {format_duration(other)} later)"
        for row, one, other in zip(rows_of(chosen), chosen[f"first_{measure}"], chosen[f"later_{measure}"], strict=True)
    ]


def of_small_messages(kinds: pd.DataFrame) -> Iterator[str]:
    """Why first receives of small messages take long. `kinds`: `receives.by_kind` of one point."""
    rows: dict[Any, Any] = {(row.what, row.when): row for row in rows_of(kinds)}
    metadata, shake = rows.get((METADATA, FIRST)), rows.get((HAND_SHAKE, START))
    if metadata is None or not is_known(metadata.late_ns_median):
        return
    waiting = metadata.late_ns / metadata.receive_ns
    computing = metadata.sender_computing_ns / metadata.late_ns if metadata.late_ns else 0.0
    later = rows.get((HIDDEN_STATES, LATER_FIRST))
    slow = later is not None and metadata.transfer_ns_median > COLDER * later.transfer_ns_median
    verdict = SHARPENED if waiting > MOSTLY else CONFIRMED if slow else CONTRADICTED
    waits = (
        " It is the wait for the first forward pass of the stage before, and the message is small because DeepSpeed "
        "sends the shapes before the first activations."
    )
    yield finding(
        'this is so "particularly in small message sizes (first iteration receive operations can cause on overhead on '
        'the order of thousands of milliseconds)".',
        verdict,
        f"The first receive of the first step is {format_bytes(metadata.payload_bytes)} of metadata and takes "
        f"{_took(metadata)}; {format_share(waiting)} of it is before the sender begins to send, and "
        f"{format_share(computing)} of "
        f"that the sender computes.{waits if verdict == SHARPENED else ''}",
        _beside(rows.get((HIDDEN_STATES, FIRST)), later),
        _shaken(shake),
    )


def _took(row: Any) -> str:
    return spread(format_duration, row.receive_ns_median, row.receive_ns_least, row.receive_ns_most)


def _beside(first: Any, later: Any) -> str:
    if first is None or later is None or not is_known(later.late_ns):
        return ""
    return (
        f"The {format_bytes(first.payload_bytes)} of hidden states right behind it take {_took(first)}. In later "
        "steps there "
        f"is no metadata, and the first receive is of hidden states: {_took(later)}, "
        f"{format_share(later.late_ns / later.receive_ns)} of it waiting for the sender."
    )


def _shaken(shake: Any) -> str:
    if shake is None or not is_known(shake.transfer_ns_median):
        return ""
    return (
        f"Before training, {format_bytes(shake.payload_bytes)} are sent to make connections "
        "(`PipelineEngine.__init__`): "
        f"{_took(shake)}, {format_share(shake.late_ns / shake.receive_ns)} of it waiting."
    )


def of_causes(sizes: pd.DataFrame) -> Iterator[str]:
    """What a first message costs where nothing is waited for. `sizes`: `receives.transfers_by_size`."""
    table = sizes.pivot_table(index="payload_bytes", columns="which", values="transfer_ns", sort=False).sort_index()
    later = "alone, later"
    causes = {
        "alone, first, connections made at once": "a connection that is new",
        "alone, first, connections made when used": "one that is made by its first message",
        "alone, later, into untouched memory": "memory that was never touched",
    }
    there = [name for name in causes if name in table]
    if later not in table or not there:
        return
    extra = {name: (table[name] - table[later]).dropna() for name in there}
    told = listed(
        f"{causes[name]} {_signed(more.iloc[0])} at {format_bytes(more.index[0])} and {_signed(more.iloc[-1])} at "
        f"{format_bytes(more.index[-1])}"
        for name, more in extra.items()
    )
    yield (
        "What else makes a first message slow, measured between ranks that do nothing but meet and send, against "
        f"{format_duration(table[later].iloc[0])} ({format_bytes(table.index[0])}) and "
        f"{format_duration(table[later].iloc[-1])} "
        f"({format_bytes(table.index[-1])}) of later ones: {told}. gloo makes its connections with the group, unless "
        "`TORCH_GLOO_LAZY_INIT=1`; libraries that make them for the first message (NCCL and RCCL make a communicator "
        "for each pair of ranks) have this cost, and theirs, in the hand-shake. How large theirs is cannot be told "
        "here."
    )


def _signed(ns: float) -> str:
    return f"{'+' if ns >= 0 else '-'}{format_duration(abs(ns))}"
