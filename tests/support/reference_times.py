"""A model of calls and their times in plain loops over records, which shares no code with the analyses.

The bounds of the hosts' clocks are given: the clocks have their own tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from random_times import ROOTED, UNTIMED, RandomLog

from commtrace.schema import Clock, Flag, Phase, State

Call = dict[str, Any]
Bounds = Callable[[int, int], tuple[int, int]]
"""A host, and a time on its clock or the reference's: the earliest and latest time on the other."""


def add_times(log: RandomLog, to_reference: Bounds, from_reference: Bounds) -> list[Call]:
    """Return the calls in the log, with `known`, `wait`, `transfer` and `release` on the clock of the call's host."""
    operations = defaultdict(list)
    calls = [
        call | {"rank": rank} for rank in range(len(log.calls)) if rank not in log.missing for call in log.calls[rank]
    ]
    for call in calls:
        key: tuple[int, ...] = (call["group"], call["seq"])
        if call["op"] in ("send", "recv"):
            ends = (call["rank"], call["peer"])
            key += (call["tag"], *(ends if call["op"] == "send" else ends[::-1]))
        elif call["op"] in UNTIMED:
            key += (call["rank"], id(call))
        operations[key].append(call)
    for members in operations.values():
        expected = 2 if members[0]["op"] in ("send", "recv") else len(log.groups[members[0]["group"]])
        whole = len(members) == expected > 1 and all(call["state"] != State.FAILED for call in members)
        uneven = any(call["flags"] & Flag.UNEVEN for call in members)
        for call in members:
            call |= {"known": False, "wait": 0, "transfer": 0, "release": -1}
            ended = call["state"] == State.COMPLETE and call["t_end"] >= call["t_begin"]
            if not whole or not ended or call["op"] in UNTIMED:
                continue
            low, high = _wait_bounds(log, call, _awaited(call, members), to_reference, from_reference)
            low, duration = 0 if uneven else low, call["t_end"] - call["t_begin"]
            if low or high < duration or not high:
                wait = low + (high - low) // 2 if low else 0
                call |= {"known": True, "wait": wait, "transfer": duration - wait, "release": call["t_begin"] + wait}
    return calls


def _awaited(call: Call, members: list[Call]) -> list[Call]:
    others = [other for other in members if other is not call]
    if call["op"] in ROOTED:
        is_root = call["rank"] == call["peer"]
        waits = is_root == (call["op"] in ("reduce", "gather"))
        return [other for other in others if waits and (is_root or other["rank"] == call["peer"])]
    return others


def _wait_bounds(
    log: RandomLog, call: Call, awaited: list[Call], to_reference: Bounds, from_reference: Bounds
) -> tuple[int, int]:
    """Return the shortest and longest wait for the arrival of the last of other calls."""
    here = log.host_of[call["rank"]]
    near = [other["t_begin"] for other in awaited if log.host_of[other["rank"]] == here]
    far = [
        to_reference(log.host_of[other["rank"]], other["t_begin"])
        for other in awaited
        if log.host_of[other["rank"]] != here
    ]
    first = last = max(near, default=0)
    if far:
        low, high = max(bounds[0] for bounds in far), max(bounds[1] for bounds in far)
        first, last = max(first, from_reference(here, low)[0]), max(last, from_reference(here, high)[1])
    begin, end = call["t_begin"], call["t_end"]
    if call["op"] == "send" and first > end:  # buffered: it had ended before its receive arrived
        return 0, 0
    return min(max(first, begin), end) - begin, min(max(last, begin), end) - begin


def blocked_pieces(calls: list[Call], clock: Callable[[int, int], int]) -> dict[int, list[tuple[int, int, int, Call]]]:
    """Return by rank when calls blocked it: (begin, end of waiting, end, call), without overlaps, on one clock."""
    pieces: dict[int, list[tuple[int, int, int, Call]]] = {}
    for rank in sorted({call["rank"] for call in calls}):
        spans, unobserved = [], []
        for call in (call for call in calls if call["rank"] == rank):
            begin, back, waited, end = (
                clock(rank, call[name]) if call[name] else 0 for name in ("t_begin", "t_return", "t_wait", "t_end")
            )
            spans.append((begin, 0, back, 0 < end <= back, call))
            if end > max(waited, back) and waited and call["clock"] in (Clock.WAIT, Clock.FUTURE):
                spans.append((max(waited, back), 1, end, True, call))
            elif end > back and not call["t_wait"] and call["clock"] == Clock.FUTURE:
                unobserved.append((end, call))
        spans.sort(key=lambda span: span[:2])
        extra = []
        for end, call in unobserved:
            before, after = [span for span in spans if span[0] < end], [span for span in spans if span[0] >= end]
            reach = max(span[2] for span in before)
            if after and reach < end and any(after[0][4][name] != call[name] for name in ("phase", "step")):
                extra.append((reach, 2, end, True, call))
        pieces[rank], reach = [], 0
        for begin, _, end, until_end, call in sorted([*spans, *extra], key=lambda span: span[:2]):
            first = max(begin, reach)
            last = reach = max(end, first)
            release = clock(rank, call["release"]) if until_end and call["known"] else first
            pieces[rank].append((first, min(max(release, first), last), last, call))
    return pieces


def measured_steps(calls: list[Call], ranks: int) -> list[int]:
    """Return the measured steps without evaluations."""
    having = defaultdict(set)
    for call in calls:
        having[call["step"]].add(call["rank"])
    common = [step for step in sorted(having) if step >= 0 and len(having[step]) == ranks]
    evaluated = {call["step"] for call in calls if call["phase"] == Phase.EVALUATION}
    return [step for step in common[:-1] if step - 1 in common and not {step, step - 1} & evaluated]


def within(begin: int, end: int, intervals: list[tuple[int, int]]) -> int:
    """Return the part of intervals that lies in another one."""
    return sum(max(0, min(last, end) - max(first, begin)) for first, last in intervals)
