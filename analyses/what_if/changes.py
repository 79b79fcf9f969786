"""Changes of a recorded run: each makes other delays of its events.

    network=FILE            operations take what a network predicts; with network=FILE,FILE, what the first one predicts
                            relative to the second one, on which the run was recorded
    scale-network=2x        transfers take half; of one dimension, operation or purpose: scale-network=data:2x
    free=WHAT               transfers of a dimension, operation or purpose take no time
    compute=0.5x            computation takes half
    without-straggler=RANK  a rank computes no longer than the median of the others in the same part of a step;
                            "worst": the rank with which the step becomes shortest
    balance                 all ranks compute for as long as their mean in the same part of a step
    no-wait                 no operation waits for late ranks
    bucket=50MB             DistributedDataParallel closes gradient buckets at this size (`buckets`; MB: 2**20 bytes)

Changes compose: each one is made on top of those before it (`changed_run`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.grouping import Array, group_rows
from commtrace.errors import CommtraceError
from commtrace.formatting import format_bytes
from commtrace.job_facts import UnknownFactError
from commtrace.job_row import JobRow
from commtrace.network import NetworkError
from commtrace.network.networks import Network, open_network
from commtrace.theory.job import Job, NotPredictedError
from commtrace.theory.rules.torch.ddp import gradient_bytes

from .buckets import (
    Bucket,
    BucketsError,
    GradientBuckets,
    MessageTimes,
    adds_up,
    fitted_model,
    gradient_buckets,
    new_buckets,
    transfers,
    with_buckets,
)
from .recorded_graph import Part, Replay

WORST: Final = "worst"
_MAX_OVERLAPPING: Final = 64
"""Transfers of a rank after each one, by begin, among which those that overlap it are searched for."""
MAX_STRAGGLERS: Final = 16
"""Ranks among which the worst straggler is searched for: those that compute longest beyond the median of all."""
MOST_EXTRAPOLATED: Final = 4
"""Ratio of new and recorded sizes of buckets up to which predictions were held to real runs."""
VALIDATED_RANKS: Final = 2
"""Ranks of these runs."""
SELECTORS: Final = {"role": "dimension", "op": "operation", "purpose": "purpose"}
"""Columns of calls by whose labels a change may select -> their names."""


@dataclass(frozen=True, eq=False)
class ReplayedRun:
    """A run whose steps are replayed."""

    run: AnalysedRun
    replay: Replay

    @cached_property
    def gaps(self) -> _Gaps:
        """Computation of all ranks by part of the step."""
        return _Gaps.of(self.replay)

    @cached_property
    def straggler(self) -> int:
        """Row in `replay.paths.processes` of the worst straggler of the recorded run."""
        return _worst_straggler(self, self.replay.delays)

    def ranks(self) -> list[int]:
        """Return the rank of each process of the replay."""
        return [self.run.processes[process].rank for process in self.replay.paths.processes]

    def selected(self, what: str) -> Array:
        """Return the edges that are transfers of a dimension, operation or purpose, bool; "": of any.

        Raises:
            CommtraceError: No call has this label.
        """
        replay = self.replay
        is_transfer = replay.part == Part.TRANSFER
        if not what:
            return np.asarray(is_transfer)
        calls = replay.paths.calls
        found: dict[str, tuple[str, int]] = {}
        for column in SELECTORS:
            labels = calls.categories[column].astype(str)
            codes = calls[column][replay.call]
            found |= {str(labels[code]): (column, int(code)) for code in np.unique(codes[is_transfer]) if labels[code]}
        if what not in found:
            choices = ", ".join(map(repr, sorted(found)))
            raise CommtraceError(f"{what!r} is no dimension, operation or purpose of the steps; choose from {choices}")
        column, code = found[what]
        return np.asarray(is_transfer & (calls[column][replay.call] == code))


@dataclass(frozen=True, eq=False)
class _Gaps:
    """Computation, by the phases before and after it.

    Attributes:
        edges: The edges that are computation, shape (edges,).
        cell: Number of each one's process, step and phases, shape (edges,).
        process: Process of each cell, shape (cells,).
        part: Number of each cell's step and phases, shape (cells,).
        gap: Edges of which each stands for one gap; a gap may have several edges.
    """

    edges: Array
    cell: Array
    process: Array
    part: Array
    gap: Array

    @staticmethod
    def of(replay: Replay) -> _Gaps:
        edges = np.flatnonzero(replay.part == Part.COMPUTATION)
        phase, before = replay.paths.calls["phase"].astype(np.int64), replay.before[edges]
        phases = np.where(before < 0, -1, phase[before]) * 256 + phase[replay.call[edges]]
        _first, part_of_edge = group_rows([replay.step[edges], phases])
        cells, cell = group_rows([replay.process[edges], part_of_edge])
        _, gap = np.unique(replay.graph.target[edges], return_index=True)
        return _Gaps(edges, cell, replay.process[edges][cells], part_of_edge[cells], np.sort(gap))

    def sums(self, delays: Array) -> Array:
        """Return the computation of each cell, ns, shape (cells,)."""
        return np.bincount(self.cell[self.gap], delays[self.edges[self.gap]].clip(min=0), len(self.process))

    def scaled(self, delays: Array, sums: Array, wanted: Array) -> Array:
        """Return delays with which each cell computes as long as `wanted`, NaN: unchanged; shape (cells,)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.where((sums > 0) & np.isfinite(wanted), wanted / sums, 1.0)
        result = delays.copy()
        own = result[self.edges]
        result[self.edges] = np.where(own > 0, own * factor[self.cell], own)
        return result

    def of_others(self, sums: Array, statistic: Callable[[Array], float], process: int | None) -> Array:
        """Return a statistic of the cells of the same part, of all processes or of those other than `process`.

        Returns:
            Shape (cells,); NaN for other cells than those of `process`, and where no other process has the part.
        """
        result = np.full(len(sums), np.nan)
        order = np.argsort(self.part, kind="stable")
        for cells in np.split(order, np.flatnonzero(np.diff(self.part[order])) + 1):
            of = cells[self.process[cells] != process]
            to = cells if process is None else cells[self.process[cells] == process]
            if len(of) and len(to):
                result[to] = statistic(sums[of])
        return result


