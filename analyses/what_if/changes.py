"""Changes of a recorded run: each makes other delays of its events.

    network=FILE            operations take what a network predicts; with network=FILE,FILE, what the first one predicts
                            relative to the second one, on which the run was recorded
    scale-network=2x        transfers take half; of one dimension, operation or purpose: scale-network=data:2x
    free=WHAT               transfers of a dimension, operation or purpose take no time
    overlap                 gradients and parameters run in the background as long as dependencies allow
                            (`overlapped_step`); of one dimension, operation or purpose: overlap=data
    world-size=8            a data-parallel job runs on so many ranks, each of which computes as long (`world_size`)
    compute=0.5x            computation takes half
    without-straggler=RANK  a rank computes no longer than the median of the others in the same part of a step;
                            "worst": the rank with which the step becomes shortest
    balance                 all ranks compute for as long as their mean in the same part of a step
    no-wait                 no operation waits for late ranks
    dtype=bf16              gradients and parameters in float32 are sent in half the bytes (`message_dtype`); also fp16
    bucket=50MB             buckets of this size, of DistributedDataParallel, ZeRO and FSDP2 (`bucket_size`; MB: 2**20)

Changes compose: each one is made on top of those before it (`changed_run`). Without an option, each change of the
catalogue is tried (`changes_of_catalogue`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from commtrace.analyses.grouping import Array
from commtrace.errors import CommtraceError
from commtrace.network import NetworkError
from commtrace.network.networks import Network, open_network
from commtrace.rank_ranges import MAX_RANKS

from .bucket_size import other_sizes, with_bucket_size
from .changed_run import (
    MAX_STRAGGLERS,
    ChangedRun,
    NamedChange,
    ReplayedRun,
    kinds_of_calls,
    with_error,
    without_straggler,
    worst_straggler,
)
from .message_dtype import DTYPES, with_message_dtype
from .overlapped_step import with_overlap
from .recorded_graph import Part
from .world_size import with_world_size

WORST: Final = "worst"
_MAX_OVERLAPPING: Final = 64
"""Transfers of a rank after each one, by begin, among which those that overlap it are searched for."""


Delays = Callable[[ReplayedRun, Array], Array]
"""Returns other delays of a run's edges, given its delays, both of shape (edges,)."""


def changed_run(replayed: ReplayedRun, texts: Sequence[str] = ()) -> ChangedRun:
    """Return a run after changes (module docstring), in their order.

    Raises:
        CommtraceError: One is not a change, its file cannot be read, or it does not apply to the run.
    """
    changed = ChangedRun(replayed, replayed, replayed.replay.delays[None])
    for change in [parse_change(text) for text in texts]:
        changed = changed.with_change(change)
    return changed


def _of_delays(text: str, changed_delays: Delays, error: float | None = 0.0) -> NamedChange:
    """Return a change of delays. `error`: relative error of the transfers that it changes; None: not known."""

    def apply(run: ChangedRun) -> ChangedRun:
        delays = np.stack([changed_delays(run.replayed, row) for row in run.delays])
        if error:
            differs = (delays[0] != run.delays[0]) & (run.replayed.replay.part == Part.TRANSFER)
            delays = with_error(delays, differs, error)
        return replace(run, delays=delays, is_error_known=run.is_error_known and error is not None)

    return NamedChange(text, apply)


def parse_change(text: str) -> NamedChange:
    """Parse a change (module docstring), such as "compute=0.5x".

    Raises:
        CommtraceError: It is not a change, or its file cannot be read.
    """
    name, _, value = text.partition("=")
    maker = _CHANGES.get(name)
    if maker is None:
        raise CommtraceError(f"{text!r} is not a change; choose from {', '.join(_CHANGES)}")
    return maker(text, value)


def _scale_network(text: str, value: str) -> NamedChange:
    what, _, factor = value.rpartition(":")
    speed = _factor(text, factor)
    return _of_delays(text, lambda run, delays: _scaled(delays, run.selected(what), 1 / speed))


def _free(text: str, value: str) -> NamedChange:
    if not value:
        raise CommtraceError(f"{text!r}: the dimension, operation or purpose is missing, such as free=data")
    return _of_delays(text, lambda run, delays: _scaled(delays, run.selected(value), 0.0))


def _overlap(text: str, value: str) -> NamedChange:
    if text.endswith("="):
        raise CommtraceError(f"{text!r}: the dimension, operation or purpose is missing, such as overlap=data")
    return NamedChange(text, lambda run: with_overlap(run, value))


def _compute(text: str, value: str) -> NamedChange:
    factor = _factor(text, value)
    return _of_delays(text, lambda run, delays: _scaled(delays, run.replay.part == Part.COMPUTATION, factor))


