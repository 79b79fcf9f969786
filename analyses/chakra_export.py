"""Execution traces for simulators, one file per rank: `commtrace export --format chakra`.

The events of the replayed steps (`what_if.recorded_graph`) become Chakra's nodes. A delay of a rank is a node; it
depends on the nodes that end in the event at which the delay begins:

    computation, time in a call that is not its operation      COMP_NODE, on the CPU
    a collective, after the last rank that it depends on       COMM_COLL_NODE
    a message likewise                                         COMM_SEND_NODE, COMM_RECV_NODE

A rank waits for others only in operations, which a simulator matches across the files: of a group by their order, of
messages by ranks and tag. So that it can, an operation of which the steps do not have the calls of all ranks, or for
which Chakra has no type, is a COMP_NODE of the recorded duration.

A file is a GlobalMetadata and the Nodes of https://github.com/mlcommons/chakra (schema/protobuf/et_def.proto, whose
numbers of fields and types are below), each after its length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import IO, Final

import numpy as np

from commtrace.analyses import protobuf_columns as protobuf
from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.call_spans import no_calls, require_times
from commtrace.analyses.grouping import Array
from commtrace.analyses.protobuf_columns import Column, constant, stacked, varint, where
from commtrace.analyses.what_if.recorded_graph import Part, Replay, read_replay
from commtrace.importing.kineto_sizes import lengths_of
from commtrace.operations import MESSAGES, OPERATIONS, operations_where
from commtrace.output_files import atomic_directory
from commtrace.reading.labels import group_label

_VERSION: Final = b"1.0.0"
_COLUMNS: Final = ("payload", "local", "peer", "tag", "seq", "group")
_MARKER: Final = "trace.*.et"
_GROUPS: Final = "comm_groups.json"
_BLOCK: Final = 4096
_SYNCHRONIZING: Final = operations_where(lambda operation: operation.is_synchronizing)
_LEAST_NS: Final = 0.5
"""Shorter delays have no node."""


class NodeType(IntEnum):
    """Types of nodes."""

    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


COLLECTIVES: Final = {
    "all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5, "all_to_all": 6,
    "reduce_scatter": 7, "barrier": 9,
}  # fmt: skip
"""Operation -> CollectiveCommType."""


class NodeField(IntEnum):
    """Fields of a Node."""

    ID = 1
    NAME = 2
    TYPE = 3
    DATA_DEPS = 5
    START_MICROS = 6
    DURATION_MICROS = 7
    ATTRIBUTES = 10


class ValueField(IntEnum):
    """Fields of an AttributeProto; the importers of simulators expect these types."""

    NAME = 1
    INT32 = 7
    INT64 = 9
    BOOL = 27
    STRING = 29


def export_chakra(
    run: AnalysedRun,
    out: Path,
    *,
    force: bool = False,
    ranks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> int:
    """Write the execution trace of each rank, atomically.

    Args:
        run: The run.
        out: The folder to write `trace.0.et` and so on to, and `comm_groups.json`, the ranks of the groups.
        force: Whether to replace a folder of traces.
        ranks: Ranks to write; None: all.
        steps: Consecutive steps to write; None: all that can be replayed.

    Returns:
        The number of calls written.

    Raises:
        LogError: The run has no steps that can be replayed, or no call of these ranks; the message says why.
        OutputError: The folder exists or cannot be written.
    """
    require_times(run)
    replay = read_replay(run, _COLUMNS, steps)
    begun, process = replay.begun >= 0, replay.paths.calls["process"]
    times = replay.graph.times(replay.delays)
    ranked, written = _Ranked(replay, times), 0
    with atomic_directory(out, force=force, marker=_MARKER) as folder:
        for row, number in enumerate(replay.paths.processes.tolist()):
            rank = run.processes[number].rank
            if ranks is None or rank in ranks:
                with open(folder / f"trace.{rank}.et", "xb") as file:
                    ranked.write(file, row, rank)
                written += int((begun & (process == number)).sum())
        if not written:
            raise no_calls(run)
        (folder / _GROUPS).write_text(json.dumps(_members(run, replay), indent=1))
    return written


def _members(run: AnalysedRun, replay: Replay) -> dict[str, list[int]]:
    """Return the ranks of each group by its number in the traces."""
    calls = replay.paths.calls
    groups = {group_label(group): group for group in run.labels.groups.values()}
    used = np.unique(calls["group"][replay.begun >= 0]).tolist()
    labels = {number: str(calls.categories["group"][number]) for number in used}
    return {str(number + 1): [*groups[label].ranks] for number, label in labels.items() if label in groups}


@dataclass
class _Nodes:
    """Nodes of a rank that are not written yet."""

    labels: list[str] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    depends: list[tuple[int, ...]] = field(default_factory=list)


class _RankTrace:
    """The trace of one rank while it is written."""

    def __init__(self, file: IO[bytes], replay: Replay, rank: int) -> None:
        self._file, self._calls, self._rank = file, replay.paths.calls, rank
        self._ops, self._op_of = self._calls.categories["op"], self._calls["op"]
        self._nodes, self._first = _Nodes(), 0
        self._after: dict[int, tuple[int, ...]] = {}
        """Nodes that end in each event."""
        self.origin = float(np.min(replay.paths.ends[:, 0]))
        """When the first rank ended the step before, ns: time 0 of the traces."""
        file.write(protobuf.joined(protobuf.delimited(protobuf.text(1, stacked([_VERSION])))))

    def op(self, call: int) -> str:
        """Return the operation of a call."""
        return str(self._ops[self._op_of[call]])

    def after(self, events: Sequence[int]) -> tuple[int, ...]:
        """Return the nodes that end in events."""
        if len(events) == 1:
            return self._after.get(events[0], ())
        return tuple(sorted({node for event in events for node in self._after.get(event, ())}))

    def join(self, event: int, nodes: tuple[int, ...]) -> None:
        """Let nodes end in an event, too."""
        known = self._after.get(event, ())
        self._after[event] = tuple(sorted({*known, *nodes})) if known else nodes

    def add(
        self, event: int | None, label: str, kind: int, end: float, duration: float, depends: tuple[int, ...], call: int
    ) -> None:
        """Add a node that ends in an event, at `end` ns; None: in none that matters."""
        nodes = self._nodes
        if event is not None:
            self.join(event, (self._first + len(nodes.calls),))
        nodes.labels.append(label)
        nodes.calls.append(call)
        nodes.types.append(kind)
        nodes.starts.append(end - duration - self.origin)
        nodes.durations.append(duration)
        nodes.depends.append(depends)
        if len(nodes.calls) == _BLOCK:
            self.flush()

    def flush(self) -> None:
        """Write the nodes."""
        nodes, count = self._nodes, len(self._nodes.calls)
        if not count:
            return
        call, types = np.array(nodes.calls), np.array(nodes.types)
        micros = [np.rint(np.maximum(values, 0) / 1000).astype(np.int64) for values in (nodes.starts, nodes.durations)]
        depends = np.full((count, max(map(len, nodes.depends))), -1, np.int64)
        for row, own in enumerate(nodes.depends):
            depends[row, : len(own)] = own
        columns = [
            varint(NodeField.ID, self._first + np.arange(count)),
            *protobuf.text(NodeField.NAME, stacked([label.encode() for label in nodes.labels])),
            varint(NodeField.TYPE, types),
            *(
                column
                for own in depends.T
                for column in where(own >= 0, [varint(NodeField.DATA_DEPS, np.maximum(own, 0))])
            ),
            varint(NodeField.START_MICROS, micros[0]),
            varint(NodeField.DURATION_MICROS, micros[1]),
            *self._attributes(call, types),
        ]
        self._file.write(protobuf.joined(protobuf.delimited(columns)))
        self._nodes, self._first = _Nodes(), self._first + count

    def _attributes(self, call: Array, types: Array) -> Iterator[Column]:
        """Yield the attributes of nodes, given by call and type."""
        calls, is_operation = self._calls, types != NodeType.COMP
        number = len(call)
        yield from _attribute("is_cpu_op", [varint(ValueField.BOOL, (~is_operation).astype(np.int64))])
        step = calls["step"][call]
        yield from where(step >= 0, _attribute("step", [varint(ValueField.INT64, np.maximum(step, 0))]))
        if not is_operation.any():
            return
        sent, kind = np.zeros((2, number), np.int64)
        at = np.flatnonzero(is_operation)
        for i, op in zip(at.tolist(), calls.text("op", call[at]), strict=True):
            sent[i] = lengths_of(op, int(calls["payload"][call[i]]), int(calls["local"][call[i]]))[0]
            kind[i] = COLLECTIVES.get(op, 0)
        is_collective = types == NodeType.COMM_COLL
        groups = stacked([str(group + 1).encode() for group in calls["group"][call].tolist()])
        peer, own = calls["peer"][call].astype(np.int64), np.full(number, self._rank, np.int64)
        is_rooted = calls.has_label("op", *(op for op in COLLECTIVES if OPERATIONS[op].is_rooted))[call]
        is_send, tag = types == NodeType.COMM_SEND, np.maximum(calls["tag"][call], 0)
        fields = (
            ("comm_type", is_collective, [varint(ValueField.INT64, kind)]),
            ("comm_size", is_operation, [varint(ValueField.INT64, sent)]),
            ("pg_name", is_operation, protobuf.text(ValueField.STRING, groups)),
            ("comm_src", ~is_collective, [varint(ValueField.INT32, np.maximum(np.where(is_send, own, peer), 0))]),
            ("comm_dst", ~is_collective, [varint(ValueField.INT32, np.maximum(np.where(is_send, peer, own), 0))]),
            ("comm_tag", ~is_collective, [varint(ValueField.INT32, tag)]),
            ("root", is_rooted & (peer >= 0), [varint(ValueField.INT64, np.maximum(peer, 0))]),
            ("seq", is_operation, [varint(ValueField.INT64, calls["seq"][call].astype(np.int64))]),
        )
        for name, present, value in fields:
            yield from where(is_operation & present, _attribute(name, value))


def _attribute(name: str, value: Sequence[Column]) -> list[Column]:
    label = constant(protobuf.joined(protobuf.text(ValueField.NAME, stacked([name.encode()]))))
    return protobuf.message(NodeField.ATTRIBUTES, [label, *value])


@dataclass(frozen=True, eq=False)
class _Operations:
    """The operations of the calls, each of shape (calls,), and the edges of the replay that lead to them.

    Attributes:
        types: Type of the node of each.
        durations: From the moment at which no rank has to wait any longer to its end on this rank, ns.
        left_out: Edges that are no dependency, bool, shape (edges,).
    """

    types: Array
    durations: Array
    left_out: Array

    @staticmethod
    def of(replay: Replay, times: Array) -> _Operations:
        """Return the operations of a replay, given the times of its events.

        In the replay, an operation waits for the one of its group that ended before it on the same rank. Here, all
        ranks wait for the last of these. So it does not where it ended earlier on some rank: the two ran side by side.
        """
        calls, source, call = replay.paths.calls, replay.graph.source, replay.call
        replayed = np.flatnonzero((replay.begun >= 0) & (replay.ended >= 0))
        instance = calls["instance"].astype(np.int64)
        last_previous, first_end = np.full(len(calls.channel) + 1, -np.inf), np.full(len(calls.channel) + 1, np.inf)
        is_transfer = replay.part == Part.TRANSFER
        queued = is_transfer & ~replay.waits & (source != replay.begun[call])
        np.maximum.at(last_previous, instance[call[queued]], times[source[queued]])
        np.minimum.at(first_end, instance[replayed], times[replay.ended[replayed]])
        left_out = queued & (last_previous > first_end)[instance[call]]
        types, released = _types(replay), np.full(len(calls), -np.inf)
        left_out |= queued & (types[call] == NodeType.COMP)
        # No simulator lets a send wait for its receive: its duration has that wait.
        used = is_transfer & ~left_out & ~(replay.waits & (types[call] == NodeType.COMM_SEND))
        np.maximum.at(released, call[used], times[source[used]])
        own = replayed[types[replayed] == NodeType.COMM_COLL]
        own = own[calls.has_label("op", *_SYNCHRONIZING)[own] & (last_previous <= first_end)[instance[own]]]
        released[own] = np.maximum(released[own], last_previous[instance[own]])
        alone = replayed[types[replayed] == NodeType.COMP]
        released[alone] = times[replay.begun[alone]]
        durations = np.zeros(len(calls))
        durations[replayed] = np.maximum(times[replay.ended[replayed]] - released[replayed], 0)
        return _Operations(types, durations, left_out)


def _types(replay: Replay) -> Array:
    """Return the type of the node of each call's operation, shape (calls,)."""
    calls = replay.paths.calls
    instance = calls["instance"][replay.begun >= 0]
    present = np.bincount(instance[instance >= 0], minlength=len(calls.channel))
    matched = np.append(present == calls.expected, False)[calls["instance"]]
    types = np.where(calls.has_label("op", *COLLECTIVES), NodeType.COMM_COLL, NodeType.COMP)
    for op, kind in zip(MESSAGES, (NodeType.COMM_SEND, NodeType.COMM_RECV), strict=True):
        types[calls.has_label("op", op)] = kind
    return np.where(matched, types, NodeType.COMP)


