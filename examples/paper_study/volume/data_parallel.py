"""Figures 7 to 10: DDP and ZeRO-1, 2 and 3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pandas as pd

from commtrace.formatting import format_bytes, format_count, format_plural, format_share
from commtrace.theory.closed_forms import parameter_count
from examples.paper_study.parts import Section

from . import figures
from .results import Recorded, in_words
from .runs import DDP, ZERO_1, ZERO_2, ZERO_3, shape_of
from .tables import Results, by_operation, compared, sizes_of
from .words import COMMAND, CONFIRMED, CONTRADICTED, SHARPENED, between, falling, finding, growing, listed, times

STEPS: Final = (1, 10, 100)
"""Lengths of a run for which the share of its beginning is told."""
SMALL: Final = 1 << 20
NOTABLE: Final = 0.005
"""A difference between shares."""
ALIGNED: Final = 0.1
"""What the paper's "aligns well" is taken for: within a tenth."""


def sections(results: Results) -> Iterator[Section]:
    """Figures 7, 8, 9 and 10."""
    node = results.of(results.plan.node)
    if node:
        missing = results.missing(results.plan.node)
        yield _shares(results, node, missing)
        yield _volumes(results, node, missing)
    sizes = results.of(results.plan.sizes)
    if sizes:
        yield _sizes(results, sizes)
    if node:
        yield _predicted(results, node, results.missing(results.plan.node))


def against_formula(some: list[Recorded]) -> pd.DataFrame:
    """What rank 0 sends in a step beside both expectations."""
    return compared(some, Recorded.sent, Recorded.sent_in_theory, lambda one: one.closed_form, None)


def _schemes(some: list[Recorded], *wanted: str) -> list[Recorded]:
    return [one for one in some if one.run.division in wanted]


def _share(table: pd.DataFrame, op: str) -> dict[str, float]:
    """Of each model, the share of an operation in all rows that it has."""
    sums = table.groupby("model", sort=False)["payload_bytes"].sum()
    mine = table.loc[table["op"] == op].groupby("model", sort=False)["payload_bytes"].sum()
    return {str(model): float(mine.get(model, 0.0)) / float(total) for model, total in sums.items() if total}


# ---- figure 7 --------------------------------------------------------------------------------------------------------


def _shares(results: Results, node: list[Recorded], missing: list[str]) -> Section:
    step = by_operation(node)
    runs = pd.concat([by_operation(node, steps).assign(steps=steps) for steps in STEPS], ignore_index=True)
    texts = [*_all_reduce_stays(results, node), *_broadcast_falls(runs)]
    return Section(
        "7",
        "Share of each operation: ZeRO-1, 2, 3",
        texts,
        figures={
            "figure-07-step": figures.shares(step, "Share of each operation in a training step"),
            "figure-07-run": figures.shares(
                runs.loc[runs["steps"] == STEPS[1]], f"Share of each operation in start-up and {STEPS[1]} steps"
            ),
        },
        tables={"figure-07-step": step, "figure-07-run": runs},
        commands=[COMMAND, *(_report(one) for one in _schemes(node, ZERO_1)[:1])],
        missing=missing,
        look_for="Shares of the payload of a rank; first of a training step once steps are alike, then with start-up.",
    )


def _report(one: Recorded) -> str:
    return f"commtrace report DIR/volume/{one.folder.name}"


def _all_reduce_stays(results: Results, node: list[Recorded]) -> Iterator[str]:
    some = _schemes(node, ZERO_1, ZERO_2)
    if not some:
        return
    share_of = _share(by_operation(some), "all_reduce")
    sent = {one.run.name: one for one in _schemes(some, ZERO_1)}
    why = [label for one in some for label, more in one.reasons(least=0.01) if more > 0]
    found = [
        f"all_reduce is {between(share_of.values())} of the payload of a step of ZeRO-1 and ZeRO-2, "
        f"{format_share([*share_of.values()][-1])} for the largest model and {format_share(next(iter(share_of.values())))} for the "
        "smallest."
    ]
    if max(share_of.values()) - min(share_of.values()) < 0.01 and len(share_of) > 1:
        found.append("So it does not depend on what fits onto a GPU.")
    if why:
        found.append(f"The cause that `commtrace check` and the waterfall name: {listed(why)}.")
    for one in results.of(results.plan.switched):
        if one.run.scheme == ZERO_2 and one.closed_form:
            names = one.per_rank(one.steady, "payload_bytes")
            most = names.sort_values(ascending=False)
            found.append(
                f"With `use_multi_rank_bucket_allreduce` off, {one.run.name} under {one.run.division} sends "
                f"{times(one.sent() / one.closed_form)} times equation 2, by {most.index[0]} and {most.index[1]}."
            )
    verdict = SHARPENED if sent and min(share_of.values()) > 0.25 else CONTRADICTED
    yield finding(
        "all_reduce is still a significant portion in ZeRO-1/2, as all models but 13B fit onto one GPU with DDP.",
        verdict,
        *found,
    )


