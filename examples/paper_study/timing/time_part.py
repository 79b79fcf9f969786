"""The time part of the study: its experiments, and its sections made from their results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pandas as pd

from commtrace.analyses.fold_engine import NamedTables
from commtrace.errors import CommtraceError
from commtrace.formatting import format_plural
from examples.paper_study.parts import Experiment, Options, Section

from . import time_claims as claims
from . import time_figures as figures
from .machine_load import execute_watched
from .receives import MASK, by_kind, first_message_costs, transfers_by_size
from .time_tables import (
    BULK,
    LOG,
    POINT,
    complete_run,
    message_times,
    receive_tables,
    result_of,
    step_shares,
    tables_of,
    throughput,
)
from .trainings import DDP, HIDDEN, LENGTH, PIPELINE, SCHEMES, TENSOR, ZERO, Messages, Point, messages, points, torchrun

if TYPE_CHECKING:
    import plotly.graph_objects as go

LIMIT_SECONDS: Final = 300
"""Timeout of one training run."""
BUSY_CORES: Final = 0.1
"""Cores used by other programs above which the page has a warning."""
_START_SECONDS: Final = 13
_NAMED: Final = 3
"""Number of missing runs that are named."""

_Planned = TypeVar("_Planned", Point, Messages)
_Read = TypeVar("_Read")


class TimePart:
    """Part about time on real ranks: figures 1, 2, 14 and 15, and the cold first receive of a pipeline."""

    def experiments(self, options: Options) -> Sequence[Experiment]:
        """Return training runs and bare messages, each point once before any is repeated.

        Raises CommtraceError for a single rank.
        """
        trainings, alone = points(options.nproc, quick=options.quick), messages(quick=options.quick)
        planned: list[Point | Messages] = sorted([*trainings, *alone], key=lambda item: item.repeat)
        return [_experiment(item, options.nproc if isinstance(item, Point) else 2) for item in planned]

    def sections(self, options: Options, done: Mapping[str, Path]) -> Sequence[Section]:
        """Return all four sections, or one without content if nothing was measured."""
        results, missing = _read_results(points(options.nproc, quick=options.quick), done, result_of)
        alone, missing_messages = _read_results(
            messages(quick=options.quick), done, lambda item, folder: (item, complete_run(folder, 2))
        )
        if not results:
            return [Section("1 and 2", "Communication against computation", missing=[*missing, *missing_messages])]
        tables = {**tables_of(results), **receive_tables(results), "time_messages": message_times(alone)}
        return [
            _iterations(tables, missing),
            _data_parallel(tables, missing),
            _model_parallel(tables, missing),
            _receives(tables, [*missing, *missing_messages]),
        ]


def _experiment(item: Point | Messages, ranks: int) -> Experiment:
    seconds = _START_SECONDS + (_compute_seconds(item) if isinstance(item, Point) else 5)
    return Experiment(item.key, item.title, partial(run, item, ranks), seconds, alone=True, command=item.command)


def _compute_seconds(point: Point) -> float:
    """Estimate the time of a training run at 30 GFLOP/s per rank."""
    tokens = point.seq_length * point.scheme.micro_batches / point.scheme.model_ranks
    return 7 * tokens * point.flops_per_token / 30e9


def run(item: Point | Messages, ranks: int, folder: Path) -> None:
    """Run a traced program and read its log. Raises CommtraceError if it failed or its log is incomplete."""
    environment = {"COMMTRACE": str(folder / LOG), "OMP_NUM_THREADS": "1"}
    if isinstance(item, Messages):
        environment |= item.environment
    else:
        (folder / "settings.yml").write_text(json.dumps(item.settings) + "\n", encoding="utf-8")
    program = [str(folder / "settings.yml") if word == "settings.yml" else word for word in item.program]
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun(ranks), *program]
    execute_watched(command, folder, environment, LIMIT_SECONDS)
    complete_run(folder, ranks)
    if isinstance(item, Point):
        result_of(item, folder)


def _read_results(
    planned: Sequence[_Planned], done: Mapping[str, Path], read: Callable[[_Planned, Path], _Read]
) -> tuple[list[_Read], list[str]]:
    """Read the results, and name what is missing or cannot be read, with the reason."""
    results, missing = [], []
    for item in planned:
        if item.key in done:
            try:
                results.append(read(item, done[item.key]))
            except CommtraceError as error:
                missing.append(f"{item.title}: {error}")
    not_run = [item.title for item in planned if item.key not in done]
    if not_run:
        more = f" and {len(not_run) - _NAMED} more" if len(not_run) > _NAMED else ""
        missing.append(f"{'; '.join(not_run[:_NAMED])}{more}")
    return results, missing


def _compared_length(tables: NamedTables) -> int:
    """Return the sequence length at which schemes are compared: LENGTH if it was run, else the longest."""
    lengths = tables["time_points"]["seq_length"]
    return LENGTH if LENGTH in lengths.to_numpy() else int(lengths.max())


def warnings_of(runs: pd.DataFrame) -> list[str]:
    """Return what limits the meaning of the times. `runs`: `time_runs`."""
    warnings = [
        f"{crowded}: the ranks share cores, so waiting includes waiting for a core."
        for crowded in sorted(set(runs["shared_cores"]) - {""})
    ]
    others = runs["others_cores"].dropna().astype(float)
    if len(others) and others.max() > BUSY_CORES:
        warnings.append(
            f"Other programs used {others.median():.1f} cores during the runs (median; {others.min():.1f} to "
            f"{others.max():.1f}). Differences within the spread mean nothing."
        )
    if (runs["recorder"] != "native").any():
        warnings.append(
            "Recorded by the Python recorder, which does not observe the end of asynchronous calls: overlapped "
            "communication counts as computation. Run commtrace build for the native recorder."
        )
    return warnings


def _setup(runs: pd.DataFrame) -> str:
    """Return a description of ranks, cores and repeats. `runs`: `time_runs`."""
    cores = runs["cores"].dropna()
    where = f" on {format_plural(int(cores.min()), 'core')}" if len(cores) else ""
    repeats = int(runs.groupby(POINT)["repeat"].nunique().max())
    return (
        f"{format_plural(int(runs['ranks'].max()), 'rank')}{where}, gloo, fp32, one thread per rank, up to "
        f"{format_plural(repeats, 'run')} per point; bars are the median run, whiskers the fastest and slowest."
    )


def _iterations(tables: NamedTables, missing: Sequence[str]) -> Section:
    length = _compared_length(tables)
    shown = tables["time_points"].loc[tables["time_points"]["seq_length"] == length]
    operations = tables["time_operations"].loc[tables["time_operations"]["seq_length"] == length]
    names = ("time_points", "time_operations", "time_first_steps", "time_steps", "time_runs")
    return Section(
        "1 and 2",
        "Communication against computation, by iteration",
        f"{_setup(tables['time_runs'])} Overlapped communication costs no time of its own; waiting for another rank "
        "is no transfer.",
        [*claims.scale(shown, claims.why_not_comparable(tables["time_runs"]))],
        figures={
            "time-01-step-parts": figures.step_parts(shown),
            "time-02-operations": figures.operation_times(operations),
        },
        tables={
            "time_step_shares": step_shares(shown.loc[shown["hidden"] == HIDDEN]),
            **{name: tables[name] for name in names},
        },
        commands=_commands(tables, length),
        warnings=warnings_of(tables["time_runs"]),
        missing=missing,
    )


def _data_parallel(tables: NamedTables, missing: Sequence[str]) -> Section:
    names = [DDP.name, *(scheme.name for scheme in ZERO)]
    shown = _of_schemes(tables["time_points"], names)
    gathers = _of_schemes(tables["time_bandwidths"], names)
    gathers = gathers.loc[gathers["op"].isin(["all_gather", "all_reduce"]) & (gathers["message_bytes"] >= BULK)]
    reason = claims.why_not_comparable(tables["time_runs"])
    return Section(
        "14, times",
        "Throughput against sequence length, data parallelism and ZeRO",
        "Whiskers are the fastest and slowest run; where they overlap, schemes do not differ.",
        [
            *claims.throughput_over_lengths("data-parallel-throughput", shown, reason),
            *claims.zero_throughput(shown, DDP.name, reason),
        ],
        figures=_throughput_figures("time-14", shown, gathers, "DDP and ZeRO"),
        tables={
            "time_throughput_data": throughput(shown), "time_points_data": shown, "time_bandwidths_data": gathers
        },
        commands=_commands(tables, None, names),
        missing=missing,
    )  # fmt: skip


def _model_parallel(tables: NamedTables, missing: Sequence[str]) -> Section:
    names = [DDP.name, TENSOR.name, PIPELINE.name]
    shown = _of_schemes(tables["time_points"], names)
    divided = _of_schemes(shown, names[1:])
    moved = _of_schemes(tables["time_bandwidths"], names[1:])
    moved = moved.loc[moved["op"].isin(["all_reduce", "recv"]) & (moved["message_bytes"] >= BULK)]
    reason = claims.why_not_comparable(tables["time_runs"])
    return Section(
        "15, times",
        "Throughput against sequence length, tensor and pipeline parallelism",
        "A pipeline's step has four micro-batches, and its stages wait for each other at both ends.",
        [
            *claims.throughput_over_lengths("model-parallel-throughput", divided, reason),
            *claims.tensor_against_pipeline(shown, TENSOR.name, PIPELINE.name, reason),
        ],
        figures=_throughput_figures("time-15", shown, moved, "tensor and pipeline"),
        tables={
            "time_throughput_model": throughput(divided), "time_points_model": shown, "time_bandwidths_model": moved
        },
        commands=_commands(tables, None, names[1:]),
        missing=missing,
    )  # fmt: skip


def _receives(tables: NamedTables, missing: Sequence[str]) -> Section:
    title = "The cold first receive of a pipeline"
    if "time_receives" not in tables:
        return Section("", title, missing=missing)
    received = tables["time_receives"]
    lengths = sorted(received["seq_length"].unique())
    length = _compared_length(tables)
    length = length if length in lengths else int(lengths[-1])
    shown = received.loc[(received["seq_length"] == length) & (received["hidden"] == HIDDEN)]
    sizes = transfers_by_size(received.loc[received["hidden"] == HIDDEN], tables["time_messages"])
    kinds = by_kind(shown.loc[shown["what"] != MASK])
    last = shown.loc[(shown["rank"] == shown["rank"].max()) & (shown["what"] != MASK)]
    return Section(
        "",
        title,
        "How much of a receive is before its sender began (waiting), and how much is transfer.",
        [
            *claims.cold_operations(tables["time_first_steps"], claims.why_not_comparable(tables["time_runs"])),
            *claims.cold_small_messages(kinds),
        ],
        figures={
            "time-cold-parts": figures.receive_parts(kinds),
            "time-cold-by-iteration": figures.receive_by_iteration(last),
            "time-cold-by-size": figures.transfer_by_size(sizes),
        },
        tables={
            "time_first_message_costs": first_message_costs(sizes), "time_receives": received,
            "time_forwards": tables["time_forwards"], "time_receives_by_kind": kinds, "time_transfers_by_size": sizes,
            "time_messages": tables["time_messages"],
        },
        commands=[*_commands(tables, length, [PIPELINE.name]), *(item.command for item in messages(quick=True))],
        missing=missing,
    )  # fmt: skip


def _throughput_figures(name: str, points: pd.DataFrame, bandwidths: pd.DataFrame, what: str) -> dict[str, go.Figure]:
    """Draw throughput and bandwidth against sequence length, as far as they were measured."""
    drawn = {}
    if len(points):
        drawn[f"{name}-throughput"] = figures.throughput(points, f"Throughput against sequence length: {what}")
    if len(bandwidths):
        drawn[f"{name}-bandwidth"] = figures.bandwidths(bandwidths, f"Bus bandwidth of the largest messages: {what}")
    return drawn


def _of_schemes(table: pd.DataFrame, schemes: Sequence[str]) -> pd.DataFrame:
    """Return the rows of these schemes and the smaller width, in the order of the schemes."""
    part = table.loc[table["scheme"].isin(schemes) & (table["hidden"] == HIDDEN)]
    order = part["scheme"].map({name: number for number, name in enumerate(schemes)})
    return part.loc[order.sort_values(kind="stable").index].reset_index(drop=True)


def _commands(tables: NamedTables, length: int | None, names: Sequence[str] | None = None) -> list[str]:
    """Return the commands that repeat one run of each scheme, at this length or at the shortest."""
    runs = tables["time_runs"]
    by_name = {scheme.name: scheme for scheme in SCHEMES}
    chosen = runs.loc[(runs["seq_length"] == length) if length is not None else (runs["hidden"] == HIDDEN)]
    chosen = chosen.sort_values(["hidden", "seq_length"], kind="stable").drop_duplicates("scheme")
    rows: list[dict[Any, Any]] = chosen[POINT].to_dict("records")
    return [
        Point(by_name[row["scheme"]], int(row["hidden"]), int(row["seq_length"]), int(row["ranks"]), 1).command
        for row in rows
        if names is None or row["scheme"] in names
    ]
