"""Every report says the same about waits, transfers and steps as a model that shares no code with the analyses."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_times import UNTIMED, US, RandomLog, random_log
from reference_times import Call, add_times, blocked_pieces, measured_steps, within

from commtrace import cli
from commtrace.analyses.across_ranks.critical_paths import chosen_steps
from commtrace.analyses.grouping import rows_of
from commtrace.analyses.scaling.step_times import step_times
from commtrace.analyses.what_if.changed_run import replayed_run
from commtrace.errors import LogError
from commtrace.formatting import format_duration
from commtrace.run import Run, open_run
from commtrace.schema import Clock, Phase, State

DEFAULT_SEEDS = 12
SEEDS = [
    *range(DEFAULT_SEEDS),
    *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(DEFAULT_SEEDS, 1000)),
]


class Reference:
    """The calls of a log with the model's times, given the clocks of the run."""

    def __init__(self, log: RandomLog, run: Run) -> None:
        self._run = run
        self.calls = add_times(log, self._on_host(log))
        self.pieces = blocked_pieces(self.calls, self.on_one_clock)
        self.ranks = len(run.processes)
        self.timed = [call for call in self.calls if call["op"] not in UNTIMED]

    def _clock(self, log: RandomLog, host: int) -> Any:
        rank = next((rank for rank, at in enumerate(log.host_of) if at == host and rank not in log.missing), None)
        if rank is None:
            return None
        number = [process.rank for process in self._run.processes].index(rank)
        return self._run.clocks.aligned[self._run.clocks.host_of_process[number]]

    def _on_host(self, log: RandomLog) -> Any:
        def bounds(host: int, time: int, other: int) -> tuple[int, int]:
            clock, other_clock = self._clock(log, host), self._clock(log, other)
            if host == other:
                return time, time
            if clock is None or other_clock is None:
                return -(1 << 62), 1 << 62
            (low, high) = other_clock.from_reference(*clock.to_reference(np.array([time])))
            return int(low[0]), int(high[0])

        return bounds

    def on_one_clock(self, rank: int, time: int) -> int:
        clocks = self._run.clocks
        if len(clocks.hosts) < 2 or clocks.half_width_ns > 1_000_000:
            return time
        number = [process.rank for process in self._run.processes].index(rank)
        clock = clocks.aligned[clocks.host_of_process[number]]
        assert clock is not None
        low, high = (int(values[0]) for values in clock.to_reference(np.array([time])))
        return low + (high - low) // 2

    def sums_by(self, key: str) -> dict[Any, tuple[int, int, int, int]]:
        """Return calls, calls_unknown, wait_ns and transfer_ns by a key of the calls."""
        sums: dict[Any, list[int]] = {}
        for call in self.timed:
            row = sums.setdefault(call[key], [0, 0, 0, 0])
            for place, value in enumerate((call["known"], not call["known"], call["wait"], call["transfer"])):
                row[place] += value
        return {name: tuple(row) for name, row in sums.items()}  # type: ignore[misc]

    def rank_steps(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        """Return step_ns, blocked_ns and late_ns by rank and measured step."""
        rows = {}
        for step in measured_steps(self.calls, self.ranks):
            for rank, pieces in self.pieces.items():
                begin, end = (self.end(rank, number) for number in (step - 1, step))
                rows[rank, step] = end - begin, *blocked_and_late(begin, end, pieces)
        return rows

    def end(self, rank: int, step: int) -> int:
        """Return when the last call of a rank's step or of the step before it stopped blocking it, on one clock."""
        steps = {step, step - 1} - {-1}  # what start-up left in flight belongs to no step
        return max(last for _, _, last, call in self.pieces[rank] if call["step"] in steps)


def blocked_and_late(begin: int, end: int, pieces: list[tuple[int, int, int, Call]]) -> tuple[int, int]:
    """Return the blocked and the waiting time of a rank in an interval."""
    blocked = within(begin, end, [(first, last) for first, _, last, _ in pieces])
    return blocked, within(begin, end, [(first, released) for first, released, _, _ in pieces])


def run_of(log: RandomLog, folder: Path) -> Run:
    log.write(folder)
    return open_run(folder)


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_all_reports_agree_with_the_model(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(log := random_log(seed), tmp_path)
    reference = Reference(log, run)
    assert_waits_agree(run.tables(), reference)
    assert cli.main(["report", str(tmp_path), "--json", "--per-rank"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    by_rank = {row["rank"]: (row["wait_ns"], row["transfer_ns"]) for row in tables["waits_by_rank"]}
    assert by_rank == {rank: row[2:] for rank, row in reference.sums_by("rank").items()}
    assert_steps_agree(run, reference)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 4])
def test_the_page_shows_the_times_of_the_model(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("jinja2")
    run = run_of(log := random_log(seed), tmp_path / "log")
    page = tmp_path / "page.html"
    assert cli.main(["report", str(tmp_path / "log"), "--html", str(page)]) == 0
    rows = [
        [html.unescape(re.sub("<.*?>", "", cell)).strip() for cell in re.findall(r"<t[dh].*?</t[dh]>", row, re.DOTALL)]
        for row in re.findall(r"<tr>.*?</tr>", page.read_text(), re.DOTALL)
    ]
    expected = Reference(log, run).sums_by("op")
    assert len(expected) > 2
    for op, (_, _, wait, transfer) in expected.items():
        shown = [
            row for row in rows if row and row[0] == op and {format_duration(wait), format_duration(transfer)} <= {*row}
        ]
        assert shown, (op, wait, transfer)


def assert_waits_agree(tables: Any, reference: Reference) -> None:
    for key, column in (("op", "operation"), ("rank", "rank"), ("step", "step")):
        table = tables[f"waits_by_{column}"].set_index(key)[["calls", "calls_unknown", "wait_ns", "transfer_ns"]]
        expected = reference.sums_by(key)
        if key == "step":  # evaluations are a row of their own
            expected = {step: row for step, row in expected.items() if step not in evaluated(reference.calls)}
            table = table.loc[table.index.isin([*expected])]
        assert {name: tuple(row) for name, row in zip(table.index, table.to_numpy().tolist(), strict=True)} == expected
    sample = tables["waiting"].iloc[0]
    assert sample["every"] == 1
    assert (sample["wait_ns"], sample["transfer_ns"]) == tuple(
        sum(call[name] for call in reference.timed) for name in ("wait", "transfer")
    )


def evaluated(calls: list[Call]) -> set[int]:
    return {call["step"] for call in calls if call["phase"] == Phase.EVALUATION}


def assert_steps_agree(run: Run, reference: Reference) -> None:
    expected = reference.rank_steps()
    if expected:
        try:
            table = step_times(run).steps
        except LogError:
            assert max(row[0] for row in expected.values()) <= 0
            return
        rows = zip(table["rank"], table["step"], table["step_ns"], table["blocked_ns"], table["late_ns"], strict=True)
        assert {(rank, step): (*ns,) for rank, step, *ns in rows} == expected
    paths = run.step_paths
    if paths is None:
        return
    assert replayed_run(run).replay.error_ns < 1
    tables = run.tables()
    computation = tables["exposed_communication"].set_index("step")["computation_ns"]
    for times in rows_of(tables["step_times"]):
        begin, end = (
            max(reference.end(rank, number) for rank in reference.pieces)
            for number in range(times.step - 1, times.step + 1)
        )
        blocked, late = (
            sum(column) / len(reference.pieces)
            for column in zip(*(blocked_and_late(begin, end, own) for own in reference.pieces.values()), strict=True)
        )
        found = times.ns, times.computation_ns, times.waiting_ns, times.exposed_ns
        assert found == pytest.approx((end - begin, end - begin - blocked, late, blocked - late), abs=1e-3)
        assert computation[str(times.step)] == round((end - begin - blocked) * len(reference.pieces))
    for which, place in chosen_steps(paths).items():
        step = int(paths.steps[place])
        begin, end = (max(reference.end(rank, number) for rank in reference.pieces) for number in (step - 1, step))
        path, all_parts = (tables[name] for name in ("critical_path", "step_time_parts"))
        assert path.loc[path["which"] == which, "ns"].sum() == end - begin
        of_step = all_parts.loc[all_parts["which"] == which]
        parts = Counter(of_step.groupby("part")["ns"].sum().to_dict())
        pieces = reference.pieces.values()
        sums = [blocked_and_late(begin, end, own) for own in pieces]
        blocked, late = (sum(column) for column in zip(*sums, strict=True))
        assert parts["waiting"] * len(pieces) == pytest.approx(late, abs=1e-3)
        assert parts["exposed communication"] * len(pieces) == pytest.approx(blocked - late, abs=1e-3)
        assert parts["computation"] + parts["waiting"] + parts["exposed communication"] == pytest.approx(end - begin)


def late_for_a_broadcast(ranks: int) -> RandomLog:
    """Return a log of steps with a broadcast whose root arrives first, and whose last rank is 5 ms late."""
    log = RandomLog([0] * ranks, [10**9], [[*range(ranks)]], set())
    for step in range(6):
        for rank in range(ranks):
            begin = 10**9 + 20_000 * US * step + 10 * US * rank + 5_000 * US * (rank == ranks - 1)
            end = max(begin, 10**9 + 20_000 * US * step + 1_000 * US) + US
            times = {"t_begin": begin, "t_return": end, "t_wait": 0, "t_end": end}
            fields = {"op": "broadcast", "group": 0, "peer": 0, "tag": -1, "seq": step, "step": step, "flags": 0}
            codes = {"phase": int(Phase.FORWARD), "clock": int(Clock.RETURN), "state": int(State.COMPLETE)}
            log.calls[rank].append({**times, **fields, **codes, "payload": 4096, "local": 64})
    return log


def test_nobody_waits_for_a_rank_that_is_late_for_a_broadcast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the root is waited for: in each report, and on the page."""
    folders = {ranks: tmp_path / str(ranks) for ranks in (4, 2)}
    for ranks, folder in folders.items():
        run = run_of(log := late_for_a_broadcast(ranks), folder)
        reference = Reference(log, run)
        assert reference.sums_by("op")["broadcast"][:3] == (6 * ranks, 0, 0)
        assert_waits_agree(run.tables(), reference)
        assert_steps_agree(run, reference)
        assert step_times(run).steps["late_ns"].tolist() == [0] * 4 * ranks
        assert run.table("stragglers")["waiting_ns"].tolist() == [0] * ranks
        assert "waiting" not in {*run.table("step_time_parts")["part"]}
    for options in ([], ["--per-rank"]):
        assert cli.main(["report", str(folders[4]), "--json", *options]) == 0
        tables = json.loads(capsys.readouterr().out)["tables"]
        assert [row["wait_ns"] for row in tables["waits_by_rank"]] == [0] * 4
        assert cli.main(["scaling", *map(str, folders.values()), "--json", *options]) == 0
        tables = json.loads(capsys.readouterr().out)["tables"]
        assert [row["late_ns"] for row in tables["scaling"]] == [0, 0]
        assert [row["late_ns"] for row in tables["scaling_projection"]] == [0] * len(tables["scaling_projection"])