def _broadcast_falls(runs: pd.DataFrame) -> Iterator[str]:
    """Broadcasts at start-up, over models for runs of one length, and over lengths for one model."""
    middle = runs.loc[(runs["steps"] == STEPS[1]) & (runs["name"] != DDP)]
    shares = {str(name): _share(part, "broadcast") for name, part in middle.groupby("name", sort=False)}
    shares = {name: of for name, of in shares.items() if len(of) > 1}
    if not shares:
        return
    falls = [name for name, of in shares.items() if falling([*of.values()], NOTABLE)]
    told = []
    for name, of in shares.items():
        same = max(of.values()) - min(of.values()) < NOTABLE
        each = ", ".join(f"{format_share(value)} ({model})" for model, value in of.items())
        told.append(f"{name} {between(of.values())} for every model" if same else f"{name} {each}")
    by_steps = {
        steps: _share(runs.loc[(runs["steps"] == steps) & (runs["name"] != DDP)], "broadcast") for steps in STEPS
    }
    lengths = ", ".join(f"{between(by_steps[steps].values())} of {format_plural(steps, 'step')}" for steps in STEPS)
    yield finding(
        "the impact of broadcast at the start decreases as the model size increases.",
        CONFIRMED if len(falls) == len(shares) else SHARPENED if falls else CONTRADICTED,
        f"its share of the payload of start-up and {STEPS[1]} steps: {'; '.join(told)}.",
        f"It follows from the number of steps far more: it is {lengths}.",
    )


# ---- figure 8 --------------------------------------------------------------------------------------------------------


def _volumes(results: Results, node: list[Recorded], missing: list[str]) -> Section:
    step, whole = by_operation(node), by_operation(node, STEPS[1])
    return Section(
        "8",
        "Volume of each operation: ZeRO-1, 2, 3",
        [*_ratios(node)],
        figures={
            "figure-08-step": figures.volumes(step, "Volume of each operation in a step", "payload of a rank"),
            "figure-08-run": figures.volumes(
                whole, f"Volume of each operation in start-up and {STEPS[1]} steps", "payload of a rank"
            ),
        },
        tables={"figure-08-step": step, "figure-08-run": whole},
        commands=[COMMAND],
        missing=missing,
        look_for="Each panel has its own unit. A buffer counts once here, whatever is done with it.",
    )


def _ratios(node: list[Recorded]) -> Iterator[str]:
    sent = {(one.run.name, one.run.division): one.sent() for one in node}
    for scheme, wanted in ((ZERO_1, 1.0), (ZERO_2, 1.0), (ZERO_3, 1.5)):
        found = {
            model: value / sent[model, DDP]
            for (model, name), value in sent.items()
            if name == scheme and sent.get((model, DDP))
        }
        if found:
            # DDP reduces gradients in the type of its parameters, as ZeRO does: bytes compare.
            near = all(abs(value / wanted - 1) < 0.01 for value in found.values())
            each = ", ".join(f"{times(value)} ({model})" for model, value in found.items())
            paper = "" if wanted == 1 else f"{wanted:g} times "
            yield finding(
                f"{scheme} has {paper}the communication volume of data parallelism.",
                CONFIRMED if near else CONTRADICTED,
                f"what a rank must send in a step is, by that of DDP, {each}.",
            )


# ---- figure 9 --------------------------------------------------------------------------------------------------------


