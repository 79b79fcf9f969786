"""The time part: its experiments, and its sections from what they left."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pandas as pd

from commtrace.analyses.engine import NamedTables
from commtrace.errors import CommtraceError
from commtrace.run import Run
from examples.paper_study.parts import Experiment, Options, Section

from . import figures, verdicts, words
from .machine import execute_watched
from .measured import BULK, LOG, POINT, Result, message_times, receive_tables, result_of, tables_of, whole_run
from .points import DDP, HIDDEN, PIPELINE, SCHEMES, TENSOR, ZERO, Messages, Point, messages, points, torchrun
from .receives import MASK, by_kind, transfers_by_size

if TYPE_CHECKING:
    import plotly.graph_objects as go

LIMIT_SECONDS: Final = 300
"""Of one training: a hang shows as an error, not as a wait."""
_START_SECONDS: Final = 13
_NAMED: Final = 3
"""Missing runs that are named, of those that were not run."""
_DATA_PARALLEL_LENGTHS: Final = (
    '"an approximate 2-2.5x increase in TFlops per GPU" from 512 to 4096 tokens, data parallelism and ZeRO.'
)
_MODEL_PARALLEL_LENGTHS: Final = '"Similar to the data-parallel results, we also see an increase in throughput".'


class Part:
    """Time on this machine's real ranks: figures 1, 2, 14 and 15, and the cold first receive of a pipeline."""

    name = "time"

    def experiments(self, options: Options) -> Sequence[Experiment]:
        """Trainings and bare messages, each point once before any is run again. Raises CommtraceError for one rank."""
        ranks = options.ranks
        trainings, alone = points(ranks, quick=options.quick), messages(quick=options.quick)
        both: list[Point | Messages] = [*trainings, *alone]
        wanted = sorted(both, key=lambda one: one.repeat)
        return [_experiment(one, ranks if isinstance(one, Point) else 2) for one in wanted]

    def sections(self, options: Options, found: Mapping[str, Path]) -> Sequence[Section]:
        """All four, or one that says that nothing was measured."""
        results, missing = _results(points(options.ranks, quick=options.quick), found)
        alone, without = _alone(messages(quick=options.quick), found)
        if not results:
            text = ["No training was measured, so nothing can be said of time."]
            return [Section("1 and 2", "Communication against computation", text, missing=[*missing, *without])]
        tables = {**tables_of(results), **receive_tables(results), "time_messages": message_times(alone)}
        return [
            _iterations(tables, missing),
            _data_parallel(tables, missing),
            _model_parallel(tables, missing),
            _receives(tables, [*missing, *without]),
        ]


def _experiment(of: Point | Messages, ranks: int) -> Experiment:
    seconds = _START_SECONDS + (_compute_seconds(of) if isinstance(of, Point) else 5)
    return Experiment(of.key, of.title, partial(run, of, ranks), seconds, alone=True, command=of.command)


def _compute_seconds(point: Point) -> float:
    """At 30 GFLOP/s of a rank."""
    tokens = point.seq_length * point.scheme.micro_batches / point.scheme.model_ranks
    return 7 * tokens * point.flops_per_token / 30e9


def run(of: Point | Messages, ranks: int, folder: Path) -> None:
    """Run it, traced, and look at what it left. Raises CommtraceError if it failed or its log is not whole."""
    environment = {"COMMTRACE": str(folder / LOG), "OMP_NUM_THREADS": "1"}
    if isinstance(of, Messages):
        environment |= of.environment
    else:
        (folder / "settings.yml").write_text(json.dumps(of.settings) + "\n", encoding="utf-8")
    program = [str(folder / "settings.yml") if word == "settings.yml" else word for word in of.program]
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun(ranks), *program]
    execute_watched(command, folder, environment, LIMIT_SECONDS)
    whole_run(folder, ranks)
    if isinstance(of, Point):
        result_of(of, folder)


