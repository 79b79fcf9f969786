"""The volume part of the study: dry runs, and the paper's figures 7 to 15 made from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pandas as pd

from commtrace.errors import CommtraceError
from commtrace.network.networks import builtin_networks, open_network
from examples.paper_study.parts import Experiment, Options, Section

from . import volume_claims as claims
from . import volume_figures as figures
from . import volume_tables as tables
from .dry_runs import ZERO_1, ZERO_3, DryRun, plan
from .recorded_dry_run import SEND, RecordedDryRun, read
from .volume_claims import COMMAND, RUN_LENGTHS
from .volume_tables import Results

_MEAN: Final = "Mean over the ranks of the job."


class VolumePart:
    """Part about volume: figures 7 to 15, larger scales, and predicted times."""

    def experiments(self, options: Options) -> Sequence[Experiment]:
        """Return the dry runs, each once."""
        return [run.experiment() for run in plan(options.models, quick=options.quick).all]

    def sections(self, options: Options, done: Mapping[str, Path]) -> Sequence[Section]:
        """Return the sections that have results."""
        results = results_of(options, done)
        sections = (_data_parallel, _model_parallel, _lengths, _scales, _all_points, _networks)
        return [section for make in sections for section in make(results)]


def results_of(options: Options, done: Mapping[str, Path]) -> Results:
    """Read what the finished dry runs recorded. `done`: folders by the key of an experiment."""
    planned = plan(options.models, quick=options.quick)
    recorded: dict[DryRun, RecordedDryRun] = {}
    unreadable: dict[DryRun, str] = {}
    for run in planned.all:
        if run.key in done:
            try:
                recorded[run] = read(run, done[run.key])
            except CommtraceError as error:
                unreadable[run] = str(error)
    return Results(options, planned, recorded, unreadable)


def _command(name: str, runs: Sequence[RecordedDryRun]) -> list[str]:
    """Return the command that repeats a section, and one that reads the last of the dry runs."""
    return [COMMAND, *(f"commtrace {name} OUT/volume/{recorded.folder.name}" for recorded in runs[-1:])]


def _data_parallel(results: Results) -> Iterator[Section]:
    """Yield the sections of figures 7 to 10."""
    node = results.of(results.plan.node)
    sizes = results.of(results.plan.sizes)
    missing = results.missing(results.plan.node)
    if node:
        step = tables.by_operation(node)
        runs = pd.concat(
            [tables.by_operation(node, steps).assign(steps=steps) for steps in RUN_LENGTHS], ignore_index=True
        )
        middle = runs.loc[runs["steps"] == RUN_LENGTHS[1]].drop(columns="steps")
        with_start_up = f"in start-up and {RUN_LENGTHS[1]} steps"
        against = tables.against_formula(node)
        yield Section(
            "7",
            "Share of each operation: ZeRO-1, 2, 3",
            "Shares of the payload of a rank; first of a steady training step, then with start-up.",
            [*claims.operation_shares(step, runs)],
            figures={
                "figure-07-step": figures.shares(step, "Share of each operation in a training step"),
                "figure-07-run": figures.shares(middle, f"Share of each operation {with_start_up}"),
            },
            tables={"figure-07-step": step, "figure-07-run": runs},
            commands=_command("report", [recorded for recorded in node if recorded.run.division == ZERO_1][:1]),
            missing=missing,
        )
        yield Section(
            "8",
            "Volume of each operation: ZeRO-1, 2, 3",
            "Each panel has its own unit. A buffer counts once, whatever the operation.",
            [*claims.volume_ratios(against)],
            figures={
                "figure-08-step": figures.volumes(step, "Volume of each operation in a step", "payload of a rank"),
                "figure-08-run": figures.volumes(
                    middle, f"Volume of each operation {with_start_up}", "payload of a rank"
                ),
            },
            tables={"figure-08-step": step, "figure-08-run": middle},
            commands=[COMMAND],
            missing=missing,
        )
    if sizes:
        table = tables.sizes_of(sizes, "all_gather")
        yield Section(
            "9",
            "Message sizes of all_gather: ZeRO-3",
            "Left: number of calls by size. Right: their bytes. Sizes are of the full output.",
            [*claims.message_sizes(table)],
            figures={"figure-09": figures.message_sizes(table, "All_gathers of a step by message size, ZeRO-3")},
            tables={"figure-09": table, "figure-09-settings": _gathers_by_setting(results)},
            commands=_command("report", sizes),
            missing=results.missing(results.plan.sizes),
        )
    if node:
        yield Section(
            "10",
            "Recorded against predicted: DDP, ZeRO-1, 2, 3",
            "The closed form is equation 2 or 3 with the model's real parameters; x is recorded / closed form. "
            "Where green and red are equally long, every call is as expected.",
            [*claims.prediction(against)],
            figures={"figure-10": figures.against(against, "What a rank sends in a step", "bytes sent")},
            tables={
                "figure-10": against,
                "figure-10-settings": tables.against_formula(results.of(results.plan.switched)),
                "parameters": tables.parameters(node),
            },
            commands=_command("check", node),
            missing=missing,
        )


def _gathers_by_setting(results: Results) -> pd.DataFrame:
    """Return the all_gathers of a step of ZeRO-3 with default settings and with parameters released at once."""
    rows = []
    for recorded in results.of(results.plan.switched):
        run = recorded.run
        default = DryRun(run.model, run.world, ZERO_3)
        if run.scheme == ZERO_3:
            for compared in (*results.of([default]), recorded):
                calls = int(tables.sizes_of([compared], "all_gather")["calls"].sum())
                rows.append((run.name, run.world, compared.run.note or "default", calls))
    return pd.DataFrame(rows, columns=["model", "ranks", "settings", "calls"])


def _model_parallel(results: Results) -> Iterator[Section]:
    """Yield the sections of figures 11 to 13."""
    divided = results.of(results.plan.divided)
    if not divided:
        return
    missing = results.missing(results.plan.divided)
    shown = {
        "figure-11": tables.by_role(divided),
        "figure-12": tables.by_operation(divided),
        "figure-12-callers": tables.by_caller(divided),
        "figure-13-pipeline": tables.between_stages(divided),
        "figure-13-tensor": tables.within_layers(divided),
        "figure-13-micro-batches": tables.between_stages(results.of(results.plan.batches)),
    }
    impossible = [(run.label, why) for run, why in results.plan.impossible.items()]
    yield Section(
        "11",
        "Total volume: pipeline and tensor parallelism",
        f"{_MEAN} One copy of the model, one micro-batch. In a group of one rank, nothing is sent.",
        [*claims.indivisible_heads(results.plan)],
        figures={"figure-11": figures.totals(shown["figure-11"], "What a rank sends in a step", "bytes sent")},
        tables={"figure-11": shown["figure-11"], "not-possible": pd.DataFrame(impossible, columns=["run", "reason"])},
        commands=[COMMAND],
        missing=missing,
    )
    yield Section(
        "12",
        "Volume of each operation: pipeline and tensor parallelism",
        f"Payload. {_MEAN} An all_reduce in a group of one rank has a payload, but sends nothing.",
        [*claims.model_parallel_operations(shown)],
        figures={
            "figure-12": figures.volumes(shown["figure-12"], "Payload of each operation in a step", "payload of a rank")
        },
        tables={name: shown[name] for name in ("figure-12", "figure-12-callers")},
        commands=_command("report", divided),
        missing=missing,
    )
    axes = {"figure-13-pipeline": "sent between all stages", "figure-13-tensor": "sent by a rank"}
    yield Section(
        "13",
        "Recorded against theory: pipeline and tensor parallelism",
        "First equation 4, of all stages together; then equation 5, of a rank. x is recorded / closed form.",
        [*claims.model_parallel_volumes(shown)],
        figures={
            name: figures.against(shown[name], f"Recorded against predicted: {axis}, in a step", axis)
            for name, axis in axes.items()
            if len(shown[name])
        },
        tables={name: table for name, table in shown.items() if name.startswith("figure-13") and len(table)},
        commands=_command("check", divided),
        missing=missing,
    )


def _lengths(results: Results) -> Iterator[Section]:
    """Yield the sections of figures 14 and 15."""
    runs = results.of(results.plan.lengths)
    if not runs:
        return
    missing = results.missing(results.plan.lengths)
    where = f"{runs[0].run.name} on {runs[0].run.world} ranks"
    gathers = tables.by_length(runs, "all_gather")
    yield Section(
        "14",
        "All_gather volume over the length of sequences",
        f"{where}. Lines: recorded; rings: expected calls; dotted: the paper's formula.",
        [*claims.gathered_over_lengths(gathers)],
        figures=(
            {"figure-14": figures.by_length(gathers, "All_gathers of a step", "payload of a rank")}
            if len(gathers)
            else {}
        ),
        tables={"figure-14": gathers},
        commands=[COMMAND],
        missing=missing,
    )
    shown = {
        "figure-15-send": tables.by_length(runs, SEND),
        "figure-15-recv": tables.by_length(runs, "recv"),
        "figure-15-tensor": tables.within_layers_by_length(runs),
    }
    titles = {
        "figure-15-send": ("Sends of a step", "payload of a rank"),
        "figure-15-recv": ("Receives of a step", "payload of a rank"),
        "figure-15-tensor": ("Tensor parallelism", "bytes sent by rank 0"),
    }
    yield Section(
        "15",
        "Send, receive and all_reduce volumes over the length of sequences",
        f"{where}; dotted the paper's formula. Mean over the stages.",
        [*claims.volumes_over_lengths(shown)],
        figures={name: figures.by_length(table, *titles[name]) for name, table in shown.items() if len(table)},
        tables=shown,
        commands=[COMMAND],
        missing=missing,
    )


def _scales(results: Results) -> Iterator[Section]:
    """Yield the sections without a figure in the paper: more ranks, and all dimensions together."""
    if results.of(results.plan.scaled):
        runs = results.of([*results.plan.node, *results.plan.sizes, *results.plan.scaled])
        table = tables.against_formula(runs).sort_values("ranks", kind="stable", ignore_index=True)
        yield Section(
            "",
            f"On up to {int(table['ranks'].max()):,} ranks",
            "Lines: recorded; rings: expected calls; dotted: the closed form.",
            figures={"scale": figures.by_ranks(table, "What a rank sends in a step, by ranks", "bytes sent")},
            tables={"scale": table},
            commands=[COMMAND],
            missing=results.missing(results.plan.scaled),
        )
    combined = results.of(results.plan.combined)
    if combined:
        stages = tables.between_stages(combined).assign(role="pipeline")
        table = pd.concat([stages, tables.within_layers(combined).assign(role="tensor")], ignore_index=True)
        world = max(recorded.run.world for recorded in combined)
        roles = tables.by_role(combined)
        yield Section(
            "",
            f"Stages, tensor parallelism and data parallelism together: {world:,} ranks",
            _MEAN,
            figures={"combined": figures.totals(roles, "What a rank sends in a step, by dimension", "bytes sent")},
            tables={"combined": table},
            commands=[COMMAND],
            missing=results.missing(results.plan.combined),
        )


def _all_points(results: Results) -> Iterator[Section]:
    """Yield the comparison of every dry run with theory."""
    yield Section(
        "",
        "Every point",
        "Payload of all calls of a rank, recorded and expected; then, of the first rank, what it sends in a step, what "
        "theory expects, the closed form, and why that differs.",
        tables={"agreement": tables.agreement(results), "points": tables.points(results.recorded.values())},
        commands=["commtrace check OUT/volume/EXPERIMENT", "commtrace report OUT/volume/EXPERIMENT"],
        missing=results.missing(results.plan.all),
    )


def _networks(results: Results) -> Iterator[Section]:
    """Yield the sections of predicted communication times, for the largest runs if there are any beyond a node."""
    names = builtin_networks() if results.options.network is None else [results.options.network]
    scaled = results.plan.scaled
    runs = results.of([*scaled, *results.plan.combined] if scaled else [*results.plan.node, *results.plan.divided])
    largest = max((recorded.run.world for recorded in runs), default=0)
    chosen = [recorded for recorded in runs if recorded.run.world == largest or not scaled]
    times = {}
    for name in names:
        network = open_network(name)
        table = tables.times_on(network, chosen)
        if not len(table):
            continue
        times[network.name] = table
        yield Section(
            "",
            f"Predicted communication time{f' on {largest:,} ranks' if scaled else ''}: {network.name}",
            "Time of the recorded calls of a step, for the rank with the longest time: a sum that assumes no "
            f"overlap. Ranks fill nodes of {network.ranks_per_node}. {'. '.join(network.about)}. "
            "Calls without a time are left out.",
            figures={f"network-{network.name}": figures.times_of(table, f"A step on {network.name}")},
            tables={f"network-{network.name}": table},
            commands=[f"{COMMAND} --network {network.name}"],
        )
    if times:
        yield Section(
            "",
            "Predicted communication times: fastest and slowest layout",
            tables={"networks": tables.fastest_and_slowest(times)},
        )
