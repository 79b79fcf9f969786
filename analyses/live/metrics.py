"""Numbers of a run for tools that keep numbers: a value per step for TensorBoard, the present ones for Prometheus.

Units are those of Prometheus: seconds and bytes. Bytes and calls of a step are per recorded rank, counters are sums
over the recorded ranks. What is not known has no sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from commtrace.analyses.grouping import rows_of
from commtrace.formatting import is_known

from .followed_run import LiveRun

if TYPE_CHECKING:
    from prometheus_client import Metric

PARTS: Final = ("computation", "waiting", "exposed", "hidden")
"""Parts of a step; the columns of `step_times`."""


class StepValue(NamedTuple):
    """A number of a training step."""

    name: str
    step: int
    value: float


def step_values(live: LiveRun, after: int = -1) -> Iterator[StepValue]:
    """Yield the numbers of the measured steps after `after`, in the order of the steps.

    `step_seconds`, `computation_seconds` (waiting, exposed, hidden), `exposed_share` of the step, `slowest_rank`,
    `slowest_rank_delay_seconds`; `payload_bytes/PURPOSE` and `calls/PURPOSE`, whose names need the table
    `purposes_by_step`.
    """
    times = live.tables["step_times"]
    volumes = live.tables["purposes_by_step"]
    columns = ["payload_bytes_per_rank", "calls_per_rank"]
    sums = volumes.groupby(["step", "purpose"], observed=True, as_index=False)[columns].sum(min_count=1)
    for row in rows_of(times.loc[times["step"] > after]):
        step = int(row.step)
        yield StepValue("step_seconds", step, row.ns / 1e9)
        for part in PARTS:
            yield StepValue(f"{part}_seconds", step, getattr(row, f"{part}_ns") / 1e9)
        yield StepValue("exposed_share", step, row.exposed_ns / row.ns)
        yield StepValue("slowest_rank", step, row.slowest_rank)
        yield StepValue("slowest_rank_delay_seconds", step, row.delay_ns / 1e9)
        for own in rows_of(sums.loc[sums["step"] == step]):
            if is_known(own.payload_bytes_per_rank):
                yield StepValue(f"payload_bytes/{own.purpose}", step, own.payload_bytes_per_rank)
            yield StepValue(f"calls/{own.purpose}", step, own.calls_per_rank)


def metric_families(live: LiveRun) -> Iterator[Metric]:
    """Yield the present numbers of a run as metrics of prometheus_client, each with the label `run`."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    run, tables = live.run.id, live.tables
    processes = GaugeMetricFamily("commtrace_processes", "Processes by state.", labels=["run", "state"])
    for state, count in sorted(Counter(end.state for end in live.run.ends).items()):
        processes.add_metric([run, state], count)
    yield processes
    step = GaugeMetricFamily("commtrace_step", "Last training step of which a call is in the log.", labels=["run"])
    if live.step >= 0:
        step.add_metric([run], live.step)
    yield step
    yield from _last_step(live)
    keys = ["purpose", "role", "op"]
    labels = ["run", "purpose", "dimension", "operation"]
    for name, column, text in (
        ("commtrace_calls", "calls", "Calls."),
        ("commtrace_payload_bytes", "payload_bytes", "Payload of the calls."),
        ("commtrace_wire_bytes", "wire_bytes", "The fewest bytes that can be sent for them."),
    ):
        counter = CounterMetricFamily(name, f"{text} Sum over the recorded ranks.", labels=labels)
        for *names, value in tables["volume_by_purpose"][[*keys, column]].itertuples(index=False, name=None):
            if is_known(value):
                counter.add_metric([run, *map(str, names)], float(value))
        yield counter
    stuck = GaugeMetricFamily(
        "commtrace_stuck_seconds", "Time for which a call has not completed.",
        labels=["run", "operation", "ranks", "absent"],
    )  # fmt: skip
    for call in rows_of(tables["stuck_calls"]):
        stuck.add_metric([run, call.op, call.group_ranks, call.absent_ranks], call.waited_ns / 1e9)
    yield stuck
    stalled = GaugeMetricFamily(
        "commtrace_stalled_seconds", "Time for which a rank has made no progress, and what it does.",
        labels=["run", "rank", "activity", "line"],
    )  # fmt: skip
    for row in rows_of(tables["stalled_threads"]):
        if row.is_main:
            line = row.line if is_known(row.line) else ""
            stalled.add_metric([run, str(row.rank), row.activity, line], row.stalled_ns / 1e9)
    yield stalled


def _last_step(live: LiveRun) -> Iterator[Metric]:
    """Yield the times of the last measured step."""
    from prometheus_client.core import GaugeMetricFamily

    seconds = GaugeMetricFamily(
        "commtrace_step_seconds", "Last measured step: its duration, and parts, mean over the ranks.",
        labels=["run", "part"],
    )  # fmt: skip
    delay = GaugeMetricFamily(
        "commtrace_delay_seconds", "Computation of the slowest rank beyond the median of the others, likewise.",
        labels=["run", "rank"],
    )  # fmt: skip
    for row in rows_of(live.tables["step_times"].tail(1)):
        seconds.add_metric([live.run.id, "step"], row.ns / 1e9)
        for part in PARTS:
            seconds.add_metric([live.run.id, part], getattr(row, f"{part}_ns") / 1e9)
        delay.add_metric([live.run.id, str(row.slowest_rank)], row.delay_ns / 1e9)
    yield seconds
    yield delay