def _scaled(delays: Array, edges: Array, factor: float) -> Array:
    """Return delays of which those of some edges are multiplied, unless errors of clocks made them negative."""
    return np.where(edges & (delays > 0), delays * factor, delays)


def _factor(text: str, value: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)x", value)
    if match is None or not 1e-6 <= float(match[1]) <= 1e6:
        raise CommtraceError(f"{text!r}: {value!r} is not a factor such as 2x or 0.5x")
    return float(match[1])


def _without_straggler(text: str, value: str) -> NamedChange:
    if value != WORST and not value.isdecimal():
        raise CommtraceError(f"{text!r}: {value!r} is neither a rank nor {WORST}")

    def apply(run: ChangedRun) -> ChangedRun:
        if value == WORST:  # the same rank for all rows of delays
            process = worst_straggler(run)
        elif int(value) in run.replayed.ranks():
            process = run.replayed.ranks().index(int(value))
        else:
            raise CommtraceError(f"{text!r}: the run has no rank {value}")
        return replace(run, delays=np.stack([without_straggler(run.replayed, row, process) for row in run.delays]))

    return NamedChange(text, apply)


def _balance(text: str, value: str) -> NamedChange:
    _no_value(text, value)

    def apply(run: ReplayedRun, delays: Array) -> Array:
        sums = run.gaps.sums(delays)
        return run.gaps.scaled(delays, sums, run.gaps.of_others(sums, np.mean, None))

    return _of_delays(text, apply)


def _no_wait(text: str, value: str) -> NamedChange:
    _no_value(text, value)
    return _of_delays(text, lambda run, delays: np.where(run.replay.waits, -np.inf, delays))


def _no_value(text: str, value: str) -> None:
    if value or text.endswith("="):
        raise CommtraceError(f"{text!r}: this change has no value")


def _network(text: str, value: str) -> NamedChange:
    names = value.split(",")
    if not value or len(names) > 2:
        raise CommtraceError(f"{text!r}: give one network, or two: the new one, and the one that the run used")
    try:
        new, *recorded = map(open_network, names)
    except NetworkError as error:
        raise CommtraceError(str(error)) from None

    def delays_on_network(run: ReplayedRun, delays: Array) -> Array:
        return _on_network(run, delays, new, recorded[0] if recorded else None)

    errors = [network.held_out_error for network in (new, *recorded)]
    change = _of_delays(text, delays_on_network, None if None in errors else max(filter(None, errors), default=0.0))

    def apply(run: ChangedRun) -> ChangedRun:
        if run.replayed.new_world_size is not None:
            raise CommtraceError(f"{text!r}: put the network before world-size")
        return replace(change.apply(run), network=new)

    return NamedChange(text, apply)


def _on_network(run: ReplayedRun, delays: Array, new: Network, recorded: Network | None) -> Array:
    """Return the delays on another network; operations that it does not predict keep theirs.

    Transfers of a rank that overlap share its link: the expected time of each one includes the part of the others that
    overlaps it. Relative to the network of the run, a transfer keeps what it took beyond its expected time and the
    error of that, such as the time of a busy processor; the rest changes as the expected times do. If it is not known
    when a transfer was released, nor is what it took beyond: all of it changes as the expected times do.
    """
    replay = run.replay
    edges = np.flatnonzero((replay.part == Part.TRANSFER) & (delays > 0))
    transfers, number = replay.transfers(edges)
    calls, is_recorded = replay.call[transfers], replay.message[transfers] < 0
    before, after = np.full((2, len(calls)), np.nan)
    for op, payload, ranks, hosts, at in kinds_of_calls(
        replay.paths.calls, run.hosts, calls, replay.payload(transfers)
    ):
        if (expected := new.expected(op, payload, ranks, hosts)) is not None:
            after[at] = expected.total_us * 1e3
        if recorded is not None and (expected := recorded.expected(op, payload, ranks, hosts)) is not None:
            before[at] = expected.total_us * 1e3
    transfer = delays[transfers]
    if recorded is None:
        changed = after
    else:
        released, ended = (replay.paths.blocked.times[name][calls] for name in ("release", "t_end"))
        released = np.where(is_recorded, released, -1)
        before, after = _on_shared_link(run, calls, released, ended, before, after)
        with np.errstate(divide="ignore", invalid="ignore"):
            flight = np.where(is_recorded, ended - released, transfer)
            beyond = np.maximum(flight - before * (1 + (recorded.held_out_error or 0)), 0)
            overhead = np.where(is_recorded & (released < 0), 0, beyond)
            changed = transfer * (after + overhead) / (before + overhead)
    result = delays.copy()
    result[edges] = np.where(np.isfinite(changed), changed, transfer)[number]
    return result


