"""Buckets of another size, of gradients and parameters whose calls block their rank: ZeRO and FSDP2 over gloo.

With other sizes,

    gradients   are reduced in the recorded call that has the last of them, and parameters gathered in the one that has
                the first of them; several messages of one call follow each other
    transfer    a message takes a latency and a time per byte, which divide the recorded time of a pass. The latency is
                that of a line through the mean transfers by payload, if payloads differ by `FITTED_RANGE`, else 0; it
                is bounded by 0 and the shortest mean. After --network, a message takes what the network predicts, and
                as much beyond that as the recorded ones took each; the bound is that it belongs to bytes instead
    calls       without a message take no time
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from commtrace.analyses.grouping import Array
from commtrace.network.networks import Network
from commtrace.schema import Flag, Purpose

from .buckets import one_size
from .changed_run import ChangedRun, DoesNotApplyError, expected_ns
from .message_dtype import FITTED_RANGE
from .recorded_graph import Part, Replay
from .rewiring import Rewiring

_PURPOSES: Final = (
    Purpose.GRADIENTS, Purpose.PARAMETERS_FORWARD, Purpose.PARAMETERS_BACKWARD, Purpose.PARAMETERS_RECOMPUTATION,
)  # fmt: skip


class NewMessage(NamedTuple):
    """A message of a pass.

    Attributes:
        at: The call that sends it: its position among the recorded calls of the pass.
        payload: Its bytes.
    """

    at: int
    payload: int


@dataclass(frozen=True, eq=False)
class BlockingCalls:
    """Calls of one operation and purpose, in all passes with the same messages.

    Attributes:
        op: Their operation.
        purpose: Their purpose.
        calls: The calls, shape (passes, ranks, calls of a pass), in their order.
        payload: Bytes of each call of a pass.
    """

    op: str
    purpose: Purpose
    calls: Array
    payload: list[int]


def blocking_calls(replay: Replay) -> Iterator[BlockingCalls]:
    """Yield the calls of all ranks of a group that reduce gradients or gather parameters, and block their rank."""
    calls = replay.paths.calls
    known = (replay.begun >= 0) & (replay.ended >= 0) & (calls["instance"] >= 0)
    known &= (calls["flags"] & int(Flag.ASYNC)) == 0
    for purpose in _PURPOSES:
        call = np.flatnonzero(known & calls.has_label("purpose", purpose.value))
        channel = calls.channel[calls["instance"][call]]
        keys = np.stack([channel, *(calls[name][call].astype(np.int64) for name in ("op", "step", "micro_batch"))])
        order = np.lexsort((replay.begun[call], calls["process"][call], *keys[::-1]))
        call, keys = call[order], keys[:, order]
        passes: dict[tuple[int, int, tuple[int, ...]], list[Array]] = {}
        bounds = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1
        for own, first in zip(np.split(call, bounds), (0, *bounds.tolist()), strict=True):
            number, op = keys[:2, first].tolist() if len(call) else (0, 0)
            ranks = len(np.unique(calls["process"][own]))
            if not ranks or ranks != len(calls.channels[number].ranks) or len(own) % ranks:
                continue  # the first replayed pass has begun before the first step
            rows = own.reshape(ranks, -1)
            if (calls["instance"][rows] != calls["instance"][rows[0]]).any():
                raise DoesNotApplyError("the ranks called other operations, or in another order")
            passes.setdefault((number, op, tuple(calls["payload"][rows[0]].tolist())), []).append(rows)
        for (_, op, payload), rows_of_passes in passes.items():
            name = str(calls.categories["op"][op])
            yield BlockingCalls(name, purpose, np.stack(rows_of_passes), [*payload])


def with_messages(
    run: ChangedRun, changed: Sequence[tuple[BlockingCalls, Sequence[NewMessage]]]
) -> tuple[Replay, Array]:
    """Return the graph with other messages.

    Args:
        run: The run after the changes before.
        changed: Recorded calls, and the messages of each pass instead of theirs.

    Returns:
        The graph, and its delays, shape (n, edges).

    Raises:
        DoesNotApplyError: A network does not predict an operation.
    """
    replay = run.replayed.replay
    rows = np.broadcast_to(run.delays, (3, run.delays.shape[-1]))
    transfer_ns = _recorded_transfers(replay, rows)
    rewiring = Rewiring(replay, rows)
    is_changed = np.zeros(len(replay.graph.start), bool)
    for recorded, _ in changed:
        is_changed[replay.ended[recorded.calls]] = True
    rewiring.kept &= ~(is_changed[replay.graph.target] & (replay.part == Part.TRANSFER))
    waits = rows[:, replay.waits]
    no_wait = bool(waits.size) and np.isneginf(waits).all(axis=1)
    for recorded, messages in changed:
        own_ns = transfer_ns[:, replay.ended[recorded.calls]]
        if run.network is None:
            of_operation = [own for own, _ in changed if own.op == recorded.op]
            times = _divided(own_ns, recorded, messages, _latency(replay, transfer_ns[0], of_operation))
        else:
            times = _predicted(run, run.network, own_ns, recorded, messages)
        _rewire(rewiring, recorded, messages, times, np.broadcast_to(no_wait, len(rows)))
    return rewiring.build()


def _recorded_transfers(replay: Replay, delays: Array) -> Array:
    """Return the transfer to each event, ns, shape (n, events), inf: none."""
    edges = np.flatnonzero(replay.part == Part.TRANSFER)
    target = replay.graph.target[edges]
    result = np.full((len(delays), len(replay.graph.start)), np.inf)
    for row, own in zip(result, delays[:, edges], strict=True):
        np.minimum.at(row, target, np.where(np.isfinite(own), own, np.inf))
    return result


def _latency(replay: Replay, transfer_ns: Array, recorded: Sequence[BlockingCalls]) -> Array:
    """Return the latency of transfers of one operation, ns, shape (3,): as predicted, the least, the largest possible.

    Means, not medians: a pass takes the sum of its transfers.

    Raises:
        DoesNotApplyError: The messages have one size.
    """
    calls = np.concatenate([own.calls.ravel() for own in recorded])
    sizes, number = np.unique(replay.paths.calls["payload"][calls].astype(np.int64), return_inverse=True)
    if len(sizes) == 1:
        raise DoesNotApplyError(one_size(int(sizes[0])))
    means = np.bincount(number, transfer_ns[replay.ended[calls]]) / np.bincount(number)
    fitted = 0.0
    if sizes[-1] >= FITTED_RANGE * max(sizes[0], 1):
        fitted = float(np.polyfit(sizes.astype(float), means, 1, w=1 / np.maximum(means, 1.0))[1])
    return np.array([np.clip(fitted, 0, means.min()), 0.0, means.min()])


def _divided(transfer_ns: Array, recorded: BlockingCalls, messages: Sequence[NewMessage], latency: Array) -> Array:
    """Return the transfers of messages from those of the recorded calls, ns, shape (3, passes, ranks, messages).

    Args:
        transfer_ns: Recorded transfers, ns, shape (3, passes, ranks, calls).
        recorded: The calls.
        messages: The messages instead of theirs.
        latency: As predicted, the least, the largest, ns, shape (3,).
    """
    count, fewer = len(recorded.payload), len(messages) < len(recorded.payload)
    predicted, least, largest = latency.tolist()
    # The more latency, the shorter are fewer messages, and the longer are more.
    shares = np.array([predicted, largest, least] if fewer else [predicted, least, largest])[:, None, None]
    total = transfer_ns.sum(axis=-1)
    each = np.minimum(shares, total / count)
    part = np.array([message.payload for message in messages]) / sum(message.payload for message in messages)
    return np.asarray(each[..., None] + (total - count * each)[..., None] * part)


def _predicted(
    run: ChangedRun, network: Network, transfer_ns: Array, recorded: BlockingCalls, messages: Sequence[NewMessage]
) -> Array:
    """Return the transfers of messages, as a network predicts them, and what the recorded ones take beyond that.

    Returns:
        ns, shape (3, passes, ranks, messages): with as much for each message, and twice with as much for each byte.
    """
    sizes = [*recorded.payload, *(message.payload for message in messages)]
    expected = np.array(expected_ns(run, network, int(recorded.calls[0, 0, 0]), sizes))
    before, after = np.split(expected, [len(recorded.payload)])
    total = transfer_ns.sum(axis=-1)[..., None]
    by_byte = total / before.sum() * after
    by_message = np.where(total > before.sum(), after + (total - before.sum()) / len(before), by_byte)
    return np.concatenate([by_message[:1], by_byte[1:]])


def _rewire(
    rewiring: Rewiring, recorded: BlockingCalls, messages: Sequence[NewMessage], times: Array, no_wait: Array
) -> None:
    replay, calls = rewiring.replay, recorded.calls
    passes, ranks, count = calls.shape
    for at in range(count):
        call, moment, ended = calls[:, :, at], replay.begun[calls[:, :, at]], replay.ended[calls[:, :, at]]
        own = [number for number, message in enumerate(messages) if message.at == at]
        for number in own:
            arrived = np.repeat(rewiring.new_events(passes, 1), ranks, axis=1)
            over = rewiring.new_events(passes, ranks)
            transfer, size = times[..., number], messages[number].payload
            rewiring.add(moment, arrived, 0, Part.ORDER, call)
            rewiring.add(moment, over, transfer, Part.TRANSFER, call, message=size)
            awaited = np.where(no_wait[:, None, None], -np.inf, transfer)
            rewiring.add(arrived, over, awaited, Part.TRANSFER, call, waits=True, message=size)
            moment = over
        rewiring.add(moment, ended, 0, Part.ORDER, call)
        if not own:
            is_gone = np.zeros(len(replay.begun), bool)
            is_gone[call] = True
            rewiring.delays[:, is_gone[replay.call] & (replay.part == Part.CALL)] = 0
