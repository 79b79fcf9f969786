"""The recorded calls of a run in their order, equal where ranks, steps and runs make the same calls.

Groups and peers are described relative to their rank ("4/2": 4 ranks with stride 2; "peer=+1"), so
that ranks with equal calls in different groups are equal. The order of calls counts only within
each group, because threads and asynchronous calls may interleave the calls of different groups
differently in equal runs.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from commtrace.analyses.grouping import Array, group_rows
from commtrace.analyses.process_settings import settings_by_rank
from commtrace.analyses.record_blocks import RecordBlock, read_blocks
from commtrace.rank_ranges import parse_ranks
from commtrace.reading.labels import UNKNOWN, RunLabels
from commtrace.reading.process_reader import Process
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.run_parts import RunPart
from commtrace.reading.table_reader import Kind
from commtrace.schema import Flag, Purpose
from commtrace.statements import Statement

from .call_keys import OBJECTS, ROUTED, CallKey, group_shape, peer_label, site_name
from .own_calls import OwnRow, is_declared, sum_own_calls
from .run_calls import NO_CALLS, Call, GroupLabel, RankCalls, RunCalls, StepCalls, periods
from .setting_differences import setting_facts

_STREAM_BITS: Final = 34  # of `RunLabels.ids("role", ...)`
_ROUTED_PURPOSES: Final = (
    Purpose.EXPERT_DISPATCH, Purpose.EXPERT_COMBINE, Purpose.EXPERT_GRADIENTS, Purpose.ACTIVATIONS_RECOMPUTED,
)  # fmt: skip
"""Purposes of calls in dimension `expert` whose sizes follow the routing."""


class _StepNumbering:
    """Numbers of the calls in a part of a run, and its steps; equal steps are mostly one object."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._digests: list[bytes] = []
        self._numbers: dict[Call, int] = {}
        self._steps: dict[bytes, StepCalls] = {}

    def number(self, call: Call) -> int:
        """Return the number of a call."""
        known = self._numbers.setdefault(call, len(self._calls))
        if known == len(self._calls):
            self._calls.append(call)
            self._digests.append(blake2b(repr(tuple(call.key)).encode(), digest_size=8).digest()[::-1])
        return known

    def steps(self, step: Array, stream: Array, numbers: Array) -> tuple[Array, list[StepCalls]]:
        """Return the steps that have calls, ascending, and the calls of each.

        Args:
            step: Step of each call, shape (n,), ascending.
            stream: Number of each call's group, shape (n,), ascending within a step.
            numbers: Number of each call, shape (n,), in its order within the group.
        """
        begins_step = np.diff(step, prepend=step[:1] - 1) != 0
        begins_stream = begins_step | (np.diff(stream, prepend=-1) != 0)
        content = numbers * 2 + begins_stream
        bounds = [*np.flatnonzero(begins_step).tolist(), len(step)]
        return step[begins_step], [self._step(content[begin:end]) for begin, end in itertools.pairwise(bounds)]

    def _step(self, content: Array) -> StepCalls:
        """Return a step's calls; `content` is twice each number, plus 1 for a group's first."""
        key = content.tobytes()
        if key not in self._steps:
            by_group: dict[GroupLabel, list[tuple[str, list[Call]]]] = defaultdict(list)
            for numbers in np.split(content // 2, np.flatnonzero(content % 2)[1:]):
                calls = [self._calls[number] for number in numbers.tolist()]
                digest = blake2b(b"".join(self._digests[number] for number in numbers.tolist()), digest_size=6)
                by_group[calls[0].key.role, calls[0].key.group].append((digest.hexdigest(), calls))
            in_order = {group: sorted(same) for group, same in by_group.items()}
            self._steps[key] = StepCalls.of(
                Counter(call for same in in_order.values() for _, calls in same for call in calls),
                {group: "+".join(digest for digest, _ in same) for group, same in in_order.items()},
                {group: [call.key for _, calls in same for call in calls] for group, same in in_order.items()},
            )
        return self._steps[key]


def read_calls(run: RecordedRun, own: Sequence[str] = (), *, with_routing: bool = True) -> RunCalls:
    """Read the calls of a run.

    Args:
        run: The run.
        own: Patterns of call sites (`is_declared`) whose calls are the program's own, and are left out.
        with_routing: Whether sizes of calls with tokens of experts are kept. They depend on the data.
    """
    run.require_events("the order of its calls")
    numbers: dict[StepCalls, int] = {NO_CALLS: 0}
    steps: dict[int, tuple[Array, Array]] = {}
    lines: dict[Call, set[str]] = defaultdict(set)
    own_rows: list[OwnRow] = []
    read_part = functools.partial(_read_part, run.labels, own, with_routing)
    for part in run.executor.map("calls", read_part, run.parts(whole_ranks=True)):
        for rank, (rank_steps, calls_of_step) in part.steps.items():
            distinct = {id(calls): calls for calls in calls_of_step}
            number = {at: numbers.setdefault(calls, len(numbers)) for at, calls in distinct.items()}
            steps[rank] = periods(rank_steps, np.array([number[id(calls)] for calls in calls_of_step], np.int64))
        for call, part_lines in part.lines.items():
            lines[call] |= part_lines
        own_rows += part.own
    ranks: dict[int, RankCalls] = {}
    ended = dict(zip(map(id, run.processes), (not end.is_cut for end in run.ends), strict=True))
    for rank, group in itertools.groupby(run.processes, attrgetter("rank")):
        processes = [*group]
        is_ended = all(ended[id(process)] for process in processes)
        represented = parse_ranks(processes[0].tables.stands_for[0]) or [rank]
        rank_periods = steps.get(rank) or periods(*np.zeros((2, 0), np.int64))
        ranks |= dict.fromkeys(represented, _rank_calls(rank_periods, processes, run.selection_problem, is_ended))
    ranks.pop(-1, None)  # a process whose rank is not known
    all_lines = {call: frozenset(call_lines) for call, call_lines in lines.items()}
    return RunCalls(
        str(run.log.path), [*numbers], ranks, run.world_size, run.simulated, setting_facts(run), all_lines,
        sum_own_calls(own_rows), settings_by_rank(run), run.step_ranges,
    )  # fmt: skip


def _rank_calls(
    steps: tuple[Array, Array], processes: Sequence[Process], problem: str | None, is_ended: bool
) -> RankCalls:
    calls = RankCalls(
        *steps,
        is_ended,
        sum(process.lost_records for process in processes),
        Statement.joined("; ", (process.losses for process in processes if process.losses)),
    )
    problems = [process.steps_problem(calls.last_step) for process in processes]
    return replace(calls, problem=problems[0] if all(problems) else problem)


class _PartCalls(NamedTuple):
    """The calls of a part of a run."""

    steps: dict[int, tuple[Array, list[StepCalls]]]
    """The steps that have calls, and the calls of each, by rank."""
    lines: dict[Call, set[str]]
    own: list[OwnRow]


def _read_part(labels: RunLabels, patterns: Sequence[str], with_routing: bool, part: RunPart) -> _PartCalls:
    numbered, reader = _StepNumbering(), _Reader(labels, patterns, with_routing=with_routing)
    columns = np.concatenate([reader.columns(block, numbered) for block in read_blocks(part, labels)], axis=1)
    rank, begin, step, stream, numbers = columns[:, columns[-1] >= 0]
    order = np.lexsort((begin, stream, step, rank))
    steps = {
        int(rank[rows[0]]): numbered.steps(step[rows], stream[rows], numbers[rows])
        for rows in np.split(order, np.flatnonzero(np.diff(rank[order])) + 1)
        if len(rows)
    }
    return _PartCalls(steps, dict(reader.lines), reader.own)


class _Reader:
    """Reader of the calls of a part of a run."""

    def __init__(self, labels: RunLabels, patterns: Sequence[str], *, with_routing: bool) -> None:
        self._labels, self._patterns = labels, patterns
        routed = () if with_routing else _ROUTED_PURPOSES
        self._is_routed = np.isin(np.array(labels.categories("purpose")), [purpose.value for purpose in routed])
        self._is_expert = np.array(labels.categories("role")) == "expert"
        self._shapes = {number: group_shape(group.ranks) for number, group in labels.groups.items()}
        self._described: dict[tuple[int, ...], tuple[str, tuple[str, ...], str, str, str, str]] = {}
        self.lines: dict[Call, set[str]] = defaultdict(set)
        self.own: list[OwnRow] = []

    def columns(self, block: RecordBlock, numbered: _StepNumbering) -> Array:
        """Return rank, t_begin, step, stream and number of the calls of a block, int64 of shape (5, n)."""
        stream = self._labels.ids("role", block)
        payload = np.where(block["flags"] & Flag.OBJECT, OBJECTS, block["payload"])
        payload = np.where(self._is_routed[block["site"]] & self._is_expert[stream], ROUTED, payload)
        fields = [block["rank"], *(block[name] for name in ("kind", "group", "peer", "site")), stream, block["phase"]]
        first, groups = group_rows([*fields, payload])
        rows = zip(*(column[first].tolist() for column in fields), strict=True)
        columns = (payload[first], block["payload"][first], np.bincount(groups, minlength=len(first)))
        sizes = zip(*(column.tolist() for column in columns), strict=True)
        numbers = [
            self._number(numbered, row, payload_of_key, count, count * size)
            for row, (payload_of_key, size, count) in zip(rows, sizes, strict=True)
        ]
        stream = stream + (block["process"] << _STREAM_BITS)
        return np.stack([block["rank"], block["t_begin"], block["step"], stream, np.array(numbers, np.int64)[groups]])

    def _number(self, numbered: _StepNumbering, row: tuple[int, ...], payload: int, count: int, size: int) -> int:
        """Return the number of a call, -1 for one of the program's own."""
        if row not in self._described:
            self._described[row] = self._describe(*row)
        op, texts, site, line, purpose, place = self._described[row]
        call = Call(CallKey(op, payload, *texts), site, purpose, place)
        if is_declared(self._patterns, call.key.phase, site, line):
            self.own.append(((purpose, line, op), row[0], count, size))
            return -1
        self.lines[Call(call.key, site)].add(line)
        return numbered.number(call)

    def _describe(
        self, rank: int, kind: int, group: int, peer: int, site: int, stream: int, phase: int
    ) -> tuple[str, tuple[str, ...], str, str, str, str]:
        """Return operation, texts of the key, call site without line number, line of code, purpose and place."""
        labels = self._labels
        kind_row = labels.kinds.get(kind, Kind(UNKNOWN, "", "", "", ""))
        peer_text = peer_label(kind_row.op, peer, rank, labels.groups.get(group))
        role, in_phase = labels.categories("role")[stream], labels.categories("phase")[phase]
        texts = (kind_row.dtype, kind_row.reduce_op.lower(), in_phase, role, self._shapes.get(group, ""), peer_text)
        known = labels.sites.get(site)
        name, line = ("-", "") if known is None else (site_name(known), known.label(labels.files))
        purpose, place = (labels.categories(column)[site] for column in ("purpose", "place"))
        return kind_row.op, tuple("_".join(text.split()) or "-" for text in texts), name, line, purpose, place
