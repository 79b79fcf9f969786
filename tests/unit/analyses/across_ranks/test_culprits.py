"""The ranks that a hang begins with, from tables of stuck calls and of ranks without progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from commtrace.analyses.across_ranks.culprits import HIGH, LOW, MEDIUM, find_culprits
from commtrace.analyses.across_ranks.stalls import STALLED_THREADS
from commtrace.analyses.across_ranks.stuck_calls import STUCK_CALLS, STUCK_RANKS
from commtrace.analyses.across_ranks.stuck_calls_section import diagnosis
from commtrace.rank_ranges import parse_ranks

SECOND = 10**9


def tables(
    calls: Sequence[tuple[str, str]], stalls: dict[int, dict[str, Any]], ends: dict[int, tuple[str, int]] | None = None
) -> dict[str, pd.DataFrame]:
    """Return tables of a hang.

    Args:
        calls: Waiting and absent ranks of each stuck call.
        stalls: Ranks without progress, and columns that differ from those of a rank in a lock for 10 s.
        ends: How processes ended, and when; the others run until 60 s.
    """
    calls_rows, rank_rows = [], []
    for number, (waiting, absent) in enumerate(calls):
        calls_rows.append({"op": "all_reduce", "seq": 5, "group_ranks": f"{waiting},{absent}", "waiting_ranks": waiting,
                           "absent_ranks": absent, "disagreement": "", "since_ns": SECOND, "waited_ns": 9 * SECOND,
                           "site": "train.py:40 main"})  # fmt: skip
        for part, ranks in (("waiting", waiting), ("absent", absent)):
            for rank in parse_ranks(ranks):
                end, alive = (ends or {}).get(rank, ("runs", 60 * SECOND))
                rank_rows.append({"stuck_call": number, "rank": rank, "part": part, "call": "all_reduce 4",
                                  "state": "complete", "begin_ns": 0, "site": "train.py:40 main", "end": end,
                                  "alive_ns": alive})  # fmt: skip
    known = {"thread": "MainThread", "is_main": True, "stalled_ns": 10 * SECOND, "since_ns": 50 * SECOND,
             "in_call": False, "activity": "waiting for a lock or thread", "function": "threading.py:3 wait",
             "line": "train.py:7 load"}  # fmt: skip
    return {
        "stuck_calls": pd.DataFrame(calls_rows, columns=STUCK_CALLS.column_names),
        "stuck_ranks": pd.DataFrame(rank_rows, columns=STUCK_RANKS.column_names),
        "stalled_threads": pd.DataFrame(
            [{"rank": rank, **known, **row} for rank, row in stalls.items()], columns=STALLED_THREADS.column_names
        ),
    }


IN_CALL = {"in_call": True, "activity": "waiting for data"}
STOPPED = {"activity": "stopped", "function": None, "line": None, "in_call": None}
SLEEPS = {"activity": "sleeping", "function": "train.py:9 main", "line": "train.py:9 main", "stalled_ns": 8 * SECOND,
          "since_ns": 52 * SECOND}  # fmt: skip

CASES: dict[str, tuple[dict[str, pd.DataFrame], list[tuple[str, str, str, str]]]] = {
    "one rank": (tables([("0,2-3", "1")], {1: {}, 0: IN_CALL}), [("1", "0,2-3", "waiting for a lock or thread", HIGH)]),
    "a chain": (
        tables([("0", "1"), ("2", "0"), ("3", "2")], {1: {}, 0: IN_CALL, 2: {}}),
        [("1", "0,2-3", "waiting for a lock or thread", HIGH)],
    ),
    "two groups": (
        tables([("2", "3"), ("0", "1")], {3: SLEEPS, 1: {}}),
        [("1", "0", "waiting for a lock or thread", HIGH), ("3", "2", "sleeping", HIGH)],
    ),
    "two ranks of a call": (
        tables([("0", "1,3")], {3: SLEEPS, 1: {}}),
        [("1", "0", "waiting for a lock or thread", HIGH), ("3", "0", "sleeping", HIGH)],
    ),
    "many ranks that do the same": (
        tables([("0", "1-5")], dict.fromkeys(range(1, 6), SLEEPS)), [("1-5", "0", "sleeping", HIGH)]
    ),
    "in another call": (tables([("0", "1")], {1: IN_CALL}), [("1", "0", "waiting for data", MEDIUM)]),
    "no stack": (tables([("0", "1")], {}), [("1", "0", "not known why", MEDIUM)]),
    "left": (tables([("0", "1")], {}, {1: ("exit", 9 * SECOND)}), [("1", "0", "closed the log", HIGH)]),
    "died before the others": (
        tables([("0", "1")], {}, {1: ("died", 9 * SECOND)}), [("1", "0", "ended without closing the log", HIGH)]
    ),
    "all were killed": (
        tables([("0", "1")], {}, dict.fromkeys((0, 1), ("died", 60 * SECOND))),
        [("1", "0", "not known why", MEDIUM)],
    ),
    "a rank is stopped": (tables([("0,2", "1")], {1: STOPPED, 0: IN_CALL}), [("1", "0,2", "stopped", HIGH)]),
    "a circle": (tables([("0", "1"), ("1", "0")], {}), []),
    "outside of calls": (tables([], {0: SLEEPS, 1: {}}), [("1", "", "waiting for a lock or thread", LOW),
                                                          ("0", "", "sleeping", LOW)]),
    "in calls of another host": (
        tables([], {0: IN_CALL, 1: {}, 2: IN_CALL}), [("1", "0,2", "waiting for a lock or thread", MEDIUM)]
    ),
    "a call, and a rank outside of calls": (
        tables([("0", "1")], {1: SLEEPS, 2: {}}),
        [("1", "0", "sleeping", HIGH), ("2", "", "waiting for a lock or thread", LOW)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_culprits(case: str) -> None:
    given, expected = CASES[case]
    found = find_culprits(given)
    text = [(one.ranks, one.waiting, one.activity, one.confidence) for one in found]
    assert text == [(*(tuple(parse_ranks(part)) for part in parts[:2]), *parts[2:]) for parts in expected]


def test_the_diagnosis_begins_with_one_culprit_and_mentions_an_independent_one() -> None:
    first, second, *others = diagnosis(CASES["two groups"][0])
    assert first == (
        "Rank 1 made no progress for 10.0 s: waiting for a lock or thread in threading.py:3 wait, called from "
        "train.py:7 load; rank 0 waited for it (confidence: high)."
    )
    assert second == (
        "Independently, rank 3 made no progress for 8.00 s: sleeping in train.py:9 main; rank 2 waited for it "
        "(confidence: high)."
    )
    assert len(others) == 4, "two calls, and where the absent rank of each is"
    _, second, *_ = diagnosis(CASES["two ranks of a call"][0])
    assert second.startswith("Rank 3 made no progress")
