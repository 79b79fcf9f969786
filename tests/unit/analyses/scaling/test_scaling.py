"""Scaling of runs with synthetic times, for which every number of the comparison is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from factory import WORLD, LogFactory, record
from simulated_ranks import ALL_TO_ALL, random_schedule

from commtrace import cli
from commtrace.analyses.scaling import scaling
from commtrace.analyses.scaling.findings import _perfect_compute_ns, sentences
from commtrace.analyses.scaling.scaling_tables import tokens_per_step
from commtrace.analyses.scaling.step_times import step_times, timed_calls
from commtrace.errors import CommtraceError
from commtrace.run import Run, open_run
from commtrace.schema import Clock
from commtrace.theory.forecast import PlanOptions, plan_job

ALPHA, BETA = 50_000, 0.25  # ns, ns per byte
FIXED, DIVIDED, LATE = 1_000_000, 16_000_000, 300_000
SMALL, LARGE = 1 << 10, 4 << 20
STEPS = 6


def transfer(payload: int, ranks: int) -> int:
    return round(ALPHA + BETA * 2 * payload * (ranks - 1) / ranks) if ranks > 1 else 0


def step_of(ranks: int) -> int:
    """Return the ns of a step; the last rank computes longer by LATE, and the others wait for it."""
    return FIXED + DIVIDED // ranks + (LATE if ranks > 1 else 0) + transfer(SMALL, ranks) + transfer(LARGE, ranks)


def write(folder: Path, ranks: int, *, steps: int = STEPS, **process: Any) -> Path:
    """Write a log; a step is a small all_reduce that all ranks begin together, computation, and a large all_reduce."""
    log = LogFactory(folder)
    for rank in range(ranks):
        rank_process = log.process(rank, pid=100 + rank, world_size=ranks, boot_id="a", **process)
        rank_process.known({WORLD: list(range(ranks))})
        rows = []
        for step in range(steps):
            begin = 1_000_000 + step * step_of(ranks)
            late = LATE if ranks > 1 and rank == ranks - 1 else 0
            second = begin + transfer(SMALL, ranks) + FIXED + DIVIDED // ranks + late
            end = begin + step_of(ranks)
            for number, (payload, at, until) in enumerate(
                ((SMALL, begin, begin + transfer(SMALL, ranks)), (LARGE, second, end))
            ):
                times = {"t_begin": at, "t_return": max(until, at + 1), "t_wait": 0, "t_end": max(until, at + 1)}
                rows.append(record(**times, payload=payload, step=step, seq=2 * step + number, clock=Clock.RETURN))
        rank_process.write(rows).end()
    return folder


def runs(folder: Path, *numbers: int) -> dict[str, Run]:
    return {str(number): open_run(write(folder / str(number), number)) for number in numbers}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return runs(tmp_path_factory.mktemp("scaling"), 8, 1, 2, 4)


def test_times_and_their_parts_are_those_of_the_log(four: dict[str, Run]) -> None:
    table: Any = scaling(four)["scaling"].set_index("ranks")
    assert [*table.index] == [1, 2, 4, 8]
    for ranks, row in table.iterrows():
        n = int(str(ranks))
        assert row["steps"] == STEPS - 2  # without the first (warm-up) and the last (no end)
        assert row["step_ns"] == pytest.approx(step_of(n), abs=2)
        assert row["speedup"] == pytest.approx(step_of(1) / step_of(n), rel=1e-6)
        assert row["efficiency"] == pytest.approx(step_of(1) / step_of(n) / n, rel=1e-6)
        waits = LATE * (n - 1) / n if n > 1 else 0
        assert row["late_ns"] == pytest.approx(waits, abs=2)
        assert row["blocked_ns"] == pytest.approx(transfer(SMALL, n) + transfer(LARGE, n) + waits, abs=4)
        assert row["compute_ns"] == pytest.approx(FIXED + DIVIDED / n + (LATE / n if n > 1 else 0), abs=4)
        assert row["payload_bytes"] == SMALL + LARGE
        assert row["wire_bytes"] == pytest.approx(2 * (SMALL + LARGE) * (n - 1) / n)
    by_rank: Any = scaling(four)["scaling_ranks"].set_index(["run", "rank"])
    assert by_rank.loc[("4", 3), "late_ns"] == 0  # the rank that the others wait for
    assert by_rank.loc[("4", 0), "late_ns"] == LATE


def test_fits_find_what_the_times_were_made_of(four: dict[str, Run]) -> None:
    fits: Any = scaling(four)["scaling_fits"].set_index(["model", "parameter"])
    assert fits.loc[("latency and bandwidth", "latency"), "value"] == pytest.approx(ALPHA, rel=1e-3)
    assert fits.loc[("latency and bandwidth", "bandwidth"), "value"] == pytest.approx(1 / BETA, rel=1e-3)
    assert fits.loc[("latency and bandwidth", "latency"), "error"] < 1e-3
    assert fits.loc[("growth", "wire_bytes"), "unit"] == "(n-1)/n"
    assert fits.loc[("growth", "wire_bytes"), "error"] < 1e-6
    assert fits.loc[("growth", "calls"), "unit"] == "stays"
    assert 0 < fits.loc[("Amdahl", "fixed"), "error"] < 0.2  # waiting and bytes do not follow Amdahl's law


def test_the_projection_is_near_what_more_ranks_take(tmp_path: Path, four: dict[str, Run]) -> None:
    projection: Any = scaling(four)["scaling_projection"].set_index("ranks")
    assert [*projection.index] == [1, 2, 4, 8, 16, 32, 64]
    assert projection["measured_ns"].notna().tolist() == [True] * 4 + [False] * 3
    for n in (8, 16, 64):
        assert projection.loc[n, "step_ns"] == pytest.approx(step_of(n), rel=0.05)


def test_amdahl_is_exact_where_it_holds(tmp_path: Path) -> None:
    import numpy as np

    from commtrace.analyses.scaling.fits import fit_amdahl

    fit = fit_amdahl(np.array([1.0, 2, 4]), np.array([10.0, 6, 4]))
    assert [fit.fixed, fit.divided] == pytest.approx([2, 8])
    assert fit.error == pytest.approx(0, abs=1e-12)
    assert fit_amdahl(np.array([1.0, 2]), np.array([10.0, 6])).error is None
    assert (
        fit_amdahl(np.array([1.0, 2, 4]), np.array([10.0, 5, 2.4])).fixed == 0
    )  # faster than divided work alone: no fixed part


def test_tokens_decide_between_strong_and_weak(four: dict[str, Run]) -> None:
    weak: Any = scaling(four, tokens=[8_000, 1_000, 2_000, 4_000])["scaling"].set_index("ranks")  # in the order given
    assert weak.loc[4, "speedup"] == pytest.approx(4 * step_of(1) / step_of(4), rel=1e-6)
    assert weak.loc[4, "tokens_per_s"] == pytest.approx(4_000 / step_of(4) * 1e9, rel=1e-6)
    with pytest.raises(CommtraceError, match="2 numbers for 4 runs"):
        scaling(four, tokens=[1, 2])


def test_sentences_say_where_the_time_went(four: dict[str, Run]) -> None:
    text = " ".join(sentences(scaling(four)))
    assert "Steps of all runs count as the same work" in text
    assert "8 (8 ranks): " in text
    assert "computation that does not shrink with the ranks" in text
    assert "waiting for ranks that are late" in text
    assert "With 16 ranks (not run)" in text


@pytest.mark.parametrize(("speedup", "step_ns", "fair"), [(15.0, 1600 / 15, 10.0), (10.0, 80.0, 5.0)])
def test_more_computation_for_more_work_is_no_loss(speedup: float, step_ns: float, fair: float) -> None:
    """On twice the ranks, ideal computation takes as long for twice the work, and half as long for the same work."""
    tables = {"scaling": pd.DataFrame({"compute_ns": [40.0, 10.0]})}
    last = {"ranks": 8, "speedup": 8.0, "step_ns": 100.0}
    further = {"ranks": 16, "speedup": speedup, "step_ns": step_ns}
    assert _perfect_compute_ns(tables, last, further) == pytest.approx(fair)


def test_what_two_runs_cannot_tell_is_said(tmp_path: Path, four: dict[str, Run]) -> None:
    caveat = "assumes a rank's calls and bytes"
    assert caveat in " ".join(sentences(scaling(runs(tmp_path, 1, 2))))
    assert caveat not in " ".join(sentences(scaling(four)))


@pytest.mark.parametrize(("shared", "tokens"), [({}, 32_000), ({"context_parallel_size": 2}, 16_000)])
def test_ranks_that_share_a_sequence_do_not_count_it_twice(tmp_path: Path, shared: dict[str, int], tokens: int) -> None:
    """For DDP, ranks that share a sequence are data-parallel ranks."""
    model = {"train_micro_batch_size_per_gpu": 4, "seq_length": 1_000, "gradient_accumulation_steps": 2, **shared}
    log = LogFactory(tmp_path)
    process = log.process(0, pid=100, world_size=4)
    process.known({WORLD: [0]}).add("job", id=1, source="ddp", data_parallel_size=4, model=model)
    process.write([record()]).end()
    assert tokens_per_step(open_run(tmp_path)) == tokens


def test_what_is_expected_is_theorys_whatever_the_program_adds(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    runs_by_ranks = {}
    for ranks in (2, 4):
        log = LogFactory(tmp_path / str(ranks))
        job = plan_job(["tiny"], ranks, PlanOptions(engine="ddp", precision="fp32")).row
        for rank in range(ranks):
            process = log.process(rank, pid=100 + rank, world_size=ranks, boot_id="a").known({WORLD: [*range(ranks)]})
            process.add("job", id=1, **job.to_json())
            begins = [10_000 * (step + 1) for step in range(4)]
            times = [
                {"t_begin": begin, "t_return": begin + 1_000, "t_wait": 0, "t_end": begin + 1_000} for begin in begins
            ]
            process.write([record(**fields, step=step, seq=step) for step, fields in enumerate(times)]).end()
        runs_by_ranks[str(ranks)] = open_run(tmp_path / str(ranks))
    table: Any = scaling(runs_by_ranks)["scaling"].set_index("ranks")
    job = plan_job(["tiny"], 4, PlanOptions(engine="ddp", precision="fp32")).row
    gradients = sum(4 * parameter.elements for parameter in job.parameters)
    assert table.loc[4, "closed_form_bytes"] == table.loc[4, "expected_wire_bytes"] == 2 * gradients * 3 / 4
    assert table.loc[4, "wire_bytes"] == 2 * 1024 * 3 / 4


def test_one_sided_calls_wait_for_nobody(tmp_path: Path) -> None:
    """Puts of two ranks, one of them late, have equal sequence numbers, but are not one operation."""
    log = LogFactory(tmp_path)
    for rank in (0, 1):
        process = log.process(rank, pid=100 + rank, world_size=2, boot_id="a")
        process.known({WORLD: [0, 1]})
        process.add("kinds", id=9, op="put", variant="Put", api="mpi", dtype="float32", reduce_op=None)
        begins = [1_000_000 * (step + 1) + 500_000 * rank for step in range(3)]
        rows = [
            record(t_begin=begin, t_return=begin + 900_000, t_wait=0, t_end=begin + 900_000, step=step, kind=9,
                   peer=1 - rank, seq=step, clock=Clock.RETURN)
            for step, begin in enumerate(begins)
        ]  # fmt: skip
        process.write(rows).end()
    times = step_times(open_run(tmp_path))
    assert times.steps["blocked_ns"].gt(0).all()
    assert times.steps["late_ns"].eq(0).all()
    assert times.messages.empty


def test_ranks_that_take_turns_are_warned_of(tmp_path: Path) -> None:
    both = {
        "one": open_run(write(tmp_path / "one", 1, cores="0-1")),
        "four": open_run(write(tmp_path / "four", 4, cores="0-1")),
    }
    table = scaling(both)["scaling"]
    assert table["shared_cores"].tolist() == ["", "4 ranks on 2 cores"]
    assert any("take turns" in sentence for sentence in sentences(scaling(both)))


def test_a_run_without_whole_steps_is_left_out_and_said(tmp_path: Path) -> None:
    all_runs = runs(tmp_path, 2, 4) | {"short": open_run(write(tmp_path / "short", 1, steps=1))}
    tables = scaling(all_runs)
    assert tables["scaling"]["run"].tolist() == ["2", "4"]
    assert tables["scaling_left_out"]["run"].tolist() == ["short"]
    assert "no training step completed on every rank" in sentences(tables)[0]


@pytest.mark.parametrize(
    ("numbers", "process", "reason"),
    [((2, 2), {}, "different numbers of ranks"), ((1, 2), {"simulated": True}, "a dry run has no times")],
)
def test_what_cannot_be_compared_is_an_error(
    tmp_path: Path, numbers: tuple[int, int], process: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [write(tmp_path / f"run{index}", ranks, **process) for index, ranks in enumerate(numbers)]
    assert cli.main(["scaling", *map(str, folders)]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 160])
def test_the_command_fits_the_terminal(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    folders = [str(write(tmp_path / str(ranks), ranks)) for ranks in (1, 2, 4)]
    assert cli.main(["scaling", *folders]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert any("not run" in line for line in lines)
    assert cli.main(["scaling", "--json", *folders]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["ranks"] for row in document["tables"]["scaling"]] == [1, 2, 4]


def test_the_page_has_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("jinja2")
    folders = [str(write(tmp_path / str(ranks), ranks)) for ranks in (1, 2)]
    page = tmp_path / "page.html"
    assert cli.main(["scaling", *folders, "--html", str(page)]) == 0
    text = page.read_text()
    assert "Where the time of a step goes" in text
    assert "ideal scaling" in text


def test_late_ranks_are_known_between_hosts_whose_clocks_differ(tmp_path: Path) -> None:
    schedule = random_schedule(np.random.default_rng(1), hosts=2, ranks=2, operations=300)
    schedule.write(tmp_path)
    run = open_run(tmp_path)
    calls = timed_calls(run)
    calls = calls.loc[calls["op"].isin(ALL_TO_ALL) & (calls["t_end"] > 0)].sort_values(["rank", "t_begin"])
    expected = [
        last - begin
        for rank in (0, 1)
        for owner, op, _, _, _, _, begin, _, clock, last in schedule.calls
        if owner == rank and op in ALL_TO_ALL and clock != Clock.NONE
    ]
    late = (calls["release"] - calls["t_begin"]).to_numpy()
    assert (calls["release"] > 0).all()
    assert (np.abs(late - np.array(expected)) <= 2 * run.clocks.half_width_ns + 1e-3 * np.abs(late)).all()
    assert (late > 0).mean() > 0.4
