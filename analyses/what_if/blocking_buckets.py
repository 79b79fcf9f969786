"""Buckets of another size, of gradients and parameters whose calls block their rank: ZeRO and FSDP2 over gloo.

With other sizes,

    gradients   are reduced in the recorded call that has the last of them, and parameters gathered in the one that has
                the first of them; several messages of one call follow each other
    transfer    a message takes a latency and a time per byte, which divide the recorded time of a pass. The latency is
                that of a line through the mean transfers by payload (`message_dtype.fitted_latency`). After --network,
                a message takes what the network predicts, and as much beyond that as the recorded ones took each; the
                bound is that it belongs to bytes instead
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

from .buckets import equal_passes, one_size
from .changed_run import ChangedRun, DoesNotApplyError, expected_ns
from .message_dtype import fitted_latency
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
        for rows in equal_passes(replay, call) if len(call) else ():
            example = rows[0, 0]
            op = str(calls.text("op", example[0]))
            yield BlockingCalls(op, purpose, rows, calls["payload"][example].tolist())


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
    for recorded, messages in changed:
        own_ns = transfer_ns[:, replay.ended[recorded.calls]]
        if run.network is None:
            of_operation = [own for own, _ in changed if own.op == recorded.op]
            times = _divided(own_ns, recorded, messages, _latency(replay, transfer_ns[0], of_operation))
        else:
            times = _predicted(run, run.network, own_ns, recorded, messages)
        _rewire(rewiring, recorded, messages, times)
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
    return fitted_latency(sizes, means)


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


def _rewire(rewiring: Rewiring, recorded: BlockingCalls, messages: Sequence[NewMessage], times: Array) -> None:
    replay, calls = rewiring.replay, recorded.calls
    is_gone = np.zeros(len(replay.begun), bool)
    is_gone[calls] = True
    for at in range(len(recorded.payload)):
        call = calls[:, :, at]
        moment = replay.begun[call]
        for number, message in enumerate(messages):
            if message.at == at:
                moment = rewiring.add_messages(moment, times[..., number], call, message.payload)
                is_gone[call] = False
        rewiring.add(moment, replay.ended[call], 0, Part.ORDER, call)
    rewiring.delays[:, is_gone[replay.call] & (replay.part == Part.CALL)] = 0
