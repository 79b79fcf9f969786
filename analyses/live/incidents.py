"""Incidents of a run that is watched: hangs, failures, stragglers and long steps, each told once.

hang            a call is stuck (`across_ranks.stuck_calls`, as in reports, which has a threshold of its own), and did
                not only fail because a rank that it needs ended; or ranks make no progress outside of calls for the
                threshold given here; if the ranks that others wait for compute, or write to storage, it must be stuck
                for that long, too
end             a process failed or died
straggler:20%   a rank computes longer than the others by at least this share of a step
step:2x         a step takes at least this multiple of the median of the steps before it
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.analyses.across_ranks.culprits import HIGH, Culprit, find_culprits
from commtrace.analyses.across_ranks.endings_section import describe_endings
from commtrace.analyses.across_ranks.stalls import CHILDREN, CHILDREN_STORAGE, COMPUTING, LOCK, STORAGE
from commtrace.analyses.across_ranks.step_time_section import delay_sentences
from commtrace.analyses.across_ranks.stuck_calls import MIN_WAIT_NS
from commtrace.analyses.across_ranks.stuck_calls_section import diagnosis
from commtrace.analyses.grouping import rows_of
from commtrace.formatting import format_duration, is_known
from commtrace.rank_ranges import parse_ranks

from .followed_run import LiveRun

KINDS: Final = {"hang": "60s", "end": "", "straggler": "20%", "step": "2x"}
"""Kinds of incidents -> threshold by default; "": none."""
EXPLAINED_NS: Final = 4_000_000_000
"""Time after which a stuck call is told, whether or not it is known what its absent ranks do."""
_MAY_GO_ON: Final = (COMPUTING, STORAGE, CHILDREN, CHILDREN_STORAGE, LOCK + COMPUTING)
"""Activities of a rank that may go on by itself."""
MIN_STEPS: Final = 5
"""Steps before a long one that must be known."""
STEPS_COMPARED: Final = 50


@dataclass(frozen=True)
class Condition:
    """What counts as an incident.

    Attributes:
        kind: One of KINDS.
        threshold: Seconds without progress outside of calls, share of a step, or multiple of a median; 0: none.
    """

    kind: str
    threshold: float

    @staticmethod
    def parse(text: str) -> Condition:
        """Parse a condition, such as "hang", "hang:30s", "straggler:20%" or "step:2x".

        Raises:
            ValueError: The text is something else.
        """
        kind, colon, value = text.partition(":")
        if kind not in KINDS:
            raise ValueError(f"{text!r} is not a condition; choose from {', '.join(KINDS)}")
        default = KINDS[kind]
        value = value if colon else default
        unit = default.lstrip("0123456789")
        match = re.fullmatch(rf"(\d+(?:\.\d+)?){re.escape(unit)}", value)
        if bool(default) != bool(match) or (not default and colon):
            example = f"{kind}:{default}" if default else kind
            raise ValueError(f"{text!r} is not a condition such as {example}")
        number = float(match[1]) if match else 0.0
        if kind == "step" and number <= 1:
            raise ValueError(f"{text!r}: the multiple must be above 1")
        return Condition(kind, number / 100 if unit == "%" else number)


@dataclass(frozen=True)
class Incident:
    """An incident.

    Attributes:
        kind: One of KINDS.
        text: What happened, in sentences.
        ranks: The ranks that caused it; empty if they are not known.
        step: The step in which it happened; None if that is not known.
        rows: Rows of the tables that it follows from, by table.
    """

    kind: str
    text: str
    ranks: Sequence[int]
    step: int | None
    rows: dict[str, list[dict[str, Any]]]

    def document(self, live: LiveRun) -> dict[str, Any]:
        """Return it as a JSON object, with the run and the time."""
        facts = {"kind": self.kind, "text": self.text, "ranks": [*self.ranks], "step": self.step}
        run = {"run": live.run.id, "log": str(live.run.log.path), "unix_ns": live.read_ns}
        return {"format": "commtrace-incident", "version": 1, **run, **facts, "tables": self.rows}


class Watcher:
    """Search for incidents that were not told before."""

    def __init__(self, conditions: Iterable[Condition]) -> None:
        self._conditions = [*conditions]
        self._forget("")

    def _forget(self, run: str) -> None:
        """Begin with a run."""
        self._run, self._told = run, set[object]()
        self._examined, self._was_long = -1, False
        self._involved: set[int] = set()  # ranks of the hangs that were told: culprits, and those that wait for them

    def new_incidents(self, live: LiveRun) -> list[Incident]:
        """Return the incidents that a reading of the run shows for the first time."""
        if live.run.id != self._run:
            self._forget(live.run.id)
        return [incident for condition in self._conditions for incident in self._find(condition, live)]

    def _find(self, condition: Condition, live: LiveRun) -> Iterator[Incident]:
        found = {"hang": self._hang, "end": self._end, "straggler": self._straggler, "step": self._step}
        return found[condition.kind](condition.threshold, live)

    def _is_new(self, key: object) -> bool:
        is_new = key not in self._told
        self._told.add(key)
        return is_new

    def _hang(self, seconds: float, live: LiveRun) -> Iterator[Incident]:
        calls, stalled = _hung_calls(live), live.tables["stalled_threads"]
        stalled = stalled.loc[stalled["is_main"]]
        if not len(calls) and not (stalled["stalled_ns"] >= seconds * 1e9).any():
            stalled = stalled.iloc[:0]  # with one that has been so for long enough, all are told
        current: set[object] = {
            ("hang", call.op, call.group_ranks, call.seq if is_known(call.seq) else None) for call in rows_of(calls)
        }
        if not len(calls):
            current = {("hang", rank) for rank in stalled["rank"]}
        tables = {"stuck_calls": calls, "stuck_ranks": live.tables["stuck_ranks"], "stalled_threads": stalled}
        culprits = find_culprits(tables)
        # A hang that was told and is over may come back; a change of it, such as more ranks, is the same hang, but one
        # of other ranks is not.
        was_told = any(key in self._told for key in current)
        self._involved = self._involved if was_told else set()
        is_other = any(own.confidence == HIGH and self._involved.isdisjoint(own.involved) for own in culprits)
        is_new = bool(current) and (not was_told or is_other)
        others = {key for key in self._told if not (isinstance(key, tuple) and key[0] == "hang")}
        if is_new and (_is_unexplained(live) or _may_go_on(culprits, calls, seconds)):
            self._told = self._told if was_told else others
            return
        self._told = others | current
        self._involved.update(*(own.involved for own in culprits))
        if not is_new:
            return
        surest = {rank for own in _surest(culprits) for rank in own.ranks}
        absent = {rank for call in rows_of(calls) for rank in parse_ranks(call.absent_ranks)}
        text = " ".join(diagnosis(tables))
        rows = {"culprits": [asdict(own) for own in culprits], **_rows(tables)}
        yield Incident("hang", text, sorted(surest or absent or {*stalled["rank"]}), live.step, rows)

    def _end(self, _: float, live: LiveRun) -> Iterator[Incident]:
        endings = live.tables["endings"]
        if len(endings) and self._is_new("end"):
            first = sorted(endings.loc[endings["order"] == "first", "rank"])
            steps = endings.loc[endings["rank"].isin(first), "step"].dropna()
            step = int(steps.min()) if len(steps) else None
            yield Incident("end", " ".join(describe_endings(live.tables)), first, step, _rows({"endings": endings}))

    def _straggler(self, share: float, live: LiveRun) -> Iterator[Incident]:
        table = live.tables["delays"]
        for number, row in enumerate(rows_of(table)):
            if row.share >= share and self._is_new(("straggler", row.rank, row.phase)):
                one = table.iloc[number : number + 1]
                text = " ".join(delay_sentences({**live.tables, "delays": one}))
                yield Incident("straggler", text, [int(row.rank)], live.step, _rows({"delays": one}))

    def _step(self, multiple: float, live: LiveRun) -> Iterator[Incident]:
        table = live.tables["step_times"]
        ns = table["ns"].to_numpy(float)
        # Steps are examined once: when they are new, and enough others are known.
        for number in range(max(MIN_STEPS, int((table["step"] <= self._examined).sum())), len(table)):
            median = float(np.median(ns[max(0, number - STEPS_COMPARED) : number]))
            was_long, self._was_long = self._was_long, bool(ns[number] >= multiple * median)
            self._examined = int(table["step"].iloc[number])
            if self._was_long and not was_long:  # long steps in a row are one incident
                yield _long_step(table.iloc[number : number + 1], median)


def _long_step(table: pd.DataFrame, median: float) -> Incident:
    """Return the incident of a step, which is the only row of a table."""
    row = next(rows_of(table))
    parts = ("computation", "waiting", "exposed")
    times = ", ".join(f"{part} {format_duration(getattr(row, f'{part}_ns'))}" for part in parts)
    text = (
        f"Step {row.step:,} took {format_duration(row.ns)}, {row.ns / median:.1f} times the median "
        f"({format_duration(median)}): {times}; rank {row.slowest_rank} computed {format_duration(row.delay_ns)} "
        "longer than the others."
    )
    return Incident("step", text, [int(row.slowest_rank)], int(row.step), _rows({"step_times": table}))


def _hung_calls(live: LiveRun) -> pd.DataFrame:
    """Return the stuck calls, but for those that failed on all of their ranks because another one ended.

    That end is an incident of its own.
    """
    calls, ranks = live.tables["stuck_calls"], live.tables["stuck_ranks"]
    waits = (ranks["part"] == "waiting") & (ranks["state"] != "failed")
    runs = (ranks["part"] == "absent") & (ranks["end"] == "runs")
    over = {*ranks["stuck_call"]} - {*ranks.loc[waits | runs, "stuck_call"]}
    return calls.loc[[number not in over for number in range(len(calls))]]


def _is_unexplained(live: LiveRun) -> bool:
    """Return whether a stuck call is so new that what its absent ranks do may not be in the log yet."""
    calls, ranks = live.tables["stuck_calls"], live.tables["stuck_ranks"]
    absent = ranks.loc[(ranks["part"] == "absent") & (ranks["end"] == "runs"), "rank"]
    is_new = bool((calls["waited_ns"] < MIN_WAIT_NS + EXPLAINED_NS).any())
    return is_new and not {*absent} <= {*live.tables["stalled_threads"]["rank"]}


def _may_go_on(culprits: Sequence[Culprit], calls: pd.DataFrame, seconds: float) -> bool:
    """Return whether the ranks that others wait for in a call may go on by themselves, and have not waited for long.

    One rank may evaluate, compile or write a checkpoint while the others wait for it.
    """
    is_short = bool(len(calls)) and bool((calls["waited_ns"] < seconds * 1e9).all())
    return is_short and bool(culprits) and all(own.activity in _MAY_GO_ON for own in _surest(culprits))


def _surest(culprits: Sequence[Culprit]) -> list[Culprit]:
    """Return the culprits with the highest confidence, which are the first."""
    return [own for own in culprits if own.confidence == culprits[0].confidence]


def _rows(tables: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return tables as lists of rows with values that JSON knows; what is not known is None."""
    return {
        name: [
            {column: _plain(value) for column, value in row.items()} for row in table.astype(object).to_dict("records")
        ]
        for name, table in tables.items()
    }


def _plain(value: Any) -> Any:
    if not is_known(value):
        return None
    return value.item() if hasattr(value, "item") else value
