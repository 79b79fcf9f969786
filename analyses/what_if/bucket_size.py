"""The change `bucket=SIZE`: DistributedDataParallel closes gradient buckets at another size (`buckets`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.grouping import Array
from commtrace.formatting import format_bytes
from commtrace.job_facts import UnknownFactError
from commtrace.job_row import JobRow
from commtrace.network.networks import Network
from commtrace.theory.job import Job, NotPredictedError
from commtrace.theory.rules.torch.ddp import gradient_bytes

from .buckets import (
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
from .changed_run import ChangedRun, DoesNotApplyError, kinds_of_calls, with_error
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
    replay, path = run.replayed.replay, run.recorded.run.log.path
    try:
        if (replay.message >= 0).any():
            raise DoesNotApplyError("the sizes of its messages have already been changed")
        recorded = gradient_buckets(replay)
        gradients = _gradients(run.recorded.run)
        pairs = [(own, new_buckets(own.payload, limit, gradients)) for own in recorded]
        pairs = [(own, new) for own, new in pairs if [bucket.payload for bucket in new] != own.payload.tolist()]
        if not pairs:
            return run
        if any(len(own.payload) == 1 for own, _ in pairs):
            raise DoesNotApplyError(
                "all gradients are in one bucket, so that it is not known when each of them became ready; record a run "
                "with smaller buckets"
            )
        error: float | None = 0.0
        if run.network is None:
            rows = np.broadcast_to(run.delays, (3, run.delays.shape[-1]))
            times = [_fitted(replay, rows, *pair) for pair in pairs]
        else:
            rows, error = run.delays, run.network.held_out_error
            times = [_relative_to(run, run.network, own) for own, _ in pairs]
        together = [(*pair, of_pair) for pair, of_pair in zip(pairs, times, strict=True)]
        changed, delays = with_buckets(replay, rows, together)
    except DoesNotApplyError as problem:
        raise DoesNotApplyError(f"{path}: no prediction for buckets of another size: {problem}") from None
    if error:
        delays = with_error(delays, changed.message >= 0, error)
    return replace(
        run, replayed=replace(run.replayed, replay=changed), delays=delays,
        is_error_known=run.is_error_known and error is not None, is_one_sided=run.network is None,
        remarks=(*run.remarks, *_remarks(pairs, gradients)),
    )  # fmt: skip


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


def _remarks(pairs: Sequence[tuple[GradientBuckets, list[Bucket]]], gradients: Sequence[int]) -> Iterator[str]:
    """Yield what is assumed of buckets without proof."""
    if any(not adds_up(own.payload, gradients) for own, _ in pairs):
        yield (
            "The sizes of the gradients are not known: each recorded bucket counts as one gradient, or as several "
            "equal ones if it is larger than the new size."
        )
    largest = max(int(own.payload.max()) for own, _ in pairs)
    smallest = min(int(own.payload.min()) for own, _ in pairs)
    sizes = [bucket.payload for _, new in pairs for bucket in new]
    if max(sizes) > MOST_EXTRAPOLATED * largest or min(sizes) < smallest / MOST_EXTRAPOLATED:
        yield (
            f"Messages of {format_bytes(min(sizes))} to {format_bytes(max(sizes))} are predicted from "
            f"{format_bytes(smallest)} to {format_bytes(largest)}: predictions were held to real runs for sizes that "
            f"differ by {MOST_EXTRAPOLATED:g} times at most."
        )
    if any(own.calls.shape[1] > VALIDATED_RANKS for own, _ in pairs):
        yield f"Predictions for buckets were validated with {VALIDATED_RANKS} ranks over gloo only."


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
    replay = run.replayed.replay
    call = recorded.calls[0, 0]
    ((op, _, ranks, hosts, _), *_) = kinds_of_calls(
        replay.paths.calls, run.replayed.hosts, call[:1], recorded.payload[:1]
    )

    def expected_ns(payload: int) -> float:
        expected = network.expected(op, payload, ranks, hosts)
        if expected is None:
            raise DoesNotApplyError(f"{network.name} does not predict {op}")
        return 1e3 * expected.total_us

    ratio = busy_ns(replay, run.delays, recorded) / sum(map(expected_ns, recorded.payload.tolist()))
    return lambda payload: np.asarray(ratio * expected_ns(payload))


def other_sizes(replay: Replay) -> list[int]:
    """Return sizes of buckets for the catalogue, bytes: half and twice the largest one, or nothing without buckets."""
    try:
        largest = max(int(own.payload.max()) for own in gradient_buckets(replay))
    except DoesNotApplyError:
        return []
    return [largest // 2, 2 * largest]
