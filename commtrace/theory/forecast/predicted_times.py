"""How long a network should take for what a training will communicate (`commtrace.network`).

Times are sums over the calls of a rank, as if each waited for the one before it and nothing ran beside it: what
overlaps with computation costs less, and what ranks wait for each other comes on top. Ranks fill one node after the
other, and the ranks of a role are as far apart as parallel dimensions are laid out in GPT-NeoX and Megatron: tensor
parallelism innermost, pipeline outermost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from commtrace.network.networks import DESCRIBED, EXTRAPOLATED, FITTED, LOCAL, Network, hosts_of_group
from commtrace.theory import ExpectedCall, Prediction
from commtrace.theory.rules.torch.fsdp import COPIES

from .predicted_volumes import Forecast, phases


def time_rows(found: Forecast, network: Network) -> Iterator[dict[str, Any]]:
    """A row for each part, role and operation of a rank, and one for the whole part, whose operation is "all".

    `latency_us`, `bandwidth_us` and their sum `time_us` are None where the network knows nothing of an operation; such
    calls are counted in `calls_without_time`, and are not in the sums of "all". `how`: the weakest of their sources. Of
    a pipeline for each stage, whose number is `stage`.
    """
    for number, prediction in enumerate(found.kinds):
        stage = {"stage": number} if found.stages else {}
        for name, messages in phases(prediction):
            groups: dict[tuple[str, str], list[ExpectedCall]] = {}
            for one in messages:
                groups.setdefault((one.role, one.op), []).append(one)
            rows = [
                {**stage, "when": name, "role": role, "op": op, **_time(found, prediction, network, some)}
                for (role, op), some in sorted(groups.items())
            ]
            yield from rows
            yield {**stage, "when": name, "role": "all", "op": "all", **_sum(rows)}


def _time(
    found: Forecast, prediction: Prediction, network: Network, messages: Iterable[ExpectedCall]
) -> dict[str, Any]:
    latency, bandwidth, calls, without = 0.0, 0.0, 0, 0
    sources = []
    for one in messages:
        ranks = one.ranks or prediction.ranks_of(one.role)
        expected = network.expected(one.op, one.payload, ranks, num_hosts(found, one, ranks, network.ranks_per_node))
        calls += one.calls
        if expected is None:
            without += one.calls
            continue
        latency += expected.latency_us * one.calls
        bandwidth += expected.bandwidth_us * one.calls
        sources.append(expected.how)
    known = calls > without
    return {
        "calls": calls,
        "calls_without_time": without,
        "latency_us": latency if known else None,
        "bandwidth_us": bandwidth if known else None,
        "time_us": latency + bandwidth if known else None,
        "how": weakest(sources),
    }


def _sum(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    some = list(rows)
    sums: dict[str, Any] = {name: sum(row[name] for row in some) for name in ("calls", "calls_without_time")}
    known = [row for row in some if row["time_us"] is not None]
    told = {name: sum(row[name] for row in known) if known or not some else None for name in _PARTS}
    return {**sums, **told, "how": weakest([row["how"] for row in some if row["how"] is not None])}


_PARTS = ("latency_us", "bandwidth_us", "time_us")


def weakest(sources: Iterable[str]) -> str | None:
    """Of where times come from, what is furthest from a measurement."""
    some = set(sources)
    return next((how for how in (DESCRIBED, EXTRAPOLATED, FITTED, LOCAL) if how in some), None)


def num_hosts(found: Forecast, message: ExpectedCall, ranks: int, ranks_per_node: int) -> int:
    """Hosts of the group of a role, of so many ranks; of a message, whether it leaves its host: 1 or 2."""
    stages, of_a_stage = len(found.kinds), found.ranks_of_a_kind
    if message.role == "model":
        places = {stage * of_a_stage + part for stage in range(stages) for part in range(found.plan.layout.tensor)}
        return len({place // ranks_per_node for place in places})
    some = 2 if message.op in _MESSAGES else ranks
    return hosts_of_group(some, _stride(found, message, some), ranks_per_node)


_MESSAGES = ("send", "recv", "sendrecv")


def _stride(found: Forecast, message: ExpectedCall, ranks: int) -> int:
    """From one rank of a role's group to the next."""
    layout, of_a_stage = found.plan.layout, found.ranks_of_a_kind
    if message.role == "pipeline":  # of some of the stages: the first and the last, which share weights
        return of_a_stage if message.op in _MESSAGES else of_a_stage * ((len(found.kinds) - 1) // max(ranks - 1, 1))
    if message.role == "data" and (message.cause == COPIES or (layout.experts > 1 and message.ranks)):
        return of_a_stage // ranks  # between them are those that have the other parts, or the other experts
    # Ranks that share sequences reduce gradients together with the others.
    return layout.tensor if message.role in ("data", "expert") else 1
