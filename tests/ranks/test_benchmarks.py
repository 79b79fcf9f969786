"""The benchmarks run, their statistics are correct, and the pages show the numbers of the results file."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import shutil
import statistics
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mpi_launch
import numpy as np
import processes
import pytest
import results
import table
from measuring import A_CALL, PIECES, PROCESSOR, Round, Row, compared, in_turn, interval_of, quartiles, rotated
from processes import ROOT

from commtrace.hooks.native import libraries

# ---- statistics ------------------------------------------------------------------------------------------------------


def test_medians_are_of_pairs() -> None:
    # The medians of bare and side are 20 and 25, but the median difference is 3, and the median ratio 1.1.
    rounds = [Round(10, 11, 11), Round(30, 30, 33), Round(20, 18, 25), Round(40, 42, 46), Round(10, 10, 11)]
    row = compared("case", "name", "ms", rounds)
    assert (row.bare, row.side, row.pairs) == (20, 25, 5)
    assert row.difference == 3
    assert row.ratio == pytest.approx(1.1)
    assert (row.control_difference, row.control) == (0, 1)
    assert row.difference_quartiles == (1, 5)
    assert row.ratio_quartiles == pytest.approx((1.1, 1.15))


def test_quartiles_lie_between_values() -> None:
    assert quartiles([4, 1, 3, 2]) == (1.75, 3.25)
    assert quartiles([7, 5]) == (5.5, 6.5)


def test_rounds_take_every_order() -> None:
    orders: list[list[str]] = []

    def measured(what: str) -> int:
        if not orders or len(orders[-1]) == 3:
            orders.append([])
        orders[-1].append(what)
        return len(orders[-1])

    rounds = in_turn(lambda: measured("bare"), lambda: measured("side"), 12)
    assert Counter(map(tuple, orders)) == {
        ("bare", "bare", "side"): 4,
        ("bare", "side", "bare"): 4,
        ("side", "bare", "bare"): 4,
    }
    assert Counter(rounds) == dict.fromkeys(
        [(1, 2, 3), (2, 1, 3), (1, 3, 2), (3, 1, 2), (2, 3, 1), (3, 2, 1)], 2
    )  # the two bare measurements alternate, too


# ---- the tables ------------------------------------------------------------------------------------------------------


def section(*rows: Row) -> dict[str, Any]:
    machine = {"cpu": "a processor", "cores": 2, "python": "3.11", "torch": "2.13", "deepspeed": None}
    return {
        "command": "python benchmarks/it.py",
        "date": "2030-01-02",
        "machine": machine,
        "rows": [{name: value for name, value in vars(row).items() if value is not None} for row in rows],
    }


def test_a_table_has_a_line_per_tool_and_a_column_per_case() -> None:
    rounds = {"slow": [Round(2000, 2000, 2100)] * 2, "fast": [Round(4, 5, 3)] * 2}
    rows = [compared(case, "this", "us", rounds[case]) for case in rounds]
    text = table.rendered({"call_cost": section(*rows, compared("slow", "that", "us", rounds["slow"]))})
    assert "(`python benchmarks/it.py`)" in text
    assert text.splitlines()[3:7] == [
        "|  | slow (us) | fast (us) |",
        "| --- | --- | --- |",
        "| this | 2,000 + 100, 1.050 (1.000) | 4.00 - 1.00, 0.750 (1.250) |",
        "| that | 2,000 + 100, 1.050 (1.000) |  |",
    ]
    assert text.count("2 cores (a processor), python 3.11, torch 2.13, on 2030-01-02.") == 1


def test_the_own_measure_stands_beside_what_is_seen_from_outside() -> None:
    mean = Row("case", "this: mean", "us", 25.0, bare=-26.5, control_difference=-0.5)
    text = table.rendered({"own_cost": section(mean, Row("case", "this: 99th percentile", "us", 123.4))})
    assert "| case: this | -26.5 (- 0.50) | 25.0 | 123 |" in text.splitlines()


def test_the_cost_of_a_step_stands_beside_its_control() -> None:
    pytest.importorskip("torch")
    import step_cost

    turns = [{"bare": [99.0], "again": [99.0 * 1.02**2], "side": [99.0 * 1.02 * more]} for more in (1, 1.02, 1.02**2)]
    case, name = "ordinary DDP, 2 ranks", "commtrace, native, with call sites"
    rows = [step_cost.row_of(where, name, "ms", turns) for where in (case, f"{case}{PROCESSOR}")]
    assert rows[0].ratio == pytest.approx(1.02)
    half = 4.303 / 3**0.5  # in steps of 2 %, of the mean of three logarithms
    assert rows[0].ratio_interval == pytest.approx((1.02 ** (1 - half), 1.02 ** (1 + half)))
    assert rows[0].control == pytest.approx(1.02**2)
    stated = {"calls": 12.0, "as reported": 4.5, "writing": 0.06}
    rows += [Row(case, f"{name}: {what}", "", value) for what, value in stated.items()]
    cells = "+2.00 % (-2.90 to +7.14) | +4.04 % (+4.04 to +4.04)"
    text = table.rendered({"step_cost": section(*rows)})
    assert f"| {case} | 99.0 ms | {cells} | {cells} | 12 | 4.50 us | 0.06 % |" in text.splitlines()
    of_call = f"{case}{A_CALL}"
    rows += [step_cost.row_of(of_call, name, "us", turns), Row(of_call, f"{name}: as reported", "us a call", 1.5)]
    lines = table.rendered({"step_cost": section(*rows)}).splitlines()
    assert f"| {case} | 99.0 ms | {cells} | {cells} | 12 | 4.50 us | 0.06 % |" in lines
    assert f"| {case} | 99.0 | 1.98 (-2.87 to 7.07) | 4.00 | 1.50 | 76 % |" in lines
    of_pieces = f"{case}{PIECES}"
    rows += [step_cost.row_of(of_pieces, name, "ms", turns), Row(of_pieces, f"{name}: the step", "ms", 198.0)]
    rows += [Row(of_pieces, f"{name}: calls", "a step", 132.0)]  # 1.5 us each
    lines = table.rendered({"step_cost": section(*rows)}).splitlines()
    shares = "198 ms | +1.00 % (-1.45 to +3.57) | 10 % |"
    assert f"| {case} | 99.0 ms | +1.98 ms (-2.87 to +7.07) | +4.00 ms | {shares}" in lines
    assert f"| {case} | 99.0 | 1.98 (-2.87 to 7.07) | 4.00 | 1.50 | 76 % |" in lines


def pieces(*us_and_kinds: tuple[int, int]) -> Any:
    """Return the pieces of a step of so many us and such kinds, with marks."""
    return np.array([(1000 * us << 3) | kind for us, kind in us_and_kinds], np.int64)


def test_only_the_pieces_of_a_step_where_a_recorder_runs_count(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import operators
    import step_cost
    from operators import MARKED, Kind

    outside, computation, communication = Kind.OUTSIDE, Kind.COMPUTATION, Kind.COMMUNICATION
    kinds = outside, computation, outside, communication, outside, computation, outside

    def step(hooked: int, call: int) -> Any:
        slow = 1000 * call  # varies, and is not looked at
        return pieces(*zip((7, slow, hooked, call, 5, slow, slow), kinds, strict=True))

    marked = pieces((9, MARKED), *((9, kind) for kind in kinds[1:]))
    also = pieces(*((9, kind) for kind in kinds[:2]), (9, MARKED), *((9, kind) for kind in kinds[3:]))
    other = pieces((9, outside), (9, computation))
    took = {"bare": (20, 50), "again": (21, 51), "side": (24, 58)}
    order = [side for _ in range(4) for side in took]
    turns = [[marked, also], *[[step(*took[side]), step(*took[side])] for side in order]]
    file = tmp_path / "pieces"

    def written(turns: Any) -> operators.Turns:
        file.write_bytes(pickle.dumps([[one.tobytes() for one in turn] for turn in turns]))
        return operators.read(file)

    ranks = [written([*turns[:3], [other, *turns[3]], *turns[4:]]), written(turns)]
    assert [len(turn) for turn in ranks[0]] == [2] * len(turns)
    with pytest.raises(RuntimeError, match="of 6 steps, only 2 have the same operators"):
        written([[other, other], turns[0], [pieces((9, kind)) for kind in kinds[1:3]]])

    times = [step_cost.Turn(wall=0.2, processor=0.4)] * len(order)
    start = step_cost.Start.of(order, times, 2, ranks, stated=(1.0, 4.5, 0.06))
    assert start.wall == {side: pytest.approx([100.0] * 4) for side in took}
    assert start.processor == {side: pytest.approx([200.0] * 4) for side in took}
    of_pieces = {side: 1e-3 * (7 + hooked + call + 5) for side, (hooked, call) in took.items()}
    assert start.pieces == {side: pytest.approx([ms, ms]) for side, ms in of_pieces.items()}
    assert start.call == {side: pytest.approx([call, call]) for side, (_, call) in took.items()}


def test_outliers_hardly_change_a_trimmed_mean() -> None:
    values = [float(value) for value in range(10)]
    ordinary, outlying = interval_of(values), interval_of([*values[:-1], 1e9])
    assert ordinary == outlying
    assert ordinary.mean == 4.5
    # Winsorized: 2, 2, 2, 3 ... 6, 7, 7, 7, with 5 degrees of freedom.
    half = 2.571 * statistics.stdev([2.0, 2, 2, 3, 4, 5, 6, 7, 7, 7]) * 10**0.5 / 6
    assert ordinary.bounds == pytest.approx((4.5 - half, 4.5 + half))


def test_each_order_comes_equally_often() -> None:
    orders = [tuple(rotated(["a", "b", "c"], number)) for number in range(12)]
    assert set(orders[:6]) == set(itertools.permutations("abc"))
    assert orders[:6] == orders[6:]


def test_only_what_is_between_the_markers_is_replaced() -> None:
    text = f"a\n{table.BEGIN}old\n{table.END}b\n"
    assert table.replaced(text, "new\n") == f"a\n{table.BEGIN}new\n{table.END}b\n"
    with pytest.raises(ValueError, match="<!-- benchmarks -->"):
        table.replaced("a\n", "new\n")


def test_the_pages_show_the_results() -> None:
    sections = results.read(results.FILE)
    for page, tables in ((table.README, table.headlines(sections)), (table.PAGE, table.rendered(sections))):
        text = page.read_text()
        assert table.replaced(text, tables) == text
    assert set(sections) == set(table.SECTIONS)


# ---- the benchmarks --------------------------------------------------------------------------------------------------

COMMTRACE = {f"commtrace, python, {prefix} call sites" for prefix in ("with", "without")}
COMPARED = {"bare", "difference", "ratio", "control_difference", "control", "pairs"}
SCALE = {
    "pack", "export", "report", "check, processor", "report of the packed log, memory",
    "tables that are groupings, without start",
}  # fmt: skip
EXPECTED = {
    "call_cost": COMMTRACE | {"CommDebugMode", "torch.profiler"},
    "mpi_cost": COMMTRACE | {f"commtrace, native, {prefix} call sites" for prefix in ("with", "without")},
    "step_cost": {
        f"commtrace, native, with call sites{what}" for what in ("", ": calls", ": as reported", ": writing")
    },
    "step_instructions": {f"commtrace, {recorder}, with call sites" for recorder in ("python", "native")},
    "call_parts": {"call site, phase and step", "the process group", "payload"},
    "own_cost": {f"{name}: {what}" for name in COMMTRACE for what in ("mean", "99th percentile")},
    "log_size": {"commtrace, 100 calls", "commtrace, 1,000 calls", "torch.profiler's trace.json, 100 calls"}
    | {f"tables of a rank, {which} ranks" for which in ("fewest", "most")},
    "startup": {"tracing off", "tracing on"},
    "report": {"commtrace report"},
    "scale": SCALE,
    "large_scale": SCALE,
    "live_view": {"processor, share of a core", "peak memory", "time until the first screen"},
    "across_ranks": {"CPU time", "wall time", "peak memory"},
    "bench_loop": {"commtrace bench", "median error", "90th percentile", "worst error"},
}


SLOW = (
    "step_cost", "step_instructions", "call_cost", "own_cost", "mpi_cost", "bench_loop", "report",
    "log_size", "scale", "large_scale", "live_view",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "benchmark", [pytest.param(name, marks=pytest.mark.exhaustive if name in SLOW else ()) for name in table.SECTIONS]
)
def test_a_benchmark_runs(benchmark: str, tmp_path: Path) -> None:
    if benchmark not in ("startup", "across_ranks"):
        pytest.importorskip("torch")
    if benchmark == "step_instructions" and shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed")
    if benchmark in ("step_cost", "step_instructions") and not libraries.TORCH.available():
        pytest.skip("the native recorder is not built")
    if benchmark in ("mpi_cost", "bench_loop", "live_view"):
        mpi_launch.needs("mpich")
    section = run(benchmark, tmp_path / "results.json")
    rows = results.rows(section)
    names = {row.name for row in rows}
    assert names >= EXPECTED[benchmark]
    if benchmark == "call_cost" and find_spec("deepspeed") is not None:
        assert any(name.startswith("DeepSpeed comms logger") for name in names)
    assert len({(row.case, row.name) for row in rows}) == len(rows)
    for row in rows:
        check(row, is_compared=benchmark in ("call_cost", "mpi_cost", "startup") or row.ratio is not None)
        is_difference = benchmark == "call_parts" and row.name != "all of it"  # of two measurements, of two pairs here
        assert row.side > 0 or is_difference
    assert section["machine"]["cores"] >= 1
    assert table.rendered({benchmark: section}).count(" | ") >= len(names)


def run(benchmark: str, file: Path) -> dict[str, Any]:
    """Run a benchmark with --quick, and return the section that it writes."""
    script = ROOT / "benchmarks" / f"{benchmark}.py"
    result = processes.run([sys.executable, str(script), "--quick", "--results", str(file)], limit=560)
    assert result.status == 0, result.err
    sections = json.loads(file.read_text())
    assert list(sections) == [benchmark]
    section: dict[str, Any] = sections[benchmark]
    return section


def check(row: Row, *, is_compared: bool) -> None:
    """Assert that the numbers of a row are finite and consistent."""
    assert math.isfinite(row.side)
    given = {name for name in COMPARED if getattr(row, name) is not None}
    assert all(math.isfinite(getattr(row, name)) for name in given)
    if is_compared:
        assert given == COMPARED
        assert row.pairs == results.QUICK_PAIRS
        spread = row.ratio_quartiles or row.ratio_interval
        assert spread is not None
        assert spread[0] <= row.ratio <= spread[1]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {"COMMTRACE": "log"}, "COMMTRACE is set"),
        (["--quick"], {}, "give --results"),
        (["--only", "off"], {}, "give --results"),
        (["--pairs", "1"], {}, "2 or more"),
    ],
)
def test_what_would_give_wrong_results_is_refused(
    arguments: list[str], variables: dict[str, Any], message: str, tmp_path: Path
) -> None:
    before = results.FILE.read_bytes()
    script = ROOT / "benchmarks" / "startup.py"
    result = processes.run([sys.executable, str(script), *arguments], cwd=tmp_path, **variables)
    assert result.status == 2
    assert message in result.err
    assert results.FILE.read_bytes() == before
