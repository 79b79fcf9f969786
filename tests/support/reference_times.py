"""A model of calls and their times in plain loops over records, which shares no code with the analyses.

The bounds of the hosts' clocks are given: the clocks have their own tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from random_times import GRADIENTS_SITE, MESSAGES, ROOTED, UNTIMED, RandomLog

from commtrace.schema import Clock, Flag, Phase, State

Call = dict[str, Any]
Bounds = Callable[[int, int, int], tuple[int, int]]
"""A host, a time on its clock, and another host: the earliest and latest time on the other host's clock."""


def add_times(log: RandomLog, on_host: Bounds) -> list[Call]:
    """Return the calls in the log, with `known`, `wait`, `transfer` and `release` on the clock of the call's host."""
    operations = defaultdict(list)
    unknown = {"known": False, "wait": 0, "transfer": 0, "release": -1}
    present = [rank for rank in range(len(log.calls)) if rank not in log.missing]
    calls = [{**call, "rank": rank, **unknown} for rank in present for call in log.calls[rank]]
    for call in calls:
        key: tuple[int, ...] = (call["group"], call["seq"])
        if call["op"] in MESSAGES:
            key += (call["tag"], *(call[end] for end in ("rank", "peer")[:: 1 if call["op"] == "send" else -1]))
        if call["op"] not in UNTIMED:
            operations[key].append(call)
    for members in operations.values():
        expected = 2 if members[0]["op"] in MESSAGES else len(log.groups[members[0]["group"]])
        if len(members) == expected > 1 and all(call["state"] != State.FAILED for call in members):
            for call in members:
                _add_wait(log, call, members, on_host)
    return calls


def _add_wait(log: RandomLog, call: Call, members: list[Call], on_host: Bounds) -> None:
    """Add the times of one call of an operation whose other calls are known."""
    begin, end, here = call["t_begin"], call["t_end"], log.host_of[call["rank"]]
    awaited = [other for other in members if other is not call]
    if call["op"] in ROOTED:  # the root waits for all or for none, and the others for it or for none
        waits = (call["rank"] == call["peer"]) == (call["op"] in ("reduce", "gather"))
        awaited = [other for other in awaited if waits and call["peer"] in (call["rank"], other["rank"])]
    arrivals = [on_host(log.host_of[other["rank"]], other["t_begin"], here) for other in awaited]
    if call["op"] == "send" and arrivals[0][0] > end:  # buffered: it had ended before its receive arrived
        arrivals = []
    low, high = (min(max(moments), end) - begin for moments in zip((begin, begin), *arrivals, strict=True))
    if any(member["flags"] & Flag.UNEVEN for member in members):
        low = 0
    if call["state"] == State.COMPLETE and end >= begin and (low or high < end - begin or not high):
        wait = low + (high - low) // 2 if low else 0
        call |= {"known": True, "wait": wait, "transfer": end - begin - wait, "release": begin + wait}


def blocked_pieces(calls: list[Call], clock: Callable[[int, int], int]) -> dict[int, list[tuple[int, int, int, Call]]]:
    """Return by rank when calls blocked it: (begin, end of waiting, end, call), without overlaps, on one clock."""
    pieces: dict[int, list[tuple[int, int, int, Call]]] = {}
    for rank in sorted({call["rank"] for call in calls}):
        spans, unobserved = [], []
        own = sorted((call for call in calls if call["rank"] == rank), key=lambda call: int(call["t_begin"]))
        for number, call in enumerate(own):
            begin, back, waited, end = (
                clock(rank, call[name]) if call[name] else 0 for name in ("t_begin", "t_return", "t_wait", "t_end")
            )
            later = [other for other in own[number:] if any(other[name] != call[name] for name in ("phase", "step"))]
            next_phase = clock(rank, later[0]["t_begin"]) if later else 0
            is_unobserved = not call["t_wait"] and call["clock"] == Clock.FUTURE
            if is_unobserved and call["site"] == GRADIENTS_SITE and later:
                end = min(end, max(next_phase, back))
            spans.append((begin, 0, back, 0 < end <= back, call))
            if end > max(waited, back) and waited and call["clock"] in (Clock.WAIT, Clock.FUTURE):
                spans.append((max(waited, back), 1, end, True, call))
            elif back < end <= next_phase and is_unobserved:
                unobserved.append((end, next_phase, call))
        spans.sort(key=lambda span: span[:2])
        extra = []
        for end, next_phase, call in unobserved:
            reach = max(span[2] for span in spans if span[0] < end)
            if reach < end and not any(end <= span[0] < next_phase for span in spans):
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