@dataclass(frozen=True, eq=False)
class ChangedRun:
    """A replayed run after some changes.

    Attributes:
        recorded: The run as it was recorded.
        replayed: The run after changes of its graph.
        delays: Delays of the edges of `replayed`, ns, shape (n, edges). The first row is the prediction; if changed
            transfers have an error, two follow with all of them too short and too long by it.
        is_error_known: Whether that error is known.
        texts: The changes, as they were written.
        network: The network that predicts transfers; None: they follow from the recorded ones.
        remarks: Sentences on what the prediction assumes without proof.
    """

    recorded: ReplayedRun
    replayed: ReplayedRun
    delays: Array
    is_error_known: bool = True
    texts: tuple[str, ...] = ()
    network: Network | None = None
    remarks: tuple[str, ...] = ()

    def with_change(self, change: NamedChange) -> ChangedRun:
        """Return the run after one more change.

        Raises:
            CommtraceError: It does not apply to the run.
        """
        return replace(change.apply(self), texts=(*self.texts, change.text))


def changed_run(replayed: ReplayedRun, texts: Sequence[str] = ()) -> ChangedRun:
    """Return a run after changes (module docstring), in their order.

    Raises:
        CommtraceError: One is not a change, its file cannot be read, or it does not apply to the run.
    """
    changed = ChangedRun(replayed, replayed, replayed.replay.delays[None])
    for change in [parse_change(text) for text in texts]:
        changed = changed.with_change(change)
    return changed


@dataclass(frozen=True)
class NamedChange:
    """A change, and how it was written."""

    text: str
    apply: Callable[[ChangedRun], ChangedRun]


Delays = Callable[[ReplayedRun, Array], Array]
"""Returns other delays of a run's edges, given its delays, both of shape (edges,)."""