class _Ranked:
    """The events of a replay by rank, in an order in which each follows those that it depends on."""

    def __init__(self, replay: Replay, times: Array) -> None:
        self._replay, self._times, self._operations = replay, times, _Operations.of(replay, times)
        graph = replay.graph
        edges = np.flatnonzero((replay.part != Part.ORDER) & ~replay.waits & ~self._operations.left_out)
        self._edges = edges[np.lexsort((graph.target[edges], replay.process[edges]))]
        target = graph.target[self._edges]
        self._begin = np.full(len(graph.start), np.inf)
        np.minimum.at(self._begin, target, times[target] - np.maximum(replay.delays[self._edges], 0))
        # Operations in the order of their calls, which is the same on all ranks; that of their transfers may not be.
        known = np.flatnonzero((replay.begun >= 0) & (replay.ended >= 0))
        self._begin[replay.ended[known]] = times[replay.begun[known]]

    def write(self, file: IO[bytes], row: int, rank: int) -> None:
        """Write the nodes of a rank, given by its row in `StepPaths.processes`."""
        replay, times, types, levels = self._replay, self._times, self._operations.types, self._replay.graph.levels
        trace = _RankTrace(file, replay, rank)
        own = replay.paths.calls.of_process(int(replay.paths.processes[row]))
        self._add_earlier(trace, row, own)
        edges = self._edges[slice(*np.searchsorted(replay.process[self._edges], [row, row + 1]))]
        events, firsts = np.unique(replay.graph.target[edges], return_index=True)
        stops = [*firsts[1:].tolist(), len(edges)]
        columns = replay.graph.source[edges], replay.delays[edges], replay.part[edges], replay.call[edges]
        rows = [*zip(*(column.tolist() for column in columns), strict=True)]  # single numbers are slow in arrays
        # A call whose end is not known: other ranks may wait for it, and nothing on this one does.
        unknown = own[(replay.begun[own] >= 0) & (replay.ended[own] < 0) & (types[own] != NodeType.COMP)]
        begun = replay.begun[unknown]
        moments = np.concatenate([self._begin[events], times[begun]])
        for item in np.lexsort((np.concatenate([levels[events], levels[begun] + 1]), moments)).tolist():
            if item < len(events):
                event = int(events[item])
                self._add_event(trace, event, float(times[event]), rows[firsts[item] : stops[item]])
                continue
            call, event = int(unknown[item - len(events)]), int(begun[item - len(events)])
            trace.add(None, trace.op(call), types[call], times[event], 0, trace.after([event]), call)
        trace.flush()

    def _add_event(
        self, trace: _RankTrace, event: int, end: float, edges: Sequence[tuple[int, float, int, int]]
    ) -> None:
        """Add the nodes for the edges to one event, given by source, delay, part and call."""
        _, _, part, call = edges[0]
        if part == Part.TRANSFER:
            kind, duration = int(self._operations.types[call]), float(self._operations.durations[call])
            depends = trace.after([source for source, *_ in edges])
            trace.add(event, trace.op(call), kind, end, duration, depends, call)
            return
        for delay in sorted({delay for _, delay, _, _ in edges}):
            depends = trace.after([source for source, own, _, _ in edges if own == delay])
            if delay > _LEAST_NS:
                label = "computation" if part == Part.COMPUTATION else f"{trace.op(call)} call"
                trace.add(event, label, NodeType.COMP, end, delay, depends, call)
            else:
                trace.join(event, depends)

    def _add_earlier(self, trace: _RankTrace, row: int, own: Array) -> None:
        """Add nodes for what precedes the steps: the later begin of a rank, and operations that began before."""
        start, ended, begun = self._replay.graph.start, self._replay.ended, self._replay.begun
        earlier = own[(ended[own] >= 0) & (begun[own] < 0)].tolist()
        first = own[begun[own] >= 0][:1].tolist()
        for event, call in (*((row, call) for call in first), *((int(ended[call]), call) for call in earlier)):
            if (delay := float(start[event] - trace.origin)) > _LEAST_NS:
                trace.add(event, "before the steps", NodeType.COMP, start[event], delay, (), call)