def _results(wanted: Sequence[Point], found: Mapping[str, Path]) -> tuple[list[Result], list[str]]:
    """What was measured, and what is missing and why."""
    results, missing = [], []
    for point in wanted:
        if point.key in found:
            try:
                results.append(result_of(point, found[point.key]))
            except CommtraceError as error:
                missing.append(f"{point.title}: {error}")
    return results, [*missing, *_not_run(wanted, found)]


def _alone(wanted: Sequence[Messages], found: Mapping[str, Path]) -> tuple[list[tuple[Messages, Run]], list[str]]:
    runs, missing = [], []
    for one in wanted:
        if one.key in found:
            try:
                runs.append((one, whole_run(found[one.key], 2)))
            except CommtraceError as error:
                missing.append(f"{one.title}: {error}")
    return runs, [*missing, *_not_run(wanted, found)]


def _not_run(wanted: Sequence[Point] | Sequence[Messages], found: Mapping[str, Path]) -> list[str]:
    """The first few by name."""
    missing = [one.title for one in wanted if one.key not in found]
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return [f"{'; '.join(missing[:_NAMED])}{more}"] if missing else []


def _iterations(tables: NamedTables, missing: Sequence[str]) -> Section:
    length = words.largest(tables)
    shown = tables["time_points"].loc[tables["time_points"]["seq_length"] == length]
    operations = tables["time_operations"].loc[tables["time_operations"]["seq_length"] == length]
    return Section(
        "1 and 2",
        "Communication against computation, by iteration",
        [
            *words.of_machine(tables["time_runs"]),
            *verdicts.of_scale(shown, verdicts.busy(tables["time_runs"])),
            *words.of_parts(shown),
        ],
        figures={
            "time-01-step-parts": figures.step_parts(shown),
            "time-02-operations": figures.operation_times(operations),
        },
        tables={name: tables[name] for name in ("time_points", "time_operations", "time_first_steps", "time_steps")},
        commands=_commands(tables, length),
        missing=missing,
        look_for="Communication that overlaps costs no time of its own; what waits for another rank is no transfer.",
    )


def _data_parallel(tables: NamedTables, missing: Sequence[str]) -> Section:
    names = [DDP.name, *(scheme.name for scheme in ZERO)]
    shown = _of(tables["time_points"], names)
    gathers = _of(tables["time_bandwidths"], names)
    gathers = gathers.loc[gathers["op"].isin(["all_gather", "all_reduce"]) & (gathers["message_bytes"] >= BULK)]
    why_not = verdicts.busy(tables["time_runs"])
    return Section(
        "14, times",
        "Throughput against sequence length, data parallelism and ZeRO",
        [
            *verdicts.of_lengths(shown, _DATA_PARALLEL_LENGTHS, 2, why_not),
            *verdicts.of_zero(shown, DDP.name, why_not),
            *words.of_throughput(shown),
            *words.of_bandwidths(gathers),
        ],
        figures=_swept("time-14", shown, gathers, "DDP and ZeRO"),
        tables={"time_throughput_data": shown, "time_bandwidths_data": gathers},
        commands=_commands(tables, None, names),
        missing=missing,
        look_for="Bars are the fastest and slowest run; where they overlap, schemes do not differ.",
    )


def _model_parallel(tables: NamedTables, missing: Sequence[str]) -> Section:
    names = [DDP.name, TENSOR.name, PIPELINE.name]
    shown = _of(tables["time_points"], names)
    moved = _of(tables["time_bandwidths"], names[1:])
    moved = moved.loc[moved["op"].isin(["all_reduce", "recv"]) & (moved["message_bytes"] >= BULK)]
    why_not = verdicts.busy(tables["time_runs"])
    return Section(
        "15, times",
        "Throughput against sequence length, tensor and pipeline parallelism",
        [
            *verdicts.of_lengths(_of(shown, names[1:]), _MODEL_PARALLEL_LENGTHS, 1, why_not),
            *verdicts.of_tensor(shown, TENSOR.name, PIPELINE.name, why_not),
            *words.of_throughput(_of(shown, names[1:])),
            *words.of_bandwidths(moved),
        ],
        figures=_swept("time-15", shown, moved, "tensor and pipeline"),
        tables={"time_throughput_model": shown, "time_bandwidths_model": moved},
        commands=_commands(tables, None, names[1:]),
        missing=missing,
        look_for="A pipeline's step has four micro-batches, and stages that wait for each other at its ends.",
    )


