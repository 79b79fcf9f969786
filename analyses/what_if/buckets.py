"""Gradient buckets of another size: the graph of the recorded steps with other background all_reduces in backward.

DistributedDataParallel puts gradients into buckets in the order in which they become ready, closes a bucket once it
holds its limit, and all_reduces it when its last gradient is ready. With another limit,

    gradients  have the sizes of the captured model's parameters, if these add up to the recorded buckets; else those
               of a recorded bucket are as many equal ones as the new limit divides it into
    ready      when a recorded bucket was launched, its last gradient was ready; within a bucket, gradients become
               ready in proportion to their bytes over the rank's computation since the launch before. Before the
               first launch, they need as many ns per byte as after it
    transfer   takes as long as a model of messages says (`fitted_messages`, or a network), after all ranks have
               launched the message and the one before it has ended
    wait       for a recorded bucket is a wait for all new messages with its gradients

A launch that is gone takes no time; a new one takes the median of the recorded ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from commtrace.analyses.grouping import Array
from commtrace.formatting import format_bytes
from commtrace.schema import Flag, Purpose
from commtrace.theory.rules.gradients import buckets_reaching_limit

from .changed_run import DoesNotApplyError
from .recorded_graph import Part, Replay
from .rewiring import Rewiring

OPERATION: Final = "all_reduce"
SIZES_UNKNOWN: Final = (
    "The sizes of the gradients are not known: each recorded bucket counts as one gradient, or as several equal ones "
    "if it is larger than the new size."
)
_SHARES: Final = np.linspace(0, 1, 1001)
"""Shares of latency among which the closest one is searched for."""
_MAX_ROWS: Final = 2048
"""Passes of ranks, evenly chosen, that shares are compared for."""
_SERIAL_TOLERANCE: Final = 0.02
"""Part of the time of all messages of a pass by which ends may differ if messages ran one after the other."""
_BOUND_TOLERANCE: Final = 0.05
"""Part of that time by which ends may contradict what messages in flight take: the median of the passes is noisy."""

MessageTimes = Callable[[int], Array]
"""Returns the transfer of a message of so many bytes, ns, for each row of delays, shape (n,)."""


@dataclass(frozen=True, eq=False)
class GradientBuckets:
    """The recorded buckets of one group of ranks, in all steps in which they have the same sizes.

    Attributes:
        calls: The all_reduces, shape (backward passes, ranks, buckets); buckets in the order of their launches.
        payload: Bytes of each bucket, shape (buckets,).
    """

    calls: Array
    payload: Array


def gradient_buckets(replay: Replay) -> list[GradientBuckets]:
    """Return the buckets that DistributedDataParallel all_reduced in the background.

    Raises:
        DoesNotApplyError: There are none, or the ranks of a group launched other ones.
    """
    calls = replay.paths.calls
    is_bucket = calls.has_label("purpose", Purpose.GRADIENTS.value) & calls.has_label("op", OPERATION)
    is_bucket &= ((calls["flags"] & int(Flag.ASYNC)) > 0) & (replay.begun >= 0) & (calls["instance"] >= 0)
    call = np.flatnonzero(is_bucket & (replay.ended >= 0))
    if not len(call) and is_bucket.any():
        raise DoesNotApplyError("the ends of the messages were not observed: record with the native recorder")
    if not len(call):
        raise DoesNotApplyError("the steps have no gradients that DistributedDataParallel reduced in the background")
    if len(np.unique(calls["dtype"][call])) > 1:
        raise DoesNotApplyError("gradients of several data types have buckets of their own")
    return [GradientBuckets(rows, calls["payload"][rows[0, 0]].astype(np.int64)) for rows in equal_passes(replay, call)]


def equal_passes(replay: Replay, call: Array) -> Iterator[Array]:
    """Yield calls of one group and operation in all passes that send the same bytes, shape (passes, ranks, calls).

    Args:
        replay: The run.
        call: The calls, at least one, all of them matched.

    Raises:
        DoesNotApplyError: The ranks of a group launched other ones.
    """
    calls = replay.paths.calls
    channel = calls.channel[calls["instance"][call]]
    keys = np.stack([channel, *(calls[name][call].astype(np.int64) for name in ("op", "step", "micro_batch"))])
    order = np.lexsort((replay.begun[call], calls["process"][call], *keys[::-1]))
    call, keys = call[order], keys[:, order]
    first = np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)))
    passes: dict[tuple[int, int, tuple[int, ...]], list[Array]] = {}
    for own, number, op in zip(np.split(call, first[1:]), *keys[:2, first].tolist(), strict=True):
        ranks = len(np.unique(calls["process"][own]))
        if ranks != len(calls.channels[number].ranks) or len(own) % ranks:
            continue  # the first replayed pass has begun before the first step
        rows = own.reshape(ranks, -1)
        if (calls["instance"][rows] != calls["instance"][rows[0]]).any():
            raise DoesNotApplyError("the ranks launched other buckets, or in another order")
        passes.setdefault((number, op, tuple(calls["payload"][rows[0]].tolist())), []).append(rows)
    yield from map(np.stack, passes.values())


@dataclass(frozen=True, eq=False)
class FittedMessages:
    """Transfers of the messages of a run: latency + bytes * time per byte.

    Attributes:
        total_ns: Time in which messages of a pass are in flight: median over passes and ranks, shape (n,).
        share: Part of it that is latency: predicted, least and largest value, shape (3,).
        count: Messages of a pass.
        payload: Their bytes.
    """

    total_ns: Array
    share: Array
    count: int
    payload: int

    def times(self, payload: int, shares: Array) -> Array:
        """Return the transfer of a message of these bytes, ns, shape (n,), if `shares`, shape (n,), are latency."""
        return np.asarray(self.total_ns * (shares / self.count + (1 - shares) * payload / self.payload))


def fitted_messages(replay: Replay, delays: Array, buckets: GradientBuckets) -> FittedMessages:
    """Return a model of the messages of buckets, from the time in which any of them is in flight.

    Messages in flight share a link, in parts that are not known: the time of all is known, but not that of each. By the
    end of a message, the link has been busy for at least what all messages take that have ended, and at most for what
    all take that were released. With a share s of latency, k of K messages with B_k of B bytes take the part
    s k / K + (1 - s) B_k / B of the busy time. If a share explains all ends, in that messages ran one after the other,
    it is that one. Otherwise, it is the least share for which no end contradicts these bounds, and the largest one is
    its upper bound.

    Args:
        replay: The run.
        delays: Delays, ns, shape (n, edges).
        buckets: Its buckets.

    Raises:
        DoesNotApplyError: The messages have one size.
    """
    payload, count = buckets.payload, len(buckets.payload)
    if payload.min() == payload.max():
        raise DoesNotApplyError(one_size(int(payload[0])))
    busy = _Busy.of(replay, delays, buckets)
    every = -(-busy.until[0, ..., 0].size // _MAX_ROWS)
    part, order, released = (
        column[0].reshape(-1, count)[::every] for column in (busy.until, busy.order, busy.released)
    )
    part = part / np.maximum(part[:, -1:], 1)
    held, launched = np.cumsum(payload[order], axis=-1) / payload.sum(), np.cumsum(payload) / payload.sum()
    number = np.arange(1, count + 1) / count
    one_by_one, contradicts = np.empty((2, len(_SHARES)))
    for at, share in enumerate(_SHARES):
        beyond = part - (share * number + (1 - share) * held)
        above = part - (share * number + (1 - share) * launched)[released - 1]
        one_by_one[at] = np.median(np.abs(beyond).max(axis=-1))
        contradicts[at] = np.median(np.maximum(-beyond, above).max(axis=-1))
    agrees, tolerance = one_by_one, _SERIAL_TOLERANCE
    if one_by_one.min() > _SERIAL_TOLERANCE:
        agrees, tolerance = contradicts, max(_BOUND_TOLERANCE, 1.5 * float(contradicts.min()))
    close = _SHARES[agrees <= max(tolerance, agrees.min())]
    least = one_by_one.argmin() if agrees is one_by_one else np.searchsorted(_SHARES, close.min())
    shares = np.array([_SHARES[least], close.min(), close.max()])
    return FittedMessages(busy.total_ns, shares, count, int(payload.sum()))


def one_size(payload: int) -> str:
    """Return why messages of this one size, bytes, predict no others."""
    return (
        f"the recorded messages have one size ({format_bytes(payload)}), from which times of other sizes do not "
        "follow; put the network of the run before this change: --network FILE,FILE (twice the same file of "
        "commtrace bench)"
    )


def busy_ns(replay: Replay, delays: Array, buckets: GradientBuckets) -> Array:
    """Return the time in which messages of a pass are in flight: median over passes and ranks, ns, shape (n,)."""
    return _Busy.of(replay, delays, buckets).total_ns


@dataclass(frozen=True, eq=False)
class _Busy:
    """Messages of each pass on each rank in the order of their ends, each of shape (n, passes, ranks, buckets).

    Attributes:
        order: The bucket.
        until: How long any message had been in flight until its end, ns.
        released: Number of messages that were released before its end.
    """

    order: Array
    until: Array
    released: Array

    @staticmethod
    def of(replay: Replay, delays: Array, buckets: GradientBuckets) -> _Busy:
        times = replay.graph.times(delays)
        end = times[:, replay.ended[buckets.calls]]
        begin = np.broadcast_to(times[:, replay.begun[buckets.calls]].max(axis=-2, keepdims=True), end.shape)
        order = np.argsort(end, axis=-1, kind="stable")
        begin, end = np.minimum(begin, end), np.take_along_axis(end, order, -1)
        released = np.stack([(begin < end[..., number, None]).sum(axis=-1) for number in range(end.shape[-1])], axis=-1)
        return _Busy(order, _busy_until(begin, end), np.maximum(released, 1))

    @property
    def total_ns(self) -> Array:
        """Median over passes and ranks of the time in which any message is in flight, ns, shape (n,)."""
        return np.asarray(np.median(self.until[..., -1], axis=(1, 2)))


def _busy_until(begin: Array, end: Array) -> Array:
    """Return for how long at least one interval had begun and not ended, until each end.

    Args:
        begin: Begins, ascending along the last axis.
        end: Ends, ascending along the last axis; as many, in another order.
    """
    moments = np.concatenate([begin, end], axis=-1)
    change = np.concatenate([np.ones_like(begin), -np.ones_like(end)], axis=-1)
    order = np.argsort(moments, axis=-1, kind="stable")
    moments, change = np.take_along_axis(moments, order, -1), np.take_along_axis(change, order, -1)
    length = np.diff(moments, axis=-1, prepend=moments[..., :1])
    flying = np.cumsum(change, axis=-1) - change > 0
    busy = np.cumsum(np.where(flying, length, 0), axis=-1)
    place = np.argsort(order, axis=-1, kind="stable")[..., begin.shape[-1] :]
    return np.take_along_axis(busy, place, -1)


@dataclass(frozen=True)
class Bucket:
    """A new bucket.

    Attributes:
        bucket: The recorded bucket that has its last gradient.
        part: The part of that one's bytes up to this gradient; 1: both end with the same gradient.
        payload: Its bytes.
    """

    bucket: int
    part: float
    payload: int


def new_buckets(payload: Array, limit: int, gradients: Sequence[int]) -> list[Bucket]:
    """Return the buckets with another limit.

    Args:
        payload: Bytes of the recorded buckets, shape (buckets,).
        limit: Bytes from which on a bucket is closed.
        gradients: Bytes of each gradient, in the order in which they become ready; if they do not add up to the
            recorded buckets, each of these is divided into equal gradients.
    """
    ends = np.cumsum(payload)
    if not adds_up(payload, gradients):
        gradients = [part for size in payload.tolist() for part in _equal_parts(size, max(1, round(size / limit)))]
    cuts, held = [], 0
    for own in buckets_reaching_limit(gradients, [limit]):
        held += sum(own)
        bucket = int(np.searchsorted(ends, held))
        part = 1 - (int(ends[bucket]) - held) / int(payload[bucket])
        cuts.append(Bucket(bucket, part, sum(own)))
    return cuts


def adds_up(payload: Array, gradients: Sequence[int]) -> bool:
    """Return whether gradients in their order fill recorded buckets."""
    ends, held = np.cumsum(payload), np.cumsum(np.asarray(gradients, np.int64))
    return bool(len(held) and held[-1] == ends[-1] and np.isin(ends, held).all())


def _equal_parts(size: int, parts: int) -> Iterator[int]:
    bounds = [size * number // parts for number in range(parts + 1)]
    yield from (high - low for low, high in itertools.pairwise(bounds))


def with_buckets(
    replay: Replay,
    delays: Array,
    buckets: Sequence[tuple[GradientBuckets, Sequence[Bucket], MessageTimes]],
) -> tuple[Replay, Array]:
    """Return the graph with other buckets.

    Args:
        replay: The run.
        delays: Delays of its edges, ns, shape (n, edges).
        buckets: Its buckets, the new ones instead of them (`new_buckets`), and their transfers.

    Returns:
        The graph, and its delays, shape (n, edges).
    """
    rewiring = Rewiring(replay, delays)
    for recorded, new, times in buckets:
        _rewire(rewiring, recorded, new, times)
    return rewiring.build()


def _rewire(rewiring: Rewiring, buckets: GradientBuckets, cuts: Sequence[Bucket], times: MessageTimes) -> None:
    replay, calls = rewiring.replay, buckets.calls
    passes, ranks, count = calls.shape
    begun, ended = replay.begun[calls], replay.ended[calls]
    launches, is_queued = _recorded_edges(rewiring, calls)
    launch_ns = np.median(rewiring.delays[:, launches.ravel()], axis=1)
    # Launches: at the end of a recorded bucket, its own; within one, new events in the computation before it.
    ready = np.empty((passes, ranks, len(cuts)), np.int64)
    at_end = {cut.bucket: number for number, cut in enumerate(cuts) if cut.part >= 1}
    for bucket in range(count):
        if bucket in at_end:
            ready[:, :, at_end[bucket]] = begun[:, :, bucket]
        else:
            rewiring.delays[:, launches[:, :, bucket]] = 0
        inside = [(number, cut.part) for number, cut in enumerate(cuts) if cut.bucket == bucket and cut.part < 1]
        if inside:
            for index in np.ndindex(passes, ranks):
                moments = _moments(rewiring, begun[index], buckets.payload, bucket, [part for _, part in inside])
                ready[index][[number for number, _ in inside]] = _launch_within(
                    rewiring, begun[index][bucket], moments, launch_ns, int(calls[index][bucket])
                )
    # Messages.
    payload = np.array([cut.payload for cut in cuts])
    transfer = np.stack([times(int(size)) for size in payload], axis=-1)[:, None, None, :]
    own_call = calls[:, :, [cut.bucket for cut in cuts]]
    over = rewiring.add_messages(ready, transfer, own_call, payload)
    rewiring.add(
        over[:, :, :-1], over[:, :, 1:], transfer[..., 1:], Part.TRANSFER, own_call[:, :, 1:], message=payload[1:]
    )  # fmt: skip
    # The first message runs after the operation before the first bucket, in the same group.
    for index in np.ndindex(passes, ranks):
        edges = rewiring.edges_to(ended[index][0])
        for source in replay.graph.source[edges[is_queued[edges]]].tolist():
            rewiring.add_edge(
                source, int(over[index][0]), transfer[:, 0, 0, 0], Part.TRANSFER, int(own_call[index][0]),
                message=int(payload[0]),
            )  # fmt: skip
    # A recorded bucket has ended when all messages with its gradients have.
    for number, cut in enumerate(cuts):
        first = cuts[number - 1].bucket + (cuts[number - 1].part >= 1) if number else 0
        for bucket in range(first, cut.bucket + 1):
            rewiring.add(over[:, :, number], ended[:, :, bucket], 0, Part.ORDER, calls[:, :, bucket])


def _recorded_edges(rewiring: Rewiring, calls: Array) -> tuple[Array, Array]:
    """Remove the recorded transfers of buckets. Return their launches, and which edges wait for an earlier operation.

    Returns:
        The edge of each call's launch, shape of `calls`; whether each edge comes from the end of an operation, bool,
        shape (edges,).
    """
    replay = rewiring.replay
    source, target = replay.graph.source, replay.graph.target
    is_end = np.zeros(len(replay.graph.start), bool)
    is_end[replay.ended[calls].ravel()] = True
    rewiring.kept &= ~((replay.part == Part.TRANSFER) & is_end[target])
    edge_of = np.full(len(replay.graph.start), -1)
    launch = np.flatnonzero((replay.part == Part.CALL) & (target == source + 1))
    edge_of[source[launch]] = launch
    of_operation = np.zeros(len(replay.graph.start), bool)
    of_operation[replay.ended[replay.ended >= 0]] = True
    return edge_of[replay.begun[calls]], of_operation[source] & (replay.part == Part.TRANSFER)


def _moments(
    rewiring: Rewiring, begun: Array, payload: Array, bucket: int, parts: Sequence[float]
) -> list[tuple[int, float]]:
    """Return when parts of a bucket's gradients are ready on a rank in one pass.

    Returns:
        For each part, the begin of a call or a wait, and the part of the computation before it, 0 to 1, after which the
        gradients are ready.
    """
    after = begun[bucket - 1] + 2 if bucket else begun[bucket]
    events = np.arange(after, begun[bucket] + 1, 2)
    gaps = np.array([_gap(rewiring, int(event)) for event in events])
    total = gaps.sum()
    wanted = np.array(parts) * total
    if not bucket:  # forward precedes the first bucket
        later = sum(_gap(rewiring, event) for event in range(begun[0] + 2, begun[-1] + 1, 2))
        backward = min(total, later / payload[1:].sum() * payload[0])
        wanted = total - backward * (1 - np.array(parts))
    before = np.cumsum(gaps) - gaps
    at = np.clip(np.searchsorted(before, wanted, side="right") - 1, 0, len(events) - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = np.where(gaps[at] > 0, (wanted - before[at]) / gaps[at], 1.0)
    return [*zip(events[at].tolist(), inside.clip(0, 1).tolist(), strict=True)]


def _gap(rewiring: Rewiring, event: int) -> float:
    """Return the computation before a recorded event, ns, in the first row of delays."""
    edges = rewiring.edges_to(event)
    own = edges[rewiring.replay.part[edges] == Part.COMPUTATION]
    return float(rewiring.replay.delays[own].max(initial=0))


def _launch_within(
    rewiring: Rewiring, begun: int, moments: Sequence[tuple[int, float]], launch_ns: Array, call: int
) -> list[int]:
    """Divide computation by launches. Return the event of each one.

    Args:
        rewiring: The graph.
        begun: The begin of the recorded launch, for moments without computation before them.
        moments: Those of `_moments`, ascending.
        launch_ns: Time of a launch, ns, shape (n,).
        call: The recorded call.
    """
    launched: list[int] = []
    for event in dict.fromkeys(event for event, _ in moments):
        parts = [part for at, part in moments if at == event]
        edges = rewiring.edges_to(event)
        edges = edges[rewiring.replay.part[edges] == Part.COMPUTATION]
        if not len(edges):
            launched += [begun] * len(parts)
            continue
        gap, example = rewiring.delays[:, edges].max(axis=1), edges[0]
        before, following_call = int(rewiring.replay.before[example]), int(rewiring.replay.call[example])
        own = rewiring.new_events(len(parts), 2).tolist()
        rewiring.target[edges] = own[0][0]
        rewiring.delays[:, edges] *= parts[0]
        for number, (begin, end) in enumerate(own):
            is_last = number + 1 == len(own)
            following, until = (event, 1.0) if is_last else (own[number + 1][0], parts[number + 1])
            rewiring.add_edge(begin, end, launch_ns, Part.CALL, call)
            rewiring.add_edge(
                end, following, gap * (until - parts[number]), Part.COMPUTATION, following_call, before=before
            )
            launched.append(begin)
    return launched
