"""The change `dtype=bf16`: gradients and parameters that are sent as float32 are sent in a type of half the size.

Only their transfers change: the part of their time that depends on the bytes halves, and the latency stays.

    after --network  a transfer changes as the times do that the (new) network predicts for the two sizes
    without          the latency lies between 0 and the shortest of the run's own transfers of an operation, which bound
                     the prediction. It is that of a line through these transfers, by payload, if their payloads differ
                     by `FITTED_RANGE` or more, else 0: messages that share a link hide how short they are alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from commtrace.analyses.grouping import Array, group_rows
from commtrace.formatting import format_bytes, format_count
from commtrace.network.networks import Network
from commtrace.schema import Purpose

from .changed_run import ChangedRun, DoesNotApplyError, ReplayedRun, kinds_of_calls, with_scaled_transfers
from .recorded_graph import Part

DTYPES: Final = ("bf16", "fp16")
VALIDATED_RANKS: Final = 2
"""Ranks of the runs over gloo to which predictions were held."""
FITTED_RANGE: Final = 16
"""Ratio of the payloads of an operation from which on a line through its transfers shows their latency."""
_RATIO: Final = 0.5
_RECORDED: Final = "float32"
_PURPOSES: Final = (
    Purpose.GRADIENTS, Purpose.PARAMETERS_FORWARD, Purpose.PARAMETERS_BACKWARD, Purpose.PARAMETERS_RECOMPUTATION,
    Purpose.PARAMETERS_STAGE, Purpose.PARAMETERS_AFTER_OPTIMIZER,
)  # fmt: skip


def with_message_dtype(run: ChangedRun, dtype: str) -> ChangedRun:
    """Return a run whose float32 gradients and parameters are sent in another type.

    Args:
        run: The run after the changes before.
        dtype: One of `DTYPES`.

    Raises:
        DoesNotApplyError: It sends none, their type has been changed, or a network does not predict an operation.
    """
    if any(text.startswith("dtype=") for text in run.texts):
        raise DoesNotApplyError(f"dtype={dtype}: the type of its messages has already been changed")
    replay, calls = run.replayed.replay, run.replayed.replay.paths.calls
    is_sent = calls.has_label("dtype", _RECORDED) & calls.has_label("purpose", *(each.value for each in _PURPOSES))
    changed = (replay.part == Part.TRANSFER) & is_sent[replay.call]
    edges = np.flatnonzero(changed & (run.delays > 0).any(axis=0))
    if not len(edges):
        raise DoesNotApplyError(
            f"{run.recorded.run.log.path}: no calls for gradients or parameters in {_RECORDED} in its steps: nothing "
            f"changes with {dtype}"
        )
    transfers, number = replay.transfers(edges)
    payload = replay.payload(transfers)
    if run.network is not None:
        factor = _by_network(run, run.network, transfers, payload)
    else:
        before = np.broadcast_to(run.delays, (3, run.delays.shape[-1]))[:, transfers]
        latency = latencies(run.replayed, transfers, payload, before[0])
        after = before * _RATIO + np.minimum(latency, before) * (1 - _RATIO)
        factor = after / np.maximum(before, 1e-9)
    message = np.where(changed, np.round(replay.payload(np.arange(len(changed))) * _RATIO), replay.message)
    return replace(
        with_scaled_transfers(run, edges, number, factor, changed),
        replayed=replace(run.replayed, replay=replace(replay, message=message.astype(np.int64))),
        remarks=(*run.remarks, *_remarks(run, dtype, transfers, payload)),
    )  # fmt: skip


def _by_network(run: ChangedRun, network: Network, transfers: Array, payload: Array) -> Array:
    """Return by which factor the expected time of each transfer changes, shape (transfers,)."""
    factor = np.ones(len(transfers))
    calls = run.replayed.replay.paths.calls
    call = run.replayed.replay.call[transfers]
    for op, size, ranks, hosts, at in kinds_of_calls(calls, run.replayed.hosts, call, payload):
        times = [network.expected(op, round(of * size), ranks, hosts) for of in (1, _RATIO)]
        if times[0] is None or times[1] is None or not times[0].total_us:
            raise DoesNotApplyError(f"{network.name} does not predict {op}")
        factor[at] = times[1].total_us / times[0].total_us
    return factor


def latencies(run: ReplayedRun, transfers: Array, payload: Array, transfer_ns: Array) -> Array:
    """Return the latency of each transfer, ns, shape (3, transfers): as predicted, the least, the largest possible."""
    calls = run.replay.paths.calls
    result = np.zeros((3, len(transfers)))
    first, kinds = group_rows([calls["op"][run.replay.call[transfers]]])
    for kind in range(len(first)):
        own = np.flatnonzero(kinds == kind)
        sizes, number = np.unique(payload[own], return_inverse=True)
        medians = np.array([np.median(transfer_ns[own][number == at]) for at in range(len(sizes))])
        result[:, own] = fitted_latency(sizes, medians)[:, None]
    return result


def fitted_latency(sizes: Array, times: Array) -> Array:
    """Return the latency of an operation, ns, shape (3,): as predicted, the least, the largest possible.

    Args:
        sizes: Payloads of its transfers, bytes, ascending, shape (n,).
        times: Typical transfer of each, ns, shape (n,).
    """
    largest = float(times.min())
    fitted = 0.0
    if sizes[-1] >= FITTED_RANGE * max(sizes[0], 1):
        weights = 1 / np.maximum(times, 1.0)  # relative residuals
        fitted = float(np.polyfit(sizes.astype(float), times, 1, w=weights)[1])
    return np.array([np.clip(fitted, 0, largest), 0.0, largest])


def _remarks(run: ChangedRun, dtype: str, transfers: Array, payload: Array) -> Iterator[str]:
    replay = run.replayed.replay
    ranks, steps = len(replay.paths.processes), len(replay.paths.steps)
    count, size = round(len(transfers) / ranks / steps), payload.sum() / ranks / steps
    yield (
        f"{dtype}: {format_count(count)} calls of a rank in a step, with {format_bytes(size)} of gradients and "
        f"parameters in {_RECORDED}, carry half. Everything else stays: other types, losses and norms, and computation "
        "(conversions take time that is not predicted; matrix products may become faster)."
    )
    if ranks > VALIDATED_RANKS:
        yield f"Predictions for other types were compared with real runs of {VALIDATED_RANKS} ranks over gloo only."
