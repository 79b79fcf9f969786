"""Figures and pages of predictions, and their tables, beside steps computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from counted_dry_runs import ACTIVATIONS, Call, dry_run
from factory import ALL_REDUCE
from replayed_programs import GRADIENTS_SITE, US, Instruction, Operation, Program, run, write

import commtrace
from commtrace.cli import main
from commtrace.errors import CommtraceError
from commtrace.schema import Phase

pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")

from commtrace.analyses import figures


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two ranks that compute 100 us and reduce gradients for 50 us, twice in a step, and 20 us more at its end."""
    program = Program(2, [], [[], []])
    for step in range(8):
        for compute, transfer, site, phase in (
            (100, 50, GRADIENTS_SITE, Phase.BACKWARD), (100, 50, GRADIENTS_SITE, Phase.BACKWARD),
            (30, 20, 2, Phase.OPTIMIZER),
        ):  # fmt: skip
            number = len(program.operations)
            times = dict.fromkeys((0, 1), transfer * US)
            program.operations.append(Operation(ALL_REDUCE, (0, 1), 0, times, number, False, site=site))
            for rank in (0, 1):
                program.instructions[rank].append(Instruction("compute", compute * US, -1, phase, step))
                program.instructions[rank].append(Instruction("call", 0, number, phase, step))
    write(program, run(program), tmp_path / "log")
    return tmp_path / "log"


def test_a_step_before_and_after(log: Path) -> None:
    table = commtrace.open(log).step_timelines("overlap")
    before, after = (
        table.loc[(table["state"] == state) & (table["rank"] == 1)] for state in ("as recorded", "changed")
    )
    assert before["step_ns"].unique().tolist() == [350 * US]
    assert after["step_ns"].unique().tolist() == [(100 + 100 + 50 + 30 + 20 - 30) * US]

    def spans(rows: object) -> list[tuple[str, float, float]]:
        own = rows.sort_values("begin_ns")  # type: ignore[attr-defined]
        return [(part, begin / US, ns / US) for part, begin, ns in zip(own["part"], own["begin_ns"], own["ns"])]  # noqa: B905

    assert spans(before) == [
        ("computation", 0, 100), ("all_reduce", 100, 50), ("computation", 150, 100), ("all_reduce", 250, 50),
        ("computation", 300, 30), ("all_reduce", 330, 20),
    ]  # fmt: skip
    found = spans(after)
    assert ("all_reduce", 100, 50) in found, "beside the computation of the second layer"
    assert ("computation", 100, 100) in found
    assert ("all_reduce", 200, 50) in found


def test_figures_show_their_tables(log: Path) -> None:
    opened = commtrace.open(log)
    table = opened.what_if()
    figure = figures.gains(table)
    assert [*figure.data[0].x] == pytest.approx([*(100 * table["gain"].iloc[1:])])
    timelines = figures.step_timelines(opened.step_timelines("compute=0.5x"))
    computed = [trace for trace in timelines.data if trace.name == "computation"]
    assert len(computed) == 2, "a panel before, a panel after"
    assert [sum(trace.x) for trace in computed] == pytest.approx([2 * 230, 2 * 115])
    speeds = opened.exposed_by_speed()
    assert speeds.loc[speeds["is_recorded"], "exposed"].tolist() == pytest.approx([120 / 350])
    curve, now = figures.exposed_by_speed(speeds).data
    assert [*now.y] == pytest.approx([100 * 120 / 350])
    assert min(abs(x - 1) for x in curve.x) < 0.01
    required = opened.required_bandwidth("scale-network=2x")
    assert required["exposed"].tolist() == pytest.approx([60 / 290])


def test_the_page(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = log.parent / "page.html"
    arguments = ["whatif", str(log), "--overlap", "--required-bandwidth", "--html", str(page)]
    assert main(arguments) == 0
    assert "open it in a browser" in capsys.readouterr().out
    text = page.read_text()
    for name in ("gains", "step_timelines", "exposed_by_speed"):
        assert f'id="{name}"' in text
    assert "the shortest step that overlap allows" in text
    assert main(arguments) == 2, "the file exists"
    assert "--force" in capsys.readouterr().err
    assert main([*arguments[:-2], "--json"]) == 0
    assert "step_timelines" not in json.loads(capsys.readouterr().out)["tables"]


def test_layouts_in_python(tmp_path: Path) -> None:
    forward = Call(6, 1, ACTIVATIONS, phase=Phase.FORWARD)
    logs = {name: dry_run(tmp_path / name, {0: calls, 1: calls}) for name, calls in
        (("small", [forward, Call(4, 3)]), ("large", [forward, Call(30, 3)]))}  # fmt: skip
    runs = {name: commtrace.open(path) for name, path in logs.items()}
    tables = commtrace.compare_layouts(runs, "1GB/s", rate=1e12)
    table = tables["layouts"]
    assert table["run"].tolist() == ["small", "large"]
    assert table["high_ns"].tolist() == [14e6, 40e6]
    assert any("small is the fastest" in text for text in table.attrs["remarks"])
    bars, alone = figures.layout_bounds(table).data
    assert [base + x for base, x in zip(bars.base, bars.x, strict=True)] == pytest.approx([14, 40])
    assert [*alone.x] == pytest.approx([10, 36])
    by_time = commtrace.compare_layouts(runs, ["1GB/s", "data:2GB/s"], computation_s=0.02)["layouts"]
    assert by_time["high_ns"].tolist() == pytest.approx([22e6, 74e6])
    with pytest.raises(CommtraceError, match="by one of rate, computation_s and calibrate"):
        commtrace.compare_layouts(runs, "1GB/s")
    with pytest.raises(CommtraceError, match="by one of rate, computation_s and calibrate"):
        commtrace.compare_layouts(runs, "1GB/s", rate=1e12, computation_s=0.1)
    with pytest.raises(CommtraceError, match="it must be above 0"):
        commtrace.compare_layouts(runs, "1GB/s", rate=0.0)
    with pytest.raises(CommtraceError, match="dry runs: none is given"):
        commtrace.compare_layouts({}, "1GB/s", rate=1e12)


def test_a_dry_run_has_its_own_world_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [Call(6, 1, ACTIVATIONS, phase=Phase.FORWARD), Call(4, 3)]
    path = dry_run(tmp_path, {0: calls, 1: calls})
    assert main(["whatif", str(path), "--network", "1GB/s", "--rate", "1TFLOPS", "--world-size", "64"]) == 2
    assert "commtrace dryrun --world-size N" in capsys.readouterr().err
