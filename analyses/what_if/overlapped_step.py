"""The change `overlap` or `overlap=WHAT`: operations run in the background as long as dependencies allow.

The rules are those of dry runs (`overlap_rules`). A call that may overlap begins its operation and returns at once.
What its rank waits for then is not the end of the operation, but

    its begin    parameters: all that the rank does before the first call of their pass, else unchanged
    its end      the rank waits for it before the call that the rules name; if it did so later, as recorded
    before it    the operation of the group that may begin before it has ended

Operations take as long as recorded. The step is the shortest that overlap allows, not a prediction of one library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from commtrace.analyses.grouping import Array
from commtrace.formatting import format_count

from .changed_run import ChangedRun, DoesNotApplyError
from .event_graph import CircularEventsError
from .overlap_rules import END_OF_STEP, OverlapRules, OverlapSpans
from .recorded_graph import Part, Replay
from .rewiring import Rewiring

VALIDATED_RANKS: Final = 4
"""Ranks of the runs over gloo to which bounds were held."""


def with_overlap(run: ChangedRun, what: str) -> ChangedRun:
    """Return a run in which operations overlap as much as dependencies allow.

    Args:
        run: The run after the changes before.
        what: Their dimension, operation or purpose; "": all.

    Raises:
        DoesNotApplyError: None can, or ranks would wait for each other in a circle.
        CommtraceError: No call has this label.
    """
    replay, path = run.replayed.replay, run.recorded.run.log.path
    selected = np.zeros(len(replay.paths.calls), bool)
    selected[replay.call[run.replayed.selected(what)]] = True
    rules = OverlapRules.of(replay.paths.calls).only(selected)
    selected = rules.is_gradient | rules.is_parameters
    call, spans, until = _spans(replay, rules)
    rewiring = Rewiring(replay, run.delays)
    early = np.flatnonzero(rules.is_parameters[call] & (replay.ended[call] >= 0))
    begins_early = _begin_earlier(rewiring, call[early], call[spans.begin[early]])
    changes = _waits_later(rewiring, selected, call, until)
    changes[early] |= begins_early
    if not changes.any():
        raise DoesNotApplyError(
            f"{path}: {f'no call of {what!r}' if what else 'no call'} can overlap more than recorded: only gradients "
            "and parameters gathered for a pass can, unless they are already waited for as late as dependencies allow"
        )
    _queue(rewiring, selected, call[spans.order])
    changed, delays = rewiring.build()
    try:
        changed.graph.times(delays)
    except CircularEventsError as error:
        raise DoesNotApplyError(f"{path}: its ranks would wait for each other in a circle: {error}") from None
    moved = call[changes]
    return replace(
        run, replayed=replace(run.replayed, replay=changed), delays=delays,
        remarks=(*run.remarks, *_remarks(replay, moved, rules)),
    )  # fmt: skip


def _spans(replay: Replay, rules: OverlapRules) -> tuple[Array, OverlapSpans, Array]:
    """Return when operations of the replayed steps may run.

    Returns:
        The calls of the steps, rank by rank in their order, shape (n,); their spans; the event at which the rank waits
        for each, shape (n,).
    """
    calls, paths = replay.paths.calls, replay.paths
    call = np.flatnonzero((replay.begun >= 0) & (calls["step"] >= paths.steps[0]) & (calls["step"] <= paths.steps[-1]))
    call = call[np.lexsort((replay.begun[call], calls["step"][call], calls["process"][call]))]
    step = np.searchsorted(paths.steps, calls["step"][call])
    part = np.searchsorted(paths.processes, calls["process"][call]) * len(paths.steps) + step
    spans = rules.spans(call, part, calls["phase"][call])
    last = call[np.searchsorted(part, part, side="right") - 1]
    # At the end of a step, the rank waits in its last call: the computation after it belongs to the next step.
    at_end = spans.until == END_OF_STEP
    return call, spans, np.where(at_end, replay.begun[last] + 1, replay.begun[call[spans.until]])


def _waits_later(rewiring: Rewiring, selected: Array, call: Array, until: Array) -> Array:
    """Let ranks wait for the selected operations later. Return for which calls that changes something.

    Args:
        rewiring: The graph.
        selected: Whether each call of the run may overlap, bool.
        call: The calls of the steps, shape (n,).
        until: The event at which the rank waits for each.
    """
    replay = rewiring.replay
    source, target = replay.graph.source, replay.graph.target
    call_of_end = np.full(len(replay.graph.start), -1)
    own = np.flatnonzero(selected & (replay.ended >= 0))
    call_of_end[replay.ended[own]] = own
    event = np.full(len(selected), -1)
    event[call] = until
    edges = np.flatnonzero((replay.part == Part.CALL) & (call_of_end[source] >= 0))
    owner = call_of_end[source[edges]]
    # Waits that are recorded later than the rules ask for stay; events of a rank are numbered in the order of time.
    earlier = (event[owner] >= 0) & (target[edges] < event[owner])
    edges, owner = edges[earlier], owner[earlier]
    is_call = target[edges] == replay.begun[owner] + 1
    moved = np.unique(owner)
    rewiring.kept[edges] = False
    rewiring.add(replay.begun[owner[is_call]], target[edges[is_call]], 0.0, Part.CALL, owner[is_call])
    rewiring.add(replay.ended[moved], event[moved], 0.0, Part.ORDER, moved)
    return np.isin(call, moved)


def _begin_earlier(rewiring: Rewiring, call: Array, first: Array) -> Array:
    """Let operations begin with their pass. Return which of them began with their call before.

    Args:
        rewiring: The graph.
        call: Their calls, shape (n,).
        first: The first call of the pass of each.
    """
    replay = rewiring.replay
    firsts, number = np.unique(first, return_inverse=True)
    passes = rewiring.new_events(len(firsts))
    for event, own in zip(passes.tolist(), firsts.tolist(), strict=True):
        edges = rewiring.edges_to(int(replay.begun[own]))
        edges = edges[replay.part[edges] == Part.COMPUTATION]
        # Without computation before it, the pass begins with the call.
        sources = replay.graph.source[edges] if len(edges) else replay.begun[[own]]
        for source in np.unique(sources).tolist():
            rewiring.add_edge(source, event, np.zeros(len(rewiring.delays)), Part.ORDER, own)
    begins = np.full(len(replay.graph.start), -1)
    begins[replay.begun[call]] = passes[number]
    edges = np.flatnonzero((begins[replay.graph.source] >= 0) & np.isin(replay.part, (Part.ORDER, Part.TRANSFER)))
    rewiring.kept[edges] = False
    rewiring.add(
        begins[replay.graph.source[edges]], replay.graph.target[edges], rewiring.delays[:, edges],
        replay.part[edges], replay.call[edges], waits=replay.waits[edges], message=replay.message[edges],
    )  # fmt: skip
    return np.isin(replay.begun[call], replay.graph.source[edges])


def _queue(rewiring: Rewiring, selected: Array, call: Array) -> None:
    """Let operations of a group run one after the other.

    Args:
        rewiring: The graph.
        selected: Whether each call of the run may overlap, bool.
        call: The calls of the steps, in the order in which they may begin, shape (n,).
    """
    replay, calls = rewiring.replay, rewiring.replay.paths.calls
    collective = np.array([channel.source < 0 for channel in calls.channels], bool)
    known = (replay.ended[call] >= 0) & (calls["instance"][call] >= 0)
    known[known] = collective[calls.channel[calls["instance"][call[known]]]]
    call = call[known]
    channel, process = calls.channel[calls["instance"][call]], calls["process"][call]
    order = np.lexsort((channel, process))  # stable
    call, channel, process = call[order], channel[order], process[order]
    follows = (channel[1:] == channel[:-1]) & (process[1:] == process[:-1])
    first, second = call[:-1][follows], call[1:][follows]
    is_end = np.zeros(len(replay.graph.start), bool)
    is_end[replay.ended[call]] = True
    source, target = replay.graph.source, replay.graph.target
    queued = (replay.part == Part.TRANSFER) & is_end[source] & is_end[target]
    was_queued = np.isin(second, replay.call[queued])
    rewiring.kept &= ~queued
    needed = was_queued | selected[first] | selected[second]
    first, second = first[needed], second[needed]
    rewiring.add(
        replay.ended[first], replay.ended[second], _transfer_ns(rewiring, second), Part.TRANSFER, second,
        message=_message(replay, second),
    )  # fmt: skip


def _transfer_ns(rewiring: Rewiring, call: Array) -> Array:
    """Return how long the operation of each call takes once it may begin, ns, shape (rows, n)."""
    replay, delays = rewiring.replay, rewiring.delays
    edges = np.flatnonzero((replay.part == Part.TRANSFER) & (replay.graph.target == replay.ended[replay.call]))
    least = np.full((len(delays), len(replay.ended)), np.inf)
    for row, own in zip(least, delays, strict=True):
        np.minimum.at(row, replay.call[edges], np.where(np.isfinite(own[edges]), own[edges], np.inf))
    return np.where(np.isfinite(least), least, 0.0)[:, call]


def _message(replay: Replay, call: Array) -> Array:
    """Return the bytes of the message of each call, -1: as recorded."""
    edges = np.flatnonzero(replay.part == Part.TRANSFER)
    message = np.full(len(replay.ended), -1)
    message[replay.call[edges]] = replay.message[edges]
    return message[call]


def _remarks(replay: Replay, moved: Array, rules: OverlapRules) -> Iterator[str]:
    """Yield what is assumed of the calls that overlap more."""
    ranks, steps = len(replay.paths.processes), len(replay.paths.steps)
    yield (
        f"overlap: {format_count(round(len(moved) / ranks / steps))} calls of a rank in a step run in the background: "
        "this is the shortest step that overlap allows, and libraries reach less. Calls stay where they are made, "
        "except that parameters begin with their pass, without a limit of memory; launches take no time."
    )
    if rules.is_assumed[moved].any():
        yield "Reductions of the program's own in backward, over data-parallel ranks, count as gradients."
    if ranks > VALIDATED_RANKS:
        yield f"Bounds of overlap were compared with real runs of up to {VALIDATED_RANKS} ranks over gloo only."
