"""A training step of a dry run: its calls, what each rank computes between them, and how long a network takes for them.

A dry run has no times. It has the order of the calls of each rank, the floating-point operations between them, and the
calls of other ranks that are the same operation. The step is the last of those that occur most often.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from commtrace.analyses.across_ranks.dependencies import dependencies
from commtrace.analyses.across_ranks.matching import MatchedCalls, match_calls
from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.compare.own_calls import ACTIVITY_NAMES
from commtrace.analyses.grouping import Array
from commtrace.errors import LogError
from commtrace.network.networks import Network
from commtrace.operations import MESSAGES
from commtrace.rank_ranges import format_ranks

from .changed_run import kinds_of_calls

_COLUMNS: Final = ("op", "role", "purpose", "phase", "payload", "local", "peer", "flags", "step", "t_begin")
_MAX_CALLS: Final = 1_000_000
"""Calls of a step that are replayed at most: they limit time and memory."""


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """A step of a dry run.

    Attributes:
        run: The dry run.
        calls: Calls of the step, process by process in their order, with the columns "op", "role", "purpose", "phase",
            "payload", "local", "peer", "flags" and "depends".
        flops: Floating-point operations of the rank directly before each call, float64, shape (calls,).
        forward_flops: Those of them outside of backward.
    """

    run: AnalysedRun
    calls: MatchedCalls
    flops: Array
    forward_flops: Array

    @cached_property
    def backend(self) -> str:
        """The backend of all groups; "" if there are several."""
        configs = {config for process in self.run.processes for config in process.tables.backends.values()}
        # "gloo", or "cpu:gloo,cuda:nccl"
        backends = {device.rpartition(":")[2] for config in configs for device in config.split(",")}
        return backends.pop() if len(backends) == 1 else ""

    @cached_property
    def is_message(self) -> Array:
        """Whether each call sends or receives, bool, shape (calls,)."""
        return self.calls.has_label("op", *MESSAGES)

    @cached_property
    def flops_of_ranks(self) -> Mapping[int, float]:
        """Floating-point operations of a step by rank."""
        sums = np.bincount(self.calls["process"], self.flops, len(self.run.processes))
        return {process.rank: float(sums[at]) for at, process in enumerate(self.run.processes)}

    @cached_property
    def forward_flops_of_job(self) -> float:
        """Operations of forward of all ranks; ranks that were not simulated count as the others."""
        weights = [self.run.stands_for[process.rank] for process in self.run.processes]
        sums = np.bincount(self.calls["process"], self.forward_flops, len(weights))
        return float(np.average(sums, weights=weights)) * (self.run.world_size or len(weights))

    def transfer_ns(self, networks: Mapping[str, Network]) -> Array:
        """Return how long each call's transfer takes, ns, float64, shape (calls,); NaN: no network predicts it.

        Args:
            networks: The network of each dimension; "": of all others.
        """
        calls = self.calls
        result = np.full(len(calls), np.nan)
        roles = calls.text("role").astype(str)
        for role in np.unique(roles):
            network = networks.get(str(role), networks[""]).over(self.backend)
            at = np.flatnonzero(roles == role)
            hosts = {rank: rank // network.ranks_per_node for rank in range(self.run.world_size or 0)}
            for op, payload, ranks, of_hosts, own in kinds_of_calls(calls, hosts, at, calls["payload"][at]):
                if (expected := network.expected(op, payload, ranks, of_hosts)) is not None:
                    result[at[own]] = expected.total_us * 1e3
        return result


def simulated_step(run: AnalysedRun) -> SimulatedStep:
    """Return the step of a dry run.

    Raises:
        LogError: It is no dry run, or lacks what a prediction needs.
    """
    path = run.log.path
    if not run.simulated:
        raise LogError(f"{path}: this is no dry run; layouts are predicted from dry runs (commtrace dryrun)")
    if any(process.tables.flops is None for process in run.processes):
        raise LogError(f"{path}: what its ranks compute is not known; repeat the dry run with this commtrace")
    calls = match_calls(run, _COLUMNS, derived={"depends": dependencies})
    calls = calls.rows(np.flatnonzero(calls["step"] == _typical_step(run, calls)))
    if len(calls) > _MAX_CALLS:
        raise LogError(f"{path}: {len(calls):,} calls in a step; simulate fewer ranks (--ranks all-distinct)")
    calls = calls.rows(np.lexsort((calls["t_begin"], calls["process"])))
    flops, forward = np.zeros((2, len(calls)))
    for number, process in enumerate(run.processes):
        own = calls.of_process(number)
        counted = process.tables.flops or {}
        rows = [counted.get(call, (0, 0)) for call in calls["t_begin"][own].tolist()]
        flops[own], forward[own] = np.array(rows, float).reshape(-1, 2).T
    if not forward.any():
        raise LogError(f"{path}: no matrix product, convolution or attention was counted in a step")
    step = SimulatedStep(run, calls, flops, forward)
    _require_both_ends(step)
    return step


def _typical_step(run: AnalysedRun, calls: MatchedCalls) -> int:
    """Return the last of the steps that occur most often, by number of calls and payload.

    Raises:
        LogError: No step has one before it.
    """
    steps, number = np.unique(calls["step"], return_inverse=True)
    active = np.bincount(number, calls.has_label("purpose", *ACTIVITY_NAMES), len(steps)) > 0
    first = steps[steps >= 0].min(initial=np.iinfo(np.int32).max)
    # What the first step does before its calls includes the start of the program.
    usable = (steps > first) & (steps < (run.cut_step if run.cut_step is not None else np.inf))
    if not usable.any():
        raise LogError(f"{run.log.path}: no training step is complete after the first; simulate at least three")
    usable = usable & ~active if (usable & ~active).any() else usable
    sums = np.bincount(number, calls["payload"], len(steps))
    kinds = [*zip(np.bincount(number, minlength=len(steps)).tolist(), sums.tolist(), strict=True)]
    candidates = np.flatnonzero(usable).tolist()
    # The last step may have calls of the program's end.
    return int(steps[max(candidates, key=lambda at: (kinds.count(kinds[at]), -kinds[at][0], at))])


def _require_both_ends(step: SimulatedStep) -> None:
    """Raise LogError if the ranks at one end of messages were not simulated."""
    calls = step.calls
    present = calls.per_call(calls.present)
    alone = np.flatnonzero(step.is_message & (calls["instance"] >= 0) & (present < 2))
    if not len(alone):
        return
    simulated = {process.rank for process in step.run.processes}
    ends = {rank for at in np.unique(calls["instance"][alone]) for rank in calls.channels[calls.channel[at]].ranks}
    wanted = format_ranks(sorted(simulated | ends))
    raise LogError(
        f"{step.run.log.path}: ranks exchange messages with rank {format_ranks(sorted(ends - simulated))}, not "
        f"simulated, so that it is not known when they wait for each other; repeat the dry run with --ranks {wanted}"
    )
