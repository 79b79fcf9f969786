"""The change `world-size=N`: a data-parallel job runs on another number of ranks, each with the same work.

    computation  of a rank stays (weak scaling); its deviation from the mean of the ranks, in each part of a step, grows
                 as the expected maximum of N values does (`more_ranks`), so that ranks wait longer for the last one
    payload      stays: of reductions, of broadcasts, and of parameters and gradients that ranks have shards of. Where
                 each rank adds its own share (other all_gathers, gathers, scatters), it grows with the ranks
    transfer     after --network: changes as the times do that the (new) network predicts for both numbers of ranks.
                 Without, its latency stays, and the rest grows with the bytes; the interval is from the largest
                 possible latency that stays, to one that grows with the steps of a ring

`commtrace scaling` projects from several runs by the same laws of latency, bytes and late ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from commtrace.analyses.grouping import Array
from commtrace.analyses.more_ranks import expected_maximum
from commtrace.errors import CommtraceError
from commtrace.formatting import format_count
from commtrace.network.algorithms import RING, steps
from commtrace.network.bench_operations import BARRIER, COLLECTIVES, bus_bytes
from commtrace.network.networks import Network, hosts_of_group
from commtrace.operations import OPERATIONS, Extent
from commtrace.schema import Purpose

from .changed_run import ChangedRun, ReplayedRun, kinds_of_calls, with_scaled_transfers
from .message_dtype import latencies
from .recorded_graph import Part

VALIDATED_RANKS: Final = 4
"""Ranks up to which predictions were held to real runs over gloo."""
_ROLES: Final = ("data", "world", "self")
_SHARDED: Final = (
    Purpose.GRADIENTS, Purpose.PARAMETERS_FORWARD, Purpose.PARAMETERS_BACKWARD, Purpose.PARAMETERS_RECOMPUTATION,
    Purpose.PARAMETERS_STAGE, Purpose.PARAMETERS_ON_REQUEST, Purpose.PARAMETERS_AFTER_OPTIMIZER,
)  # fmt: skip


def with_world_size(run: ChangedRun, ranks: int) -> ChangedRun:
    """Return a run on another number of ranks.

    Args:
        run: The run after the changes before.
        ranks: The number of ranks.

    Raises:
        CommtraceError: Its ranks do other things than data parallelism, or a network does not predict an operation.
    """
    replay, calls = run.replayed.replay, run.replayed.replay.paths.calls
    before = _data_parallel_ranks(run.replayed)
    is_transfer = replay.part == Part.TRANSFER
    edges = np.flatnonzero(is_transfer & (run.delays > 0).any(axis=0))
    transfers, number = replay.transfers(edges)
    payload, call = replay.payload(transfers), replay.call[transfers]
    grows = ~calls.has_label("purpose", *(purpose.value for purpose in _SHARDED))[call]
    grows &= calls.has_label("op", *(name for name, own in OPERATIONS.items() if Extent.SHARE in _ends(name)))[call]
    grows &= ~calls.has_label("op", "reduce_scatter")[call]
    new_payload = np.where(grows, np.round(payload * (ranks / before)), payload).astype(np.int64)
    if run.network is not None:
        factor = _by_network(run, run.network, before, ranks, transfers, new_payload)
    else:
        own = np.broadcast_to(run.delays, (3, run.delays.shape[-1]))[:, transfers]
        factor = _by_bytes(run.replayed, before, ranks, transfers, new_payload, own) / np.maximum(own, 1e-9)
    scaled = with_scaled_transfers(run, edges, number, factor, is_transfer)
    later = expected_maximum(ranks) / expected_maximum(before)
    message = replay.message.copy()
    message[edges] = np.where(grows[number], new_payload[number], message[edges])
    return replace(
        scaled, delays=np.stack([_with_later_ranks(run.replayed, row, later) for row in scaled.delays]),
        replayed=replace(run.replayed, replay=replace(replay, message=message), new_world_size=ranks),
        remarks=(*run.remarks, *_remarks(run, before, ranks, transfers, grows)),
    )  # fmt: skip


def _ends(op: str) -> tuple[Extent, Extent]:
    return OPERATIONS[op].input, OPERATIONS[op].output


def _data_parallel_ranks(run: ReplayedRun) -> int:
    """Return the number of ranks of a data-parallel job, all of which make each call. Raises CommtraceError."""
    replay, calls, path = run.replay, run.replay.paths.calls, run.run.log.path
    before = run.world_size
    call = np.unique(replay.call[run.selected("")])
    others = sorted({str(role) for role in calls.text("role", call)} - {*_ROLES})
    hint = "predict it from dry runs of that world size: commtrace dryrun --world-size, then whatif with its logs"
    if others:
        raise CommtraceError(
            f"{path}: --world-size changes data parallelism alone; its steps have calls of {', '.join(others)}, too, "
            f"whose ranks and sizes depend on the layout; {hint}"
        )
    ops = sorted({str(op) for op in calls.text("op", call)} - {*COLLECTIVES, BARRIER})
    if ops:
        raise CommtraceError(f"{path}: it is not known how {', '.join(ops)} change with the number of ranks; {hint}")
    sizes = {int(size) for size in calls.per_call(calls.expected)[call]} - {0, 1}
    if sizes != {before}:
        raise CommtraceError(
            f"{path}: its steps have calls among {', '.join(map(format_count, sorted(sizes)))} of {before} ranks; "
            f"--world-size needs calls among all ranks; {hint}"
        )
    return before


def _by_network(
    run: ChangedRun, network: Network, before: int, ranks: int, transfers: Array, new_payload: Array
) -> Array:
    """Return by which factor the expected time of each transfer changes, shape (transfers,)."""
    replay, hosts = run.replayed.replay, run.replayed.hosts
    per_host = max(network.ranks_per_node, -(-before // len({*hosts.values()})))
    factor = np.ones(len(transfers))
    payload = replay.payload(transfers)
    for op, size, _, of_hosts, at in kinds_of_calls(replay.paths.calls, hosts, replay.call[transfers], payload):
        now = network.expected(op, size, before, of_hosts)
        then = network.expected(op, int(new_payload[at[0]]), ranks, hosts_of_group(ranks, 1, per_host))
        if now is None or then is None or not now.total_us:
            raise CommtraceError(f"{network.name} does not predict {op}")
        factor[at] = then.total_us / now.total_us
    return factor


def _by_bytes(
    run: ReplayedRun, before: int, ranks: int, transfers: Array, new_payload: Array, transfer_ns: Array
) -> Array:
    """Return the time of each transfer: predicted, the shortest and the longest, ns, shape (3, transfers).

    Args:
        run: The run.
        before: Its number of ranks.
        ranks: The new number.
        transfers: An edge of each transfer.
        new_payload: Its bytes on that number of ranks.
        transfer_ns: Its time, shape (3, transfers).
    """
    replay = run.replay
    payload, ops = replay.payload(transfers), replay.paths.calls.text("op", replay.call[transfers])
    fitted, least, largest = np.minimum(latencies(run, transfers, payload, transfer_ns[0]), transfer_ns)
    growth, ring = np.ones((2, len(transfers)))
    for op in np.unique(ops).tolist():
        own = ops == op
        now, then = (
            np.maximum(bus_bytes(op, size[own], n), 1e-9) for size, n in ((payload, before), (new_payload, ranks))
        )
        growth[own] = np.where(payload[own] > 0, then / now, 1)
        ring[own] = steps(op, ranks, RING) / steps(op, before, RING)
    stays = np.stack([fitted, largest, largest])
    rest = (transfer_ns - stays) * growth
    possible = (least + (transfer_ns[1] - least) * growth, stays[1] + rest[1], stays[2] * ring + rest[2])
    bounds = np.sort(np.stack(possible), axis=0)
    return np.stack([stays[0] + rest[0], bounds[0], bounds[2]])


def _with_later_ranks(run: ReplayedRun, delays: Array, factor: float) -> Array:
    """Return delays with which ranks differ so many times as much from their mean in each part of a step."""
    sums = run.gaps.sums(delays)
    mean = run.gaps.of_others(sums, np.mean, None)
    return run.gaps.scaled(delays, sums, np.maximum(mean + (sums - mean) * factor, 0))


def _remarks(run: ChangedRun, before: int, ranks: int, transfers: Array, grows: Array) -> Iterator[str]:
    calls = run.replayed.replay.paths.calls
    yield (
        f"world-size: {before} to {ranks} ranks, each of which computes for as long as recorded (weak scaling: the "
        "batch grows with the ranks; an optimizer whose state is sharded computes less). How late the last rank is "
        "grows as the expected maximum of so many independent normal values."
    )
    if run.network is None:
        yield (
            "Transfers follow from the run's own: their latency stays, and bytes grow by their closed forms at the "
            "recorded bandwidth. Slower links between more hosts need --network before --world-size."
        )
    if grows.any():
        ops = ", ".join(sorted({*calls.text("op", run.replayed.replay.call[transfers[grows]]).tolist()}))
        yield f"Of calls that are neither for parameters nor gradients ({ops}), the share of each rank stays."
    if ranks > VALIDATED_RANKS:
        yield f"Such predictions were compared with real runs of up to {VALIDATED_RANKS} ranks over gloo only."