def _receives(tables: NamedTables, missing: Sequence[str]) -> Section:
    title = "The cold first receive of a pipeline"
    if "time_receives" not in tables:
        return Section("", title, ["No pipeline was measured."], missing=missing)
    received = tables["time_receives"]
    lengths = sorted(received["seq_length"].unique())
    length = words.largest(tables)
    length = length if length in lengths else int(lengths[-1])
    shown = received.loc[(received["seq_length"] == length) & (received["hidden"] == HIDDEN)]
    forwards = tables["time_forwards"]
    sizes = transfers_by_size(received.loc[received["hidden"] == HIDDEN], tables["time_messages"])
    kinds = by_kind(shown.loc[shown["what"] != MASK])
    last = shown.loc[(shown["rank"] == shown["rank"].max()) & (shown["what"] != MASK)]
    return Section(
        "",
        title,
        [
            *verdicts.of_operations(tables["time_first_steps"], verdicts.busy(tables["time_runs"])),
            *verdicts.of_small_messages(kinds),
            *verdicts.of_causes(sizes),
            *words.of_receives(
                kinds, forwards.loc[(forwards["seq_length"] == length) & (forwards["hidden"] == HIDDEN)]
            ),
        ],
        figures={
            "time-cold-parts": figures.receive_parts(kinds),
            "time-cold-by-iteration": figures.receive_by_iteration(last),
            "time-cold-by-size": figures.transfer_by_size(sizes),
        },
        tables={
            "time_receives": received, "time_forwards": forwards, "time_receives_by_kind": kinds,
            "time_transfers_by_size": sizes, "time_messages": tables["time_messages"],
        },
        commands=[*_commands(tables, length, [PIPELINE.name]), *(one.command for one in messages(quick=True))],
        missing=missing,
        look_for="How much of a receive is before its sender began (waiting), and how much is transfer.",
    )  # fmt: skip


def _swept(name: str, points: pd.DataFrame, bandwidths: pd.DataFrame, what: str) -> dict[str, go.Figure]:
    """Throughput and bandwidth against sequence length, of what there is."""
    found = {}
    if len(points):
        found[f"{name}-throughput"] = figures.throughput(points, f"Throughput against sequence length: {what}")
    if len(bandwidths):
        found[f"{name}-bandwidth"] = figures.bandwidths(bandwidths, f"Bus bandwidth of the largest messages: {what}")
    return found


def _of(table: pd.DataFrame, schemes: Sequence[str]) -> pd.DataFrame:
    """Its rows of these schemes and the first width, in the schemes' order."""
    part = table.loc[table["scheme"].isin(schemes) & (table["hidden"] == HIDDEN)]
    order = part["scheme"].map({name: number for number, name in enumerate(schemes)})
    return part.loc[order.sort_values(kind="stable").index].reset_index(drop=True)


def _commands(tables: NamedTables, length: int | None, names: Sequence[str] | None = None) -> list[str]:
    """How to repeat one run of each scheme: at this length, or at the shortest."""
    return [*_each_command(tables["time_runs"], length, names)]


def _each_command(runs: pd.DataFrame, length: int | None, names: Sequence[str] | None) -> Iterator[str]:
    by_name = {scheme.name: scheme for scheme in SCHEMES}
    chosen = runs.loc[(runs["seq_length"] == length) if length is not None else (runs["hidden"] == HIDDEN)]
    chosen = chosen.sort_values(["hidden", "seq_length"], kind="stable").drop_duplicates("scheme")
    for row in chosen[POINT].to_dict("records"):
        of: dict[str, Any] = {str(name): value for name, value in row.items()}
        if names is None or of["scheme"] in names:
            yield Point(by_name[of["scheme"]], int(of["hidden"]), int(of["seq_length"]), int(of["ranks"]), 1).command