def _on_shared_link(run: ReplayedRun, calls: Array, released: Array, ended: Array, *expected: Array) -> list[Array]:
    """Return expected times with the part of each other transfer of the rank that overlaps it in the recorded run.

    A transfer that was released at an unknown time overlaps none.

    Args:
        run: The run.
        calls: The call of each transfer, shape (transfers,).
        released: When the transfers were released, ns, -1: not known.
        ended: When they ended, ns.
        expected: Their expected times, ns, NaN: not known; each of shape (transfers,).
    """
    owner = run.replay.paths.calls["process"][calls]
    begin, end = np.where(released < 0, ended, released).astype(float), ended.astype(float)
    order = np.lexsort((begin, owner))
    process, begin, end = owner[order], begin[order], end[order]
    length = np.maximum(end - begin, 1)
    times = [own[order] for own in expected]
    sums = [own.copy() for own in times]
    reach = np.maximum.accumulate(end)
    for lag in range(1, min(len(calls), _MAX_OVERLAPPING + 1)):
        same = process[lag:] == process[:-lag]
        if not (same & (reach[:-lag] > begin[lag:])).any():
            break
        overlap = np.where(same, np.minimum(end[lag:], end[:-lag]) - begin[lag:], 0).clip(min=0)
        for own, total in zip(times, sums, strict=True):
            known = np.nan_to_num(own)
            total[:-lag] += known[lag:] * overlap / length[lag:]
            total[lag:] += known[:-lag] * overlap / length[:-lag]
    results = []
    for total in sums:
        result = np.empty(len(total))
        result[order] = total
        results.append(result)
    return results


def _bucket(text: str, value: str) -> NamedChange:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]?)(?:i?b)?", value.lower())
    limit = round(float(match[1]) * (1 << {"": 0, "k": 10, "m": 20, "g": 30}[match[2]])) if match else 0
    if limit < 1:
        raise CommtraceError(f"{text!r}: {value!r} is not a size such as 50MB or 512KB")
    return NamedChange(text, lambda run: with_bucket_size(run, limit))


def _dtype(text: str, value: str) -> NamedChange:
    if value not in DTYPES:
        raise CommtraceError(
            f"{text!r}: {value!r} is no type of half the size of float32; choose from {', '.join(DTYPES)}"
        )
    return NamedChange(text, lambda run: with_message_dtype(run, value))


def _world_size(text: str, value: str) -> NamedChange:
    ranks = int(value) if value.isdecimal() else 0
    if not 2 <= ranks <= MAX_RANKS:
        raise CommtraceError(f"{text!r}: {value!r} is not a number of ranks from 2 to {MAX_RANKS:,}")
    return NamedChange(text, lambda run: with_world_size(run, ranks))


_CHANGES: Final[dict[str, Callable[[str, str], NamedChange]]] = {
    "network": _network,
    "scale-network": _scale_network,
    "free": _free,
    "overlap": _overlap,
    "compute": _compute,
    "without-straggler": _without_straggler,
    "balance": _balance,
    "no-wait": _no_wait,
    "bucket": _bucket,
    "dtype": _dtype,
    "world-size": _world_size,
}


def changes_of_catalogue(run: ReplayedRun) -> Sequence[NamedChange]:
    """Return the changes of the catalogue that apply to any run, and those of its dimensions and largest purposes.

    Changes of the program come before those of what it runs on: of two with equal predictions, the first one is better
    or costs less. Half the bytes also halve what is not bound by the link, but by bytes; twice the bandwidth does not.
    """
    calls, replay = run.replay.paths.calls, run.replay
    texts = ["without-straggler=worst", "balance", "no-wait", "overlap", f"dtype={DTYPES[0]}"]
    texts += [f"bucket={size / (1 << 20):.3g}MB" for size in other_sizes(run.run, replay)]
    texts += ["compute=0.5x", "scale-network=2x", "scale-network=0.5x"]
    for column, most in (("role", MAX_STRAGGLERS), ("op", MAX_STRAGGLERS), ("purpose", 3)):
        is_transfer = replay.part == Part.TRANSFER
        codes = calls[column][replay.call[is_transfer]]
        sums = np.bincount(codes, replay.delays[is_transfer].clip(min=0), len(calls.categories[column]))
        largest = [code for code in np.argsort(-sums, kind="stable")[:most] if sums[code] > 0]
        texts += [f"free={calls.categories[column][code]}" for code in largest if calls.categories[column][code]]
    return [parse_change(text) for text in dict.fromkeys(texts)]