def _of_delays(text: str, changed_delays: Delays, error: float | None = 0.0) -> NamedChange:
    """Return a change of delays. `error`: relative error of the transfers that it changes; None: not known."""

    def apply(run: ChangedRun) -> ChangedRun:
        delays = np.stack([changed_delays(run.replayed, row) for row in run.delays])
        if error:
            differs = (delays[0] != run.delays[0]) & (run.replayed.replay.part == Part.TRANSFER)
            delays = _with_error(delays, differs, error)
        return replace(run, delays=delays, is_error_known=run.is_error_known and error is not None)

    return NamedChange(text, apply)


def _with_error(delays: Array, changed: Array, error: float) -> Array:
    """Return three rows of delays, from one or three: as predicted; `changed` ones too short, too long by `error`."""
    rows = np.broadcast_to(delays, (3, delays.shape[-1]))
    return np.where(changed, rows * np.array([[1.0], [1 - error], [1 + error]]), rows)


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
        return replace(run, delays=np.stack([_without(run.replayed, row, process) for row in run.delays]))

    return NamedChange(text, apply)


def _without(run: ReplayedRun, delays: Array, process: int) -> Array:
    gaps = run.gaps
    sums = gaps.sums(delays)
    return gaps.scaled(delays, sums, np.fmin(sums, gaps.of_others(sums, np.median, process)))


def worst_straggler(run: ChangedRun) -> int:
    """Return the process without whose additional computation the median step is shortest.

    The search is made once for the recorded delays.

    Returns:
        Its row in `Replay.paths.processes`.
    """
    if np.array_equal(run.delays[0], run.replayed.replay.delays):
        return run.replayed.straggler
    return _worst_straggler(run.replayed, run.delays[0])


def _worst_straggler(run: ReplayedRun, delays: Array) -> int:
    gaps = run.gaps
    sums = gaps.sums(delays)
    beyond = np.maximum(sums - gaps.of_others(sums, np.median, None), 0)
    excess = np.bincount(gaps.process, np.nan_to_num(beyond), len(run.replay.paths.processes))
    candidates = np.argsort(-excess, kind="stable")[:MAX_STRAGGLERS].tolist()
    changed = np.stack([_without(run, delays, process) for process in candidates])
    return int(candidates[int(np.median(run.replay.step_ns(changed), axis=-1).argmin())])


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
    return NamedChange(text, lambda run: replace(change.apply(run), network=new))


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
    for op, payload, ranks, hosts, at in _kinds_of_calls(run, calls, replay.payload(transfers)):
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


def _kinds_of_calls(run: ReplayedRun, call: Array, payload: Array) -> Iterator[tuple[str, int, int, int, Array]]:
    """Yield operation, payload, ranks and hosts, and the positions of the calls with these, for messages of calls."""
    calls = run.replay.paths.calls
    host_of_rank = {process.rank: process.host for process in run.run.processes}
    sizes = np.array([len(channel.ranks) for channel in calls.channels], np.int64)
    hosts = np.array([len({host_of_rank.get(rank) for rank in channel.ranks}) for channel in calls.channels], np.int64)
    channel = np.where(calls["instance"][call] >= 0, calls.channel[calls["instance"][call]], -1)
    first, number = group_rows([calls["op"][call], payload, channel])
    order = np.argsort(number, kind="stable")
    bounds = np.searchsorted(number[order], np.arange(len(first) + 1))
    for kind, example in enumerate(first.tolist()):
        if channel[example] < 0:
            continue
        yield (
            str(calls.text("op", call[example])),
            int(payload[example]),
            int(sizes[channel[example]]),
            int(hosts[channel[example]]),
            order[bounds[kind] : bounds[kind + 1]],
        )


def _bucket(text: str, value: str) -> NamedChange:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]?)(?:i?b)?", value.lower())
    limit = round(float(match[1]) * (1 << {"": 0, "k": 10, "m": 20, "g": 30}[match[2]])) if match else 0
    if limit < 1:
        raise CommtraceError(f"{text!r}: {value!r} is not a size such as 50MB or 512KB")
    return NamedChange(text, lambda run: _with_bucket_size(run, limit))


