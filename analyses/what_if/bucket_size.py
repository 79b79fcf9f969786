"""The change `bucket=SIZE`: buckets of another size, of DistributedDataParallel (`buckets`), ZeRO and FSDP2."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.grouping import Array
from commtrace.formatting import format_bytes
from commtrace.job_facts import UnknownFactError
from commtrace.job_row import JobRow
from commtrace.network.networks import Network
from commtrace.theory.job import Job, NotPredictedError
from commtrace.theory.rules.torch.ddp import gradient_bytes

from .blocking_buckets import blocking_calls, with_messages
from .buckets import (
    SIZES_UNKNOWN,
    Bucket,
    GradientBuckets,
    MessageTimes,
    adds_up,
    busy_ns,
    fitted_messages,
    gradient_buckets,
    new_buckets,
    with_buckets,
)
from .changed_run import ChangedRun, DoesNotApplyError, expected_ns, with_error
from .message_plans import Plan, message_plan
from .recorded_graph import Replay

MOST_EXTRAPOLATED: Final = 4.25
"""Ratio of new and recorded sizes of buckets up to which predictions were held to real runs."""
VALIDATED_RANKS: Final = 2
"""Ranks of these runs."""


def with_bucket_size(run: ChangedRun, limit: int) -> ChangedRun:
    """Return a run with other buckets.

    Args:
        run: The run after the changes before.
        limit: Bytes from which on a bucket is closed.

    Raises:
        DoesNotApplyError: The recorded steps do not show what that would change.
    """
    try:
        if (run.replayed.replay.message >= 0).any():
            raise DoesNotApplyError("the sizes of its messages have already been changed")
        plan = _plan(run.recorded.run, limit)
        rebuilt = _in_background(run, limit) if plan is None else _blocking(run, plan)
    except DoesNotApplyError as problem:
        path = run.recorded.run.log.path
        raise DoesNotApplyError(f"{path}: no prediction for buckets of another size: {problem}") from None
    if rebuilt is None:
        return run
    replay, delays, remarks = rebuilt
    error = 0.0 if run.network is None else run.network.held_out_error
    if error:
        delays = with_error(delays, replay.message >= 0, error)
    return replace(
        run, replayed=replace(run.replayed, replay=replay), delays=delays,
        is_error_known=run.is_error_known and error is not None, is_one_sided=run.network is None,
        remarks=(*run.remarks, *remarks),
    )  # fmt: skip


class _Rebuilt(NamedTuple):
    """A graph with other messages, its delays, shape (n, edges), and what is assumed without proof."""

    replay: Replay
    delays: Array
    remarks: Sequence[str]


def _in_background(run: ChangedRun, limit: int) -> _Rebuilt | None:
    """Return a run of DistributedDataParallel with other buckets; None: they are the recorded ones."""
    replay = run.replayed.replay
    gradients = _gradients(run.recorded.run)
    pairs = [(own, new_buckets(own.payload, limit, gradients)) for own in gradient_buckets(replay)]
    pairs = [(own, new) for own, new in pairs if [bucket.payload for bucket in new] != own.payload.tolist()]
    if not pairs:
        return None
    if any(len(own.payload) == 1 for own, _ in pairs):
        raise DoesNotApplyError(
            "all gradients are in one bucket, so that it is not known when each of them became ready; record a run "
            "with smaller buckets"
        )
    if run.network is None:
        rows = np.broadcast_to(run.delays, (3, run.delays.shape[-1]))
        times = [_fitted(replay, rows, *pair) for pair in pairs]
    else:
        rows = run.delays
        times = [_relative_to(run, run.network, own) for own, _ in pairs]
    together = [(*pair, of_pair) for pair, of_pair in zip(pairs, times, strict=True)]
    remarks = [SIZES_UNKNOWN] if any(not adds_up(own.payload, gradients) for own, _ in pairs) else []
    recorded, sizes = (own.payload.tolist() for own, _ in pairs), (bucket.payload for _, new in pairs for bucket in new)
    ranks = max(own.calls.shape[1] for own, _ in pairs)
    remarks += _unvalidated([*itertools.chain(*recorded)], [*sizes], ranks)
    return _Rebuilt(*with_buckets(replay, rows, together), remarks)


def _blocking(run: ChangedRun, plan: Plan) -> _Rebuilt | None:
    """Return a run whose calls block their rank with other messages; None: they are the recorded ones.

    If they are those because no others can be predicted, the sentences say so.
    """
    found = [*blocking_calls(run.replayed.replay)]
    if not found:
        raise DoesNotApplyError("the steps have no gradients or parameters for which their rank waits in the call")
    planned = [(calls, own) for calls in found if (own := plan(calls)) is not None]
    remarks = dict.fromkeys(own.remark for _, own in planned if own.remark)
    changed = [(calls, own.messages) for calls, own in planned if [size for _, size in own.messages] != calls.payload]
    if not changed:
        return _Rebuilt(run.replayed.replay, run.delays, [*remarks]) if remarks else None
    recorded = [size for calls, _ in changed for size in calls.payload]
    sizes = [size for _, messages in changed for _, size in messages]
    ranks = max(calls.calls.shape[1] for calls, _ in changed)
    return _Rebuilt(*with_messages(run, changed), [*remarks, *_unvalidated(recorded, sizes, ranks)])


def _fitted(replay: Replay, delays: Array, recorded: GradientBuckets, new: Sequence[Bucket]) -> MessageTimes:
    """Return transfers from those of the run: for the prediction, and the shortest and the longest that fit to it.

    Args:
        replay: The run.
        delays: Its delays, shape (3, edges).
        recorded: Its buckets.
        new: Those instead of them. The more latency, the shorter are fewer ones, and the longer are more.
    """
    model = fitted_messages(replay, delays, recorded)
    predicted, least, largest = model.share
    shares = np.array([predicted, *sorted((least, largest), reverse=len(new) < len(recorded.payload))])
    return lambda payload: model.times(payload, shares)


def _unvalidated(recorded: Sequence[int], sizes: Sequence[int], ranks: int) -> Iterator[str]:
    """Yield in what a prediction is beyond the runs to which predictions were held."""
    if max(sizes) > MOST_EXTRAPOLATED * max(recorded) or min(sizes) < min(recorded) / MOST_EXTRAPOLATED:
        yield (
            f"Messages of {format_bytes(min(sizes))} to {format_bytes(max(sizes))} are predicted from "
            f"{format_bytes(min(recorded))} to {format_bytes(max(recorded))}: predictions were confirmed by real "
            f"runs for sizes that differ by {MOST_EXTRAPOLATED:g} times at most."
        )
    if ranks > VALIDATED_RANKS:
        yield f"Predictions for buckets were validated with {VALIDATED_RANKS} ranks over gloo only."


def _plan(run: AnalysedRun, limit: int) -> Plan | None:
    """Return the messages of the captured job with other buckets, if its calls block their rank."""
    if run.job is None:
        return None
    try:
        return message_plan(run.job, limit)
    except NotPredictedError as problem:
        raise DoesNotApplyError(str(problem)) from None


def _gradients(run: AnalysedRun) -> list[int]:
    """Return the bytes of each gradient of the captured model in backward order, or nothing if they are not known."""
    row = run.job
    if row is None:
        return []
    try:
        dtypes = gradient_bytes(Job(JobRow.read(row)))
    except (NotPredictedError, UnknownFactError):
        return []
    return dtypes[0] if len(dtypes) == 1 else []


def _relative_to(run: ChangedRun, network: Network, recorded: GradientBuckets) -> MessageTimes:
    """Return the times that a network predicts, times what the messages of the run take relative to it.

    Raises:
        DoesNotApplyError: It does not predict the operation.
    """
    expected = expected_ns(run, network, int(recorded.calls[0, 0, 0]), recorded.payload.tolist())
    ratio = busy_ns(run.replayed.replay, run.delays, recorded) / sum(expected)
    return lambda payload: np.asarray(ratio * expected_ns(run, network, int(recorded.calls[0, 0, 0]), [payload])[0])


def other_sizes(run: AnalysedRun, replay: Replay) -> list[int]:
    """Return sizes of buckets for the catalogue, bytes: half and twice the largest one, or nothing without buckets."""
    try:
        if _plan(run, 1) is None:
            payload = [int(own.payload.max()) for own in gradient_buckets(replay)]
        else:
            payload = [max(own.payload) for own in blocking_calls(replay)]
    except DoesNotApplyError:
        return []
    return [max(payload) // 2, 2 * max(payload)] if payload else []
