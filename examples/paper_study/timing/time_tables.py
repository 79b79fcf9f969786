"""Tables of the measurements, from the logs of all runs.

`time_steps`, a row per run, rank and step (not the first, nor the last, which has no end):

    scheme, hidden, seq_length, ranks, repeat, rank, step
    step_ns            from the end of the rank's last call of the step before to that of its own last call
    computing_ns       no call of the rank is in flight
    overlapped_ns      it computes while a call is in flight
    communicating_ns   it is blocked in a call that all ranks have entered: exposed communication
    waiting_ns         it is blocked in a call that another rank has not entered yet

These are the times of `commtrace.analyses.scaling.step_times`: blocked = communicating + waiting, in flight = blocked +
overlapped; they add up to the step.

`time_runs`, a row per run: means of these times over ranks and steps, `step_ns` the slowest rank's mean, `tokens_per_s`
of the whole job, `gflop_per_s` of a rank (the model's, without recomputation), `recorder`, `cores`, `shared_cores`,
`others_cores` (`machine_load`), `late_known`.

`time_points`, a row per point: `repeats`, and `steps` of all repeats; from the repeat with the median step (of two, the
faster) `step_ns`, `tokens_per_s`, `gflop_per_s`, the parts, and `in_calls_share`, the share of a step in which a rank
is blocked in calls; for the first three also `_least` and `_most` over the repeats.

`time_bandwidths`, a row per point, operation and size, for the size with most of the operation's bytes: `calls` and
`busbw_gb_per_s` with `_least` and `_most`: bytes / transfer time, from the arrival of the last rank.

`time_operations`, a row per point and operation: `standing_ns` of a rank and step in the repeat with the median step:
in which its calls block it (`commtrace.analyses.across_ranks.blocked_time`).

`time_first_steps`, a row per point and operation: values of a rank in the first step, and medians over the later steps
(of both, medians over repeats): `calls`, `standing_ns`, `late_ns`, `transfer_ns`, with `first_` and `later_`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.analyses.fold_engine import NamedTables
from commtrace.analyses.scaling.scaling_tables import shared_cores, tokens_per_step
from commtrace.analyses.scaling.step_times import StepTimes, step_times, timed_calls
from commtrace.errors import LogError
from commtrace.run import Run, open_run

from . import machine_load
from .bare_messages import TAGS
from .receives import forwards, receives
from .trainings import Messages, Point

LOG: Final = "log"
BULK: Final = 1 << 16
"""Bytes from which bandwidths of messages are shown: latency dominates smaller ones."""

POINT: Final = ["scheme", "hidden", "seq_length", "ranks"]
PARTS: Final = ["computing_ns", "overlapped_ns", "communicating_ns", "waiting_ns"]
_SPREAD: Final = ["step_ns", "tokens_per_s", "gflop_per_s"]
_TRANSFERS: Final = ("all_reduce", "all_gather", "reduce_scatter", "recv")
"""Operations whose bus bandwidth is wire bytes / time (`commtrace.volume.busbw_factor`)."""


@dataclass(frozen=True)
class Result:
    """One measured training run."""

    point: Point
    run: Run
    times: StepTimes
    calls: pd.DataFrame
    machine: Mapping[str, Any]


def result_of(point: Point, folder: Path) -> Result:
    """Read the log of a training run. Raises LogError if it is incomplete."""
    run = complete_run(folder, point.ranks)
    return Result(point, run, step_times(run), timed_calls(run, columns=("site",)), machine_load.read(folder))


def complete_run(folder: Path, ranks: int) -> Run:
    """Read the run of an experiment. Raises LogError if it is damaged, lacks a rank, or did not end."""
    run = open_run(folder / LOG)
    again = f"remove {folder} and run it again"
    if run.simulated:
        raise LogError(f"{run.log.path}: a dry run has no times; {again}")
    if missing := sorted({*range(ranks)} - {*run.ranks}):
        raise LogError(f"{run.log.path}: rank {missing[0]} left no log; {again}")
    if damaged := [note for note in run.notes if note.kind != "salvage"]:
        raise LogError(f"{damaged[0]}; {again}")
    for process in run.processes:
        if process.tables.end is None:
            raise LogError(f"{run.log.path}: rank {process.rank} did not end; {again}")
        lost = sum(int((process.tables.stats or {}).get(name) or 0) for name in ("dropped", "removed", "lost"))
        if lost:
            raise LogError(f"{run.log.path}: {lost} calls of rank {process.rank} were not recorded; {again}")
    return run


def tables_of(results: Sequence[Result]) -> NamedTables:
    """Return all tables about steps. `results` must not be empty."""
    steps = pd.concat([_steps(result) for result in results], ignore_index=True)
    runs = pd.DataFrame([_run(result, steps) for result in results])
    median = medians(runs)
    return {
        "time_steps": steps,
        "time_runs": runs,
        "time_points": _points(runs, median),
        "time_bandwidths": _bandwidths(results),
        "time_operations": _operations([results[number] for number in median]),
        "time_first_steps": _first_steps(results),
    }


def named(point: Point) -> dict[str, Any]:
    """Return the values of the columns POINT and `repeat`."""
    return {
        "scheme": point.scheme.name, "hidden": point.hidden, "seq_length": point.seq_length, "ranks": point.ranks,
        "repeat": point.repeat,
    }  # fmt: skip


def _steps(result: Result) -> pd.DataFrame:
    times = result.times.steps
    return pd.DataFrame(
        {
            **{name: [value] * len(times) for name, value in named(result.point).items()},
            "rank": times["rank"],
            "step": times["step"],
            "step_ns": times["step_ns"],
            "computing_ns": times["step_ns"] - times["in_flight_ns"],
            "overlapped_ns": times["in_flight_ns"] - times["blocked_ns"],
            "communicating_ns": times["blocked_ns"] - times["late_ns"],
            "waiting_ns": times["late_ns"],
        }
    )


def _run(result: Result, steps: pd.DataFrame) -> dict[str, Any]:
    of = named(result.point)
    own = steps.loc[np.logical_and.reduce([steps[name] == value for name, value in of.items()])]
    by_rank = own.groupby("rank")[["step_ns", *PARTS]].mean()
    slowest = float(by_rank["step_ns"].max())
    tokens = tokens_per_step(result.run)
    rate = None if tokens is None else tokens / slowest * 1e9
    flops = result.point.flops_per_token / result.point.ranks
    return {
        **of,
        "steps": own["step"].nunique(),
        "step_ns": slowest,
        **{part: float(by_rank[part].mean()) for part in PARTS},
        "tokens_per_s": rate,
        "gflop_per_s": None if rate is None else rate * flops / 1e9,
        "late_known": result.times.late_known,
        "recorder": result.run.processes[0].tables.process.get("recorder"),
        "shared_cores": shared_cores(result.run),
        "cores": result.machine.get("cores"),
        "others_cores": result.machine.get("others_cores"),
    }


def medians(runs: pd.DataFrame) -> list[int]:
    """Return the row of the repeat with the median step of each point (of two, the faster one), in order."""
    ordered = runs.sort_values("step_ns", kind="stable")
    middle = ordered.groupby(POINT, sort=False)["step_ns"].apply(lambda times: times.index[(len(times) - 1) // 2])
    return sorted(middle.astype(int).tolist())


def _points(runs: pd.DataFrame, median: Sequence[int]) -> pd.DataFrame:
    values = runs.astype(dict.fromkeys(_SPREAD, float)).groupby(POINT, sort=False)
    spread = values.agg(
        repeats=("repeat", "nunique"),
        steps=("steps", "sum"),
        **{f"{name}_least": (name, "min") for name in _SPREAD},
        **{f"{name}_most": (name, "max") for name in _SPREAD},
    )
    middle = runs.loc[[*median], [*POINT, *_SPREAD, *PARTS]].set_index(POINT).astype(float)
    in_calls = (middle["communicating_ns"] + middle["waiting_ns"]) / middle[PARTS].sum(axis=1)
    return spread.join(middle).assign(in_calls_share=in_calls).reset_index()


def _bandwidths(results: Sequence[Result]) -> pd.DataFrame:
    rows = [row for result in results for row in _of_largest(result)]
    table = pd.DataFrame(rows, columns=[*POINT, "repeat", "op", "message_bytes", "calls", "busbw_gb_per_s"])
    return table.groupby([*POINT, "op", "message_bytes"], sort=False, as_index=False).agg(
        repeats=("repeat", "nunique"),
        calls=("calls", "sum"),
        busbw_gb_per_s=("busbw_gb_per_s", "median"),
        busbw_gb_per_s_least=("busbw_gb_per_s", "min"),
        busbw_gb_per_s_most=("busbw_gb_per_s", "max"),
    )


def _of_largest(result: Result) -> Iterator[dict[str, Any]]:
    """Yield for each operation the calls of the size with most of its bytes."""
    messages = result.times.messages
    for op, part in messages.loc[messages["op"].isin(_TRANSFERS)].groupby("op"):
        sums = part.groupby("bytes", as_index=False).agg(sent=("bytes", "size"))
        most = float(sums["bytes"].to_numpy()[int((sums["sent"] * sums["bytes"]).to_numpy().argmax())])
        calls = part.loc[part["bytes"] == most]
        yield {
            **named(result.point),
            "op": op,
            "message_bytes": int(most),
            "calls": len(calls),
            "busbw_gb_per_s": float(calls["bytes"].sum() / calls["transfer_ns"].sum()),
        }


def _operations(results: Sequence[Result]) -> pd.DataFrame:
    parts = []
    for result in results:
        steps = result.times.steps["step"].unique()
        calls = standing(result.calls.loc[result.calls["step"].isin(steps)])
        sums = calls.groupby("op")["standing_ns"].sum() / (len(steps) * result.point.ranks)
        labels = {name: value for name, value in named(result.point).items() if name in POINT}
        parts.append(pd.DataFrame({**labels, "op": sums.index, "standing_ns": sums.to_numpy()}))
    return pd.concat(parts, ignore_index=True)


def _first_steps(results: Sequence[Result]) -> pd.DataFrame:
    measures = ["calls", "standing_ns", "late_ns", "transfer_ns"]
    parts = []
    for result in results:
        training = standing(result.calls.loc[result.calls["step"] >= 0])
        by_step = training.groupby(["op", "step"])[measures].sum(min_count=1) / result.point.ranks
        at_first = by_step.index.get_level_values("step") == 0
        first = by_step.loc[at_first].droplevel("step").add_prefix("first_")
        later = by_step.loc[~at_first].groupby("op").median().add_prefix("later_")
        parts.append(first.join(later, how="outer").reset_index().assign(**named(result.point)))
    table = pd.concat(parts, ignore_index=True)
    columns = [f"{when}_{measure}" for measure in measures for when in ("first", "later")]
    return table.groupby([*POINT, "op"], sort=False, as_index=False)[columns].median()


def standing(calls: pd.DataFrame) -> pd.DataFrame:
    """Return `op`, `step`, `calls` (1), and these times of each call in ns.

    standing_ns    time in which it blocked its rank (`commtrace.analyses.across_ranks.blocked_time`)
    late_ns        its part in which the rank waits for others; missing if unknown
    transfer_ns    from the release of the call to its end; missing unless both are known exactly
    """
    return pd.DataFrame(
        {
            "op": calls["op"],
            "step": calls["step"],
            "calls": 1,
            "standing_ns": calls["blocked_ns"],
            "late_ns": calls["waiting_ns"],
            "transfer_ns": calls["transfer_ns"].where(calls["exact"]),
        }
    )


def step_shares(points: pd.DataFrame) -> pd.DataFrame:
    """Return the step and the shares of its parts, by scheme. `points`: `time_points` of one length and width."""
    total = points[PARTS].sum(axis=1)
    return pd.DataFrame(
        {
            "scheme": points["scheme"],
            "step_ns": points["step_ns"],
            "fastest_ns": points["step_ns_least"],
            "slowest_ns": points["step_ns_most"],
            "computation_share": (points["computing_ns"] + points["overlapped_ns"]) / total,
            "overlapped_share": points["overlapped_ns"] / total,
            "communication_share": points["communicating_ns"] / total,
            "waiting_share": points["waiting_ns"] / total,
        }
    )


def throughput(points: pd.DataFrame) -> pd.DataFrame:
    """Return the speed of each scheme at the shortest and longest sequence. `points`: `time_points` of one width."""
    rows = []
    for scheme, part in points.dropna(subset="gflop_per_s").groupby("scheme", sort=False):
        ordered = part.sort_values("seq_length")
        first, last = ordered.iloc[0], ordered.iloc[-1]
        rows.append(
            {
                "scheme": scheme,
                "short": first["seq_length"],
                "long": last["seq_length"],
                "tokens_per_s_short": round(first["tokens_per_s"]),
                "tokens_per_s_long": round(last["tokens_per_s"]),
                "tokens_per_s_factor": f"{last['tokens_per_s'] / first['tokens_per_s']:.2f}",
                "gflop_per_s_factor": f"{last['gflop_per_s'] / first['gflop_per_s']:.2f}",
            }
        )
    return pd.DataFrame(rows)


def receive_tables(results: Sequence[Result]) -> NamedTables:
    """Return `time_receives` and `time_forwards` (see `receives`) of all pipelines, with POINT and `repeat`."""
    received = [(result, receives(result.calls)) for result in results if (result.calls["op"] == "recv").any()]
    stages = [(result, forwards(result.calls)) for result, _ in received]
    return {
        name: pd.concat([table.assign(**named(result.point)) for result, table in parts], ignore_index=True)
        for name, parts in (("time_receives", received), ("time_forwards", stages))
        if parts
    }


def message_times(runs: Sequence[tuple[Messages, Run]]) -> pd.DataFrame:
    """Return `time_messages`, a row per bare message: `connections`, `repeat`, `what`, `payload_bytes`, `transfer_ns`.

    The transfer is the receiver's, from when both ranks had arrived.
    """
    parts = [pd.DataFrame(columns=["connections", "repeat", "what", "payload_bytes", "transfer_ns"])]
    for of, run in runs:
        calls = timed_calls(run)
        received = calls.loc[(calls["op"] == "recv") & calls["tag"].isin([*TAGS]) & (calls["release"] > 0)]
        parts.append(
            pd.DataFrame(
                {
                    "connections": "when used" if of.lazy else "at once",
                    "repeat": of.repeat,
                    "what": received["tag"].map(TAGS),
                    "payload_bytes": received["payload"],
                    "transfer_ns": (received["blocked_until"] - received["release"]).clip(lower=0),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)