def _sizes(results: Results, some: list[Recorded]) -> Section:
    table = sizes_of(some, "all_gather")
    kinds = table.groupby("model", sort=False)["size"].nunique()
    small = table.loc[table["size"] < SMALL]
    found = []
    for model, part in table.groupby("model", sort=False):
        few = small.loc[small["model"] == model]
        calls, total = part["calls"].sum(), part["payload_bytes"].sum()
        low, high = part.loc[part["size"] > 0, "size"].min(), part["size"].max()
        found.append(
            f"{model}: {format_plural(int(calls), 'call')} of {format_plural(int(kinds[model]), 'size')}, {format_bytes(low)} to "
            f"{format_bytes(high)}; {format_share(few['calls'].sum() / calls)} of the calls are below {format_bytes(SMALL)} and carry "
            f"{format_share(few['payload_bytes'].sum() / total)} of the bytes."
        )
    texts = [
        finding(
            "as the model size increases, more message sizes are utilized for each communication call, and to varying "
            "frequency.",
            CONFIRMED if growing([*kinds]) else SHARPENED if kinds.iloc[-1] > kinds.iloc[0] else CONTRADICTED,
            "distinct sizes of all_gathers in a step of ZeRO-3: "
            f"{', '.join(f'{format_count(number)} ({model})' for model, number in kinds.items())}.",
        ),
        finding(
            "optimizations at smaller message sizes should be treated as equally important.",
            SHARPENED,
            *found,
        ),
    ]
    switched = [one for one in results.of(results.plan.switched) if one.run.scheme == ZERO_3]
    for one in switched:
        mine = sizes_of([one], "all_gather")
        default = next((other for other in results.of(results.plan.node) if _same(other, one)), None)
        if default is not None:
            before = int(sizes_of([default], "all_gather")["calls"].sum())
            texts.append(
                f"Sizes are chosen by settings: {one.run.name} on {one.run.world} ranks makes "
                f"{format_plural(before, 'all_gather')} a step, and {format_count(mine['calls'].sum())} with "
                "`stage3_prefetch_bucket_size`, `stage3_max_reuse_distance` and `stage3_param_persistence_threshold` 0 "
                "and nothing recomputed."
            )
    return Section(
        "9",
        "Message sizes of all_gather: ZeRO-3",
        texts,
        figures={"figure-09": figures.message_sizes(table, "All_gathers of a step by message size, ZeRO-3")},
        tables={"figure-09": table},
        commands=[COMMAND, *(_report(one) for one in some[-1:])],
        missing=results.missing(results.plan.sizes),
        look_for="Left how many calls have a size, right how many bytes they move; sizes are whole outputs.",
    )


def _same(one: Recorded, other: Recorded) -> bool:
    mine, yours = one.run, other.run
    return (mine.model, mine.scheme, mine.world) == (yours.model, yours.scheme, yours.world)


# ---- figure 10 -------------------------------------------------------------------------------------------------------


def _predicted(results: Results, node: list[Recorded], missing: list[str]) -> Section:
    table = against_formula(node)
    texts = [_aligned(table), *_why(node), *_switched(results), *_equation_1(node)]
    return Section(
        "10",
        "Recorded against predicted: DDP, ZeRO-1, 2, 3",
        texts,
        figures={"figure-10": figures.against(table, "What a rank sends in a step", "bytes sent")},
        tables={"figure-10": table},
        commands=[COMMAND, *(f"commtrace check DIR/volume/{one.folder.name}" for one in node[-1:])],
        missing=missing,
        look_for="The closed form is equation 2 or 3 with the parameters that the model really has; x is recorded by "
        "closed form. Where green and red are as long as each other every call is as expected, one by one.",
    )


def _aligned(table: pd.DataFrame) -> str:
    found = {}
    for scheme, part in table.groupby("name", sort=False):
        known = part["times"].dropna()
        if len(known):
            found[str(scheme)] = known
    off = [scheme for scheme, values in found.items() if (values - 1).abs().max() > ALIGNED]
    each = "; ".join(f"{scheme} {between(values, 'times')}" for scheme, values in found.items())
    equal = int((table["equal"] == "yes").sum())
    return finding(
        "the prediction aligns well with the volume observed, across all model sizes and schemes.",
        CONTRADICTED if off else CONFIRMED,
        f"recorded by closed form: {each}.",
        f"More than {format_share(ALIGNED)} off: {listed(off)}." if off else "",
        f"The exact expectation is equal to what was recorded for {equal} of {format_plural(len(table), 'point')}.",
    )


def _why(node: list[Recorded]) -> Iterator[str]:
    for scheme in (DDP, ZERO_1, ZERO_2, ZERO_3):
        some = [one for one in _schemes(node, scheme) if one.reasons(least=0.001)]
        for one in some[:1] + (some[-1:] if len(some) > 1 and scheme == ZERO_3 else []):
            yield f"Why {scheme} is not the closed form ({one.run.name}): {in_words(one.reasons(least=0.001))}."


def _switched(results: Results) -> Iterator[str]:
    for one in results.of(results.plan.switched):
        if one.closed_form:
            yield (
                f"With `{one.run.switches}`, {one.run.name} under {one.run.division} on {one.run.world} ranks sends "
                f"{times(one.sent() / one.closed_form)} times the closed form{_still(one)}."
            )


def _still(one: Recorded) -> str:
    why = one.reasons(least=0.001)
    return f": {in_words(why)}" if why else ""


def _equation_1(node: list[Recorded]) -> Iterator[str]:
    found = {}
    for one in node:
        told = shape_of(one.run.model)
        counted = parameter_count(told["vocabulary"], told["hidden"], told["layers"], told["sequence"])
        if one.parameters:
            off = (counted / one.parameters - 1) * 100
            found[one.run.name] = f"{counted:,} for {one.parameters:,} of {one.run.name} ({off:+.2f} %)"
    if found:
        yield (
            "Equation 1 counts parameters as if positions were learned, and 8h vectors a layer where there are 13h: "
            f"{'; '.join(found.values())}. The closed form here takes the real number."
        )
