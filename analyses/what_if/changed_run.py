"""A replayed run, and what changes of it make of it: another graph, other delays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from commtrace.analyses.across_ranks.matching import MatchedCalls
from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.grouping import Array, group_rows
from commtrace.errors import CommtraceError, LogError
from commtrace.network.networks import Network
from commtrace.volume import wire_bytes

from .recorded_graph import Part, Replay, read_replay

MAX_STRAGGLERS: Final = 16
"""Ranks among which the worst straggler is searched for: those that compute longest beyond the median of all."""
_COLUMNS: Final = ("payload", "local", "peer", "purpose", "dtype", "micro_batch")
REMARKS: Final = "remarks"
"""Key in `DataFrame.attrs` of sentences on what the predictions of a table assume."""
SELECTORS: Final = {"role": "dimension", "op": "operation", "purpose": "purpose"}
"""Columns of calls by whose labels a change may select -> their names."""


class DoesNotApplyError(CommtraceError):
    """A change does not apply to a run: a catalogue of changes leaves it out."""


@dataclass(frozen=True, eq=False)
class ReplayedRun:
    """A run whose steps are replayed.

    Attributes:
        run: The run.
        replay: Its steps.
        new_world_size: Its number of ranks after changes; None: as recorded.
    """

    run: AnalysedRun
    replay: Replay
    new_world_size: int | None = None

    @cached_property
    def gaps(self) -> _Gaps:
        """Computation of all ranks by part of the step."""
        return _Gaps.of(self.replay)

    @cached_property
    def straggler(self) -> int:
        """Row in `replay.paths.processes` of the worst straggler of the recorded run."""
        return _worst_straggler(self, self.replay.delays)

    @cached_property
    def hosts(self) -> Mapping[int, str]:
        """Host of each rank."""
        return {process.rank: process.host for process in self.run.processes}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.new_world_size or self.run.world_size or len(self.run.ranks)

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


def replayed_run(run: AnalysedRun) -> ReplayedRun:
    """Return the run with its replayed steps.

    Raises:
        LogError: The steps cannot be replayed; the message says why.
    """
    if run.simulated:
        raise LogError(
            f"{run.log.path}: a dry run has no times; pass a recorded run, or say how fast it computes: --rate "
            "400TFLOPS, --computation 250ms or --calibrate RUN"
        )
    return ReplayedRun(run, read_replay(run, _COLUMNS))


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
        is_one_sided: Whether the prediction may lie at a bound of the other rows; else the interval is as wide on both
            sides.
        texts: The changes, as they were written.
        network: The network that predicts transfers; None: they follow from the recorded ones.
        remarks: Sentences on what the prediction assumes without proof.
    """

    recorded: ReplayedRun
    replayed: ReplayedRun
    delays: Array
    is_error_known: bool = True
    is_one_sided: bool = False
    texts: tuple[str, ...] = ()
    network: Network | None = None
    remarks: tuple[str, ...] = ()

    def with_change(self, change: NamedChange) -> ChangedRun:
        """Return the run after one more change.

        Raises:
            CommtraceError: It does not apply to the run.
        """
        return replace(change.apply(self), texts=(*self.texts, change.text))


@dataclass(frozen=True)
class NamedChange:
    """A change, and how it was written."""

    text: str
    apply: Callable[[ChangedRun], ChangedRun]


def with_error(delays: Array, changed: Array, error: float) -> Array:
    """Return three rows of delays, from one or three: as predicted; `changed` ones too short, too long by `error`."""
    rows = np.broadcast_to(delays, (3, delays.shape[-1]))
    return np.where(changed, rows * np.array([[1.0], [1 - error], [1 + error]]), rows)


def with_scaled_transfers(run: ChangedRun, edges: Array, number: Array, factor: Array, changed: Array) -> ChangedRun:
    """Return a run in which transfers take so many times as long.

    Its error is that of its network; without one, its bounds are those of the factors.

    Args:
        run: The run.
        edges: Edges of transfers, shape (n,).
        number: The transfer of each.
        factor: Of each transfer: as its network predicts, shape (transfers,), or as predicted and at the two bounds,
            shape (3, transfers).
        changed: Whether the error of a network applies to each edge, bool, shape (edges of the graph,).
    """
    rows = run.delays if factor.ndim == 1 else np.broadcast_to(run.delays, (len(factor), run.delays.shape[-1]))
    delays = rows.copy()
    delays[:, edges] *= np.where(delays[:, edges] > 0, factor[..., number], 1)
    error = run.network.held_out_error if run.network is not None else 0.0
    return replace(
        run, delays=with_error(delays, changed, error) if error else delays,
        is_error_known=run.is_error_known and error is not None, is_one_sided=run.network is None,
    )  # fmt: skip


def without_straggler(run: ReplayedRun, delays: Array, process: int) -> Array:
    """Return delays, shape (edges,), with which a process computes no longer than the median of the others."""
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
    changed = np.stack([without_straggler(run, delays, process) for process in candidates])
    return int(candidates[int(np.median(run.replay.step_ns(changed), axis=-1).argmin())])


def kinds_of_calls(
    calls: MatchedCalls, host_of_rank: Mapping[int, str | int], call: Array, payload: Array
) -> Iterator[tuple[str, int, int, int, Array]]:
    """Yield operation, payload, ranks and hosts, and the positions of the calls with these, for messages of calls.

    Args:
        calls: All calls.
        host_of_rank: The host of each rank.
        call: The calls of the messages, as indices, shape (n,).
        payload: Bytes of each message, shape (n,).
    """
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


def expected_ns(run: ChangedRun, network: Network, call: int, payload: Sequence[int]) -> list[float]:
    """Return the times that a network predicts for messages of a call's operation and group, ns.

    Args:
        run: The run.
        network: The network.
        call: The call.
        payload: Bytes of each message.

    Raises:
        DoesNotApplyError: It does not predict the operation.
    """
    of, sizes = np.full(len(payload), call), np.asarray(payload, np.int64)
    times = np.empty(len(payload))
    for op, size, ranks, hosts, at in kinds_of_calls(run.replayed.replay.paths.calls, run.replayed.hosts, of, sizes):
        expected = network.expected(op, size, ranks, hosts)
        if expected is None:
            raise DoesNotApplyError(f"{network.name} does not predict {op}")
        times[at] = 1e3 * expected.total_us
    return times.tolist()


def wire_bytes_of_calls(
    run: AnalysedRun, calls: MatchedCalls, call: Array, payload: Array, world_size: int | None = None
) -> Array:
    """Return the fewest bytes that each message's rank can send, float64, shape (n,); NaN: not known.

    Args:
        run: The run.
        calls: All calls, with the columns "op", "local" and "peer".
        call: The calls of the messages, as indices, shape (n,).
        payload: Bytes of each message, shape (n,).
        world_size: The number of ranks of all groups, if it is another one than recorded.
    """
    ranks, local = calls.per_call(calls.expected), calls["local"]
    if world_size is not None:
        ranks, local = np.full(len(ranks), world_size), local * (run.world_size or 1) / world_size
    is_own_peer = calls["peer"] == np.array([process.rank for process in run.processes])[calls["process"]]
    result = np.full(len(call), np.nan)
    for code in np.unique(calls["op"][call]):
        at = np.flatnonzero(calls["op"][call] == code)
        of = call[at]
        with contextlib.suppress(ValueError):  # an operation without a rule
            result[at] = wire_bytes(
                str(calls.categories["op"][code]), payload[at], local[of], ranks[of],
                peer_is_self=is_own_peer[of].astype(np.int64),
            )  # fmt: skip
    return result
