"""Delays, critical paths and parts of steps, in logs with a known schedule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from factory import LogFactory, record
from simulated_steps import MS, PROGRAMS, Delay, Simulation, none

from commtrace import cli
from commtrace.analyses.across_ranks import step_time_section, stragglers
from commtrace.analyses.fold_engine import NamedTables, fold
from commtrace.run import Run, open_run
from commtrace.schema import Phase

STEPS = 24


def run_of(folder: Path, program: str, ranks: int, seed: int = 0, delay: Delay = none, steps: int = STEPS) -> Run:
    PROGRAMS[program](Simulation(ranks, seed, delay), steps).write(folder)
    return open_run(folder)


def tables_of(run: Run) -> NamedTables:
    return fold(run, [step_time_section.ANALYSIS, step_time_section.BY_RANK_AND_STEP])


def late(rank: int, phase: Phase, ns: int, steps: set[int] | None = None) -> Delay:
    """Return a delay of a rank in a phase, once per step, in these steps or in all."""
    delayed_steps: set[int] = set()

    def delay(at_rank: int, step: int, at_phase: Phase) -> int:
        if (at_rank, at_phase) != (rank, phase) or (steps is not None and step not in steps) or step in delayed_steps:
            return 0
        delayed_steps.add(step)
        return ns

    return delay


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_pieces_of_a_path_add_up_to_the_step_and_so_do_its_parts(tmp_path: Path, program: str, ranks: int) -> None:
    run = run_of(tmp_path, program, ranks, delay=late(1, Phase.BACKWARD, 7 * MS, {5, 6}))
    paths = run.step_paths
    assert paths is not None
    assert paths.steps.tolist() == list(range(1, STEPS - 1))
    for step, ns in enumerate(paths.step_ns().tolist()):
        pieces = paths.path(step)
        assert all(piece.end > piece.begin for piece in pieces)
        assert [piece.begin for piece in pieces[:-1]] == [piece.end for piece in pieces[1:]], "they follow each other"
        assert sum(piece.end - piece.begin for piece in pieces) == ns
    tables = tables_of(run)
    parts = tables["step_time_parts"]
    durations = dict(zip(paths.steps.tolist(), paths.step_ns().tolist(), strict=True))
    for (_, number), rows in parts.loc[parts["part"] != "hidden communication"].groupby(["which", "step"]):
        assert rows["ns"].sum() == pytest.approx(durations[number])
        assert rows["share"].sum() == pytest.approx(1)
    steps = tables["step_times"]
    assert dict(zip(steps["step"], steps["ns"], strict=True)) == durations
    sums = steps[["computation_ns", "waiting_ns", "exposed_ns"]].sum(axis=1)
    assert sums.to_numpy() == pytest.approx(steps["ns"].to_numpy())
    delayed = steps.loc[steps["step"].isin([5, 6])]
    assert {*delayed["slowest_rank"]} == {1}
    assert delayed["delay_ns"].min() >= 5 * MS > steps["delay_ns"].median()
    for (_, number), rows in tables["critical_path"].groupby(["which", "step"]):
        assert rows["ns"].sum() == durations[number]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("seed", range(2))
def test_nobody_is_named_without_a_delay(tmp_path: Path, program: str, ranks: int, seed: int) -> None:
    tables = tables_of(run_of(tmp_path, program, ranks, seed))
    assert len(tables["delays"]) == 0
    assert list(step_time_section.delay_sentences(tables)) == []


@pytest.mark.parametrize(
    ("program", "phase", "named"),
    [
        ("data parallel", Phase.BACKWARD, "backward"),
        ("data parallel", Phase.FORWARD, "begin of step to backward"),
        ("sharded", Phase.FORWARD, "forward"),
        ("sharded", Phase.OPTIMIZER, "optimizer"),
        ("pipeline", Phase.FORWARD, "forward"),
        ("pipeline", Phase.BACKWARD, "backward"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize(
    ("steps", "recurrence"),
    [(None, "every step"), ({7}, "once"), ({3, 9, 15, 21}, "every 6 steps"), ({4, 5, 17}, "irregular")],
)
def test_rank_phase_steps_and_amount_of_a_delay(
    tmp_path: Path, program: str, phase: Phase, named: str, ranks: int, steps: set[int] | None, recurrence: str
) -> None:
    ns, late_rank = 40 * MS, ranks // 2
    tables = tables_of(run_of(tmp_path, program, ranks, delay=late(late_rank, phase, ns, steps)))
    [delay] = tables["delays"].to_dict("records")
    assert (delay["rank"], delay["recurrence"]) == (late_rank, recurrence)
    assert delay["delay_ns"] == pytest.approx(ns, rel=0.05)
    assert delay["on_path_ns"] == pytest.approx(ns, rel=0.15)
    assert named in delay["phase"]
    assert delay["delayed_steps"] == (STEPS - 2 if steps is None else len(steps))
    if steps is not None:
        assert set(map(int, delay["steps"].replace("-", ",").split(","))) >= {min(steps), max(steps)}
    [sentence] = step_time_section.delay_sentences(tables)
    assert sentence.startswith(f"Rank {late_rank} delays the job: ")
    by_rank = tables["stragglers"].set_index("rank")
    assert by_rank["waiting_ns"].max() > 0
    heat = tables["delay_by_rank_and_step"]
    shown = heat.loc[(heat["rank"] == late_rank) & (heat["step"].isin(steps) if steps else True), "delay_ns"]
    assert np.median(shown) == pytest.approx(ns, rel=0.05)


def test_a_delay_that_is_passed_on_is_that_of_the_rank_where_it_began(tmp_path: Path) -> None:
    tables = tables_of(run_of(tmp_path, "pipeline", 4, delay=late(0, Phase.FORWARD, 60 * MS)))
    assert tables["delays"]["rank"].tolist() == [0]
    first, second = tables["stragglers"].to_dict("records")[:2]
    assert second["waiting_ns"] > 30 * MS, "rank 2 waits for rank 1"
    assert second["own_share"] < 0.1
    assert second["passed_on_share"] > 0.9
    assert second["passed_on_from"] == "0"
    assert first["own_share"] > 0.9


def test_a_rank_whose_work_is_hidden_by_a_slower_one_is_not_named(tmp_path: Path) -> None:
    def delay(rank: int, step: int, phase: Phase) -> int:
        return {1: 40 * MS, 2: 4 * MS}.get(rank, 0) if phase is Phase.OPTIMIZER else 0

    tables = tables_of(run_of(tmp_path, "sharded", 4, delay=delay))
    assert tables["delays"]["rank"].tolist() == [1]


def test_a_single_hiccup_of_another_rank_does_not_hide_a_delay_that_comes_back(tmp_path: Path) -> None:
    def delay(rank: int, step: int, phase: Phase) -> int:
        if phase is not Phase.OPTIMIZER:
            return 0
        return 40 * MS if (rank, step % 5) == (1, 0) else 30 * MS if (rank, step) == (0, 7) else 0

    [row] = tables_of(run_of(tmp_path, "sharded", 3, delay=delay))["delays"].to_dict("records")
    assert (row["rank"], row["recurrence"], row["steps"]) == (1, "every 5 steps", "5,10,15,20")


def test_runs_without_measured_steps_have_empty_tables(tmp_path: Path) -> None:
    run = run_of(tmp_path, "sharded", 2, steps=2)
    assert run.step_paths is None
    for name in ("delays", "stragglers", "critical_path", "step_time_parts", "delay_by_rank_and_step"):
        assert len(run.table(name)) == 0


def test_the_section_shows_computation_and_communication(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path, "pipeline", 3, delay=late(1, Phase.BACKWARD, 40 * MS))
    assert cli.main(["report", str(tmp_path), "--sections", "step-time", "--width", "120"]) == 0
    text = capsys.readouterr().out
    path = text.partition("Critical path of the slowest step")[2].partition("Stragglers:")[0]
    assert "computation" in path
    assert "communication" in path
    assert "recv" in path
    assert "Delays: ranks that compute longer than the others" in text


def test_one_rank_delays_nobody(tmp_path: Path) -> None:
    run = run_of(tmp_path, "data parallel", 1, delay=late(0, Phase.BACKWARD, 400 * MS, {5}))
    assert run.step_paths is not None
    assert len(tables_of(run)["delays"]) == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_excess_is_over_the_median_of_the_other_ranks(ranks: int) -> None:
    ns = np.random.default_rng(ranks).integers(0, 6, (ranks, 50)).astype(np.float64)
    excess = stragglers.Computation("", ns, ns).excess
    for rank in range(ranks):
        others = np.delete(ns, rank, axis=0) if ranks > 1 else ns.reshape(-1, 1)
        assert excess[rank].tolist() == (ns[rank] - np.median(others, axis=0)).tolist()


def test_steps_without_a_duration_have_no_paths(tmp_path: Path) -> None:
    """All calls of the log end at the same time, so its times are damaged."""
    for rank in range(2):
        process = LogFactory(tmp_path).process(rank, pid=4711 + rank).known()
        process.write(record(step=step, seq=step, t_begin=1 + step) for step in range(9)).end()
    assert open_run(tmp_path).step_paths is None
    assert cli.main(["report", str(tmp_path), "--json"]) == 0