def _with_bucket_size(run: ChangedRun, limit: int) -> ChangedRun:
    replay, path = run.replayed.replay, run.recorded.run.log.path
    try:
        if (replay.message >= 0).any():
            raise BucketsError("buckets can be changed only once")
        recorded = gradient_buckets(replay)
        gradients = _gradients(run.recorded.run)
        pairs = [(own, new_buckets(own.payload, limit, gradients)) for own in recorded]
        pairs = [(own, new) for own, new in pairs if [cut.payload for cut in new] != own.payload.tolist()]
        if not pairs:
            return run
        sizes = sorted({cut.payload for _, new in pairs for cut in new})
        error: float | None
        if run.network is None:
            model = fitted_model(replay, run.delays, recorded)
            times: MessageTimes = model.times
            error = model.error(sizes)
        else:
            times = _relative_to(run, run.network, recorded)
            error = run.network.held_out_error
        changed, delays = with_buckets(replay, run.delays, pairs, times)
    except BucketsError as problem:
        raise BucketsError(f"{path}: no prediction for buckets of another size: {problem}") from None
    if error:
        delays = _with_error(delays, changed.message >= 0, error)
    return replace(
        run, replayed=ReplayedRun(run.recorded.run, changed), delays=delays,
        is_error_known=run.is_error_known and error is not None,
        remarks=(*run.remarks, *_remarks(pairs, gradients)),
    )  # fmt: skip


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


def _relative_to(run: ChangedRun, network: Network, recorded: Sequence[GradientBuckets]) -> MessageTimes:
    """Return the times that a network predicts for a message, times what the transfers of the run take relative to it.

    Raises:
        BucketsError: It does not predict the operation.
    """
    replay = run.replayed.replay
    call = np.concatenate([own.calls.ravel() for own in recorded])
    total = 0.0
    for op, payload, ranks, hosts, at in _kinds_of_calls(run.replayed, call, replay.paths.calls["payload"][call]):
        expected = network.expected(op, payload, ranks, hosts)
        if expected is None:
            raise BucketsError(f"{network.name} does not predict {op}")
        total += expected.total_us * len(at)
    ratio = transfers(replay, run.delays)[:, call].sum(axis=1) / total

    def times(message: int) -> Array:
        expected = network.expected(op, message, ranks, hosts)
        assert expected is not None
        return np.asarray(ratio * expected.total_us)

    return times


_CHANGES: Final[dict[str, Callable[[str, str], NamedChange]]] = {
    "network": _network,
    "scale-network": _scale_network,
    "free": _free,
    "compute": _compute,
    "without-straggler": _without_straggler,
    "balance": _balance,
    "no-wait": _no_wait,
    "bucket": _bucket,
}


def all_changes(run: ReplayedRun) -> Sequence[NamedChange]:
    """Return the changes of the catalogue that apply to any run, and those of its dimensions and largest purposes."""
    texts = ["without-straggler=worst", "balance", "no-wait", "compute=0.5x", "scale-network=2x", "scale-network=0.5x"]
    calls, replay = run.replay.paths.calls, run.replay
    for column, most in (("role", MAX_STRAGGLERS), ("op", MAX_STRAGGLERS), ("purpose", 3)):
        is_transfer = replay.part == Part.TRANSFER
        codes = calls[column][replay.call[is_transfer]]
        sums = np.bincount(codes, replay.delays[is_transfer].clip(min=0), len(calls.categories[column]))
        largest = [code for code in np.argsort(-sums, kind="stable")[:most] if sums[code] > 0]
        texts += [f"free={calls.categories[column][code]}" for code in largest if calls.categories[column][code]]
    try:
        bucket_mb = max(int(own.payload.max()) for own in gradient_buckets(replay)) / (1 << 20)
        texts += [f"bucket={bucket_mb * factor:.3g}MB" for factor in (0.5, 2)]
    except BucketsError:
        pass
    return [parse_change(text) for text in dict.fromkeys(texts)]
