"""Predicted communication times of a job that has not run, on a network (`commtrace.network`).

Times are sums over the calls of a rank, as if each began when the previous one ended and none was overlapped: overlap
with computation reduces them, and waiting for other ranks adds to them. Ranks fill one host after the other, and
parallel dimensions are placed as in GPT-NeoX and Megatron: tensor parallelism innermost, pipeline outermost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from commtrace.network.networks import DESCRIBED, EXTRAPOLATED, FITTED, LOCAL, Network, hosts_of_group
from commtrace.operations import MESSAGES
from commtrace.theory import ExpectedCall, Prediction
from commtrace.theory.rules.torch.fsdp import COPIES

from .predicted_volumes import Forecast, period_groups

_TIMES: Final = ("latency_us", "bandwidth_us", "time_us")


def time_rows(job: Forecast, network: Network) -> Iterator[dict[str, Any]]:
    """Yield a row for each period, role and operation of a rank, and a total ("all") for each period.

    Columns `latency_us`, `bandwidth_us` and their sum `time_us` are microseconds, or None where the network has no
    numbers for an operation; such calls are counted in `calls_without_time`, and left out of the sums of "all". `how`
    is the weakest source of the times. In a pipeline there are such rows for each `stage`.
    """
    for cells, prediction, groups in period_groups(job):
        rows = [
            {**cells, "role": role, "op": op, **_time(job, prediction, network, calls)}
            for (role, op), calls in groups.items()
        ]
        yield from rows
        yield {**cells, "role": "all", "op": "all", **total_time(rows)}


def _time(job: Forecast, prediction: Prediction, network: Network, calls: Iterable[ExpectedCall]) -> dict[str, Any]:
    latency, bandwidth, count, without_time = 0.0, 0.0, 0, 0
    sources = []
    for call in calls:
        ranks = call.ranks or prediction.ranks_of(call.role)
        expected = network.expected(call.op, call.payload, ranks, num_hosts(job, call, ranks, network.ranks_per_node))
        count += call.calls
        if expected is None:
            without_time += call.calls
            continue
        latency += expected.latency_us * call.calls
        bandwidth += expected.bandwidth_us * call.calls
        sources.append(expected.source)
    times = (latency, bandwidth, latency + bandwidth) if sources else (None, None, None)
    counts = {"calls": count, "calls_without_time": without_time}
    return {**counts, **dict(zip(_TIMES, times, strict=True)), "how": weakest_source(sources)}


def total_time(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of a period's rows; times are None if there are rows and none has one."""
    timed = [row for row in rows if row["time_us"] is not None]
    return {
        "calls": sum(row["calls"] for row in rows),
        "calls_without_time": sum(row["calls_without_time"] for row in rows),
        **{name: sum(row[name] for row in timed) if timed or not rows else None for name in _TIMES},
        "how": weakest_source(row["how"] for row in rows),
    }


def weakest_source(sources: Iterable[str | None]) -> str | None:
    """Return the source of times that is furthest from a measurement."""
    present = set(sources)
    return next((how for how in (DESCRIBED, EXTRAPOLATED, FITTED, LOCAL) if how in present), None)


def num_hosts(job: Forecast, call: ExpectedCall, ranks: int, ranks_per_node: int) -> int:
    """Return the number of hosts of a call's group; for a message, 2 if it leaves its host."""
    if call.role == "model":
        first_ranks = (stage * job.ranks_per_prediction for stage in range(len(job.predictions)))
        group = {first + offset for first in first_ranks for offset in range(job.plan.layout.tensor_parallel_size)}
        return len({rank // ranks_per_node for rank in group})
    members = 2 if call.op in MESSAGES else ranks
    return hosts_of_group(members, _stride(job, call, members), ranks_per_node)


def _stride(job: Forecast, call: ExpectedCall, ranks: int) -> int:
    """Return the distance from one rank of a call's group to the next."""
    layout, per_stage = job.plan.layout, job.ranks_per_prediction
    if call.role == "pipeline":
        if call.op in MESSAGES:
            return per_stage
        return per_stage * ((len(job.predictions) - 1) // max(ranks - 1, 1))  # first and last stage share weights
    if call.role == "data" and (call.cause == COPIES or (layout.expert_parallel_size > 1 and call.ranks)):
        return per_stage // ranks  # ranks with other shards or experts are between them
    # Ranks that share sequences reduce gradients together with the others.
    return layout.tensor_parallel_size if call.role in ("data", "expert") else 1
