"""Figures agree with their tables; tables that only figures use are compared with values computed by hand."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from factory import ALONE, BARRIER, WORLD, LogFactory, record, training
from figure_tables import EVIL, MIB, reconciliation_table, two_roles_table, waterfall_table

go = pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")

from commtrace.analyses import figures  # noqa: E402
from commtrace.analyses.figures import style  # noqa: E402
from commtrace.analyses.side_by_side import compare, short_names  # noqa: E402
from commtrace.analyses.timeline import MAX_CALLS, shown  # noqa: E402
from commtrace.cli import main  # noqa: E402
from commtrace.errors import CommtraceError, NoSuchFigureError  # noqa: E402
from commtrace.operations import OPERATIONS  # noqa: E402
from commtrace.run import Run, open_run  # noqa: E402


def rows(table: pd.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    """Return the rows of a table as tuples."""
    return list(table[[*columns]].itertuples(index=False, name=None))


THEORY = {
    "waterfall": waterfall_table(),
    "waterfall_by_role": two_roles_table(),
    "reconciliation": reconciliation_table(),
}


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a training run of two ranks and six steps."""
    directory = tmp_path_factory.mktemp("six_steps")
    training(directory, steps=6)
    return open_run(directory)


@pytest.fixture(scope="module")
def tables(six_steps: Run) -> dict[str, pd.DataFrame]:
    """Return all tables that figures of one run are drawn from."""
    names = {kind.table for kind in figures.FIGURES.values()} - set(THEORY)
    return {**{name: six_steps.table(name) for name in names}, **THEORY}


@pytest.fixture(scope="module")
def compared(six_steps: Run) -> dict[str, pd.DataFrame]:
    """Return all tables that figures of several runs are drawn from; the only run has a hostile name."""
    return compare({EVIL: six_steps}, {EVIL: {**six_steps.tables(), **THEORY}})


# --- the tables -----------------------------------------------------------------------------------------------------


def test_steps_by_operation(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    for rank in (0, 1):
        process = log.process(rank, pid=rank + 1, world_size=2).known()
        process.write(
            [
                record(step=-1, payload=64),
                record(step=0, payload=100, t_begin=1000, t_return=1300, t_wait=2000, t_end=2500),
                record(step=0, payload=300, t_begin=3000, t_return=3100, t_wait=0, t_end=0, clock=0),
                record(step=1, payload=0, kind=BARRIER, t_begin=0, t_return=0, t_wait=0, t_end=0, clock=0),
            ]
        ).end()
    table = open_run(tmp_path).table("steps_by_operation")
    assert rows(table, "step", "op", "calls_per_rank", "payload_bytes_per_rank") == [
        (-1, "all_reduce", 1, 64),
        (0, "all_reduce", 2, 400),
        (1, "barrier", 1, 0),
    ]
    assert rows(table.iloc[[1]], "in_call_ns_per_rank", "waiting_ns_per_rank", "to_completion_ns_per_rank") == [
        (400, 500, 1500)
    ]
    assert table.iloc[2].filter(like="_ns_").isna().all()


def steps_of(tmp_path: Path, *steps: int, ranks: int = 2, more: int = 1) -> Run:
    """Return a run with `more` calls per rank in each of these steps; each rank begins 500 ns after its predecessor."""
    log = LogFactory(tmp_path)
    for rank in range(ranks):
        rows = [
            record(step=step, t_begin=10_000 * (index + 1) + 10 * call + 500 * rank,
                   t_return=10_000 * (index + 1) + 5_000, t_end=10_000 * (index + 1) + 6_000, payload=call)
            for index, step in enumerate(steps)
            for call in range(more)
        ]  # fmt: skip
        log.process(rank, pid=rank + 1, world_size=ranks).known().write(rows).end()
    return open_run(tmp_path)


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [([0], 0), ([0, 1, 2, 3], 2), ([0, 1, 2, 3, 4], 2), ([*range(30)], 16), ([-1], None), ([5, 6, 7], None)],
)
def test_the_timeline_is_of_a_step_that_is_over(tmp_path: Path, steps: list[int], chosen: int | None) -> None:
    timeline = steps_of(tmp_path, *steps).table("timeline")
    assert set(timeline["step"]) == ({chosen} if chosen is not None else set())


@pytest.mark.parametrize(("group", "begin"), [(WORLD, 0), (ALONE, 1)])
def test_the_timeline_puts_ranks_on_one_clock(tmp_path: Path, group: int, begin: int) -> None:
    """Common calls align the hosts (to the middle of bounds 20 ns apart), and wall clocks if there are none."""
    log = LogFactory(tmp_path)
    for rank, (host, mono) in enumerate([("a", 1_000), ("b", 501_000)]):
        process = log.process(rank, pid=rank + 1, host=host, world_size=2, mono_ns=mono).known()
        times = {"t_begin": mono + 5 + rank, "t_return": mono + 15, "t_end": mono + 25}
        later = {name: time + 100 for name, time in times.items()}
        process.write([record(group=group, step=0, **times), record(group=group, step=-1, seq=1, **later)]).end()
    timeline = open_run(tmp_path).table("timeline")
    assert rows(timeline, "rank", "begin_ns", "in_call_ns", "to_completion_ns") == [(0, 0, 10, 20), (1, begin, 9, 19)]


def test_the_timeline_keeps_a_bounded_number_of_calls_and_says_so(tmp_path: Path) -> None:
    run = steps_of(tmp_path / "much", 0, more=MAX_CALLS + 5)
    assert run.table("timeline")["rank"].value_counts().to_dict() == {0: MAX_CALLS, 1: MAX_CALLS}
    assert run.table("timeline")["more_calls"].all()
    assert list(run.table("timeline")["payload_bytes"].head(3)) == [0, 1, 2]
    assert not steps_of(tmp_path / "just", 0, more=MAX_CALLS).table("timeline")["more_calls"].any()


@pytest.mark.parametrize(("ranks", "title"), [(16, "step 0"), (17, "step 0, ranks 0-15")])
def test_the_timeline_says_which_ranks_it_draws(tmp_path: Path, ranks: int, title: str) -> None:
    figure = steps_of(tmp_path, 0, ranks=ranks).figure("timeline")
    assert figure.layout.title.text == f"Timeline of training {title}"


def test_the_timeline_of_a_large_run_is_of_some_ranks() -> None:
    assert [number for number in range(1024) if shown(number)] == [*range(16), *(1 << power for power in range(4, 10))]


def test_sizes_over_time_cover_the_run_in_equal_spans(tmp_path: Path) -> None:
    begins = [10**9, 2 * 10**9, 3 * 10**9 + 1]
    records = [record(t_begin=begin, payload=payload) for begin, payload in zip(begins, (0, 1024, 2047), strict=True)]
    LogFactory(tmp_path).process(0).known().write(records).end()
    table = open_run(tmp_path).table("sizes_over_time")
    assert rows(table, "from_bytes", "below_bytes", "calls", "sum_bytes") == [
        (0, 1, 1, 0),
        (1024, 2048, 1, 1024),
        (1024, 2048, 1, 2047),
    ]
    widths = table["below_s"] - table["from_s"]
    assert widths.max() == pytest.approx(widths.min())
    assert 2 / 160 <= widths[0] < 2 * 2 / 160 * 1.1
    assert table["from_s"].iloc[0] == 0
    assert np.abs(table["from_s"] - [0, 1, 2]).max() <= widths[0]


# --- the figures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_made_from_its_table_and_leaves_it_as_it_was(name: str, tables: dict[str, pd.DataFrame]) -> None:
    kind = figures.FIGURES[name]
    table = tables[kind.table]
    before = table.copy(deep=True)
    assert kind.has_data(table)
    figure = kind.draw(table)
    assert isinstance(figure, go.Figure)
    assert figure.data
    assert figure.layout.title.text
    assert figure.layout.height > 100
    pd.testing.assert_frame_equal(table, before)
    assert kind.draw is getattr(figures, name)
    json.loads(figure.to_json())


def test_every_figure_is_public_and_explained() -> None:
    for name, kind in {**figures.FIGURES, **figures.COMPARISONS}.items():
        assert name in figures.__all__
        assert kind.look_for.endswith(".")
        assert kind.absent.endswith(".")


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_of_nothing_is_drawn_or_told_from_one_of_something(name: str, tables: dict[str, pd.DataFrame]) -> None:
    kind = figures.FIGURES[name]
    empty = tables[kind.table].head(0)
    assert not kind.has_data(empty)
    assert isinstance(kind.draw(empty), go.Figure)


def test_the_parts_of_a_step_beside_communication_add_up_to_it(tables: dict[str, pd.DataFrame]) -> None:
    table = tables["exposed_communication"]
    figure = figures.exposed_communication(table)
    steps = table[table["step"] != "all"]
    parts = {trace.name: np.array(trace.y, float) for trace in bars(figure)}
    unit = (steps["duration_ns"] / steps["ranks"]).to_numpy() / sum(parts.values())
    assert unit == pytest.approx(unit[0])
    assert parts["exposed communication"] * unit[0] == pytest.approx((steps["exposed_ns"] / steps["ranks"]).to_numpy())


def test_run_figure_draws_from_the_run(tmp_path: Path) -> None:
    training(tmp_path)
    run = open_run(tmp_path)
    assert run.figure("message_sizes").to_json() == figures.message_sizes(run.table("message_size_bins")).to_json()
    with pytest.raises(NoSuchFigureError, match=r"no figure is called 'dance'; choose from volume, .*timeline"):
        run.figure("dance")


def test_run_figure_says_what_is_missing(tmp_path: Path) -> None:
    LogFactory(tmp_path).process(0).known().write([record(step=-1)]).end()
    with pytest.raises(NoSuchFigureError, match="The log has no training step"):
        open_run(tmp_path).figure("timeline")


def bars(figure: Any, **where: Any) -> list[Any]:
    """Return the bars of a figure that have these properties."""
    return [
        trace
        for trace in figure.data
        if trace.type == "bar" and all(trace[key] == value for key, value in where.items())
    ]


def test_the_volume_figure_adds_up_to_the_table(tables: dict[str, pd.DataFrame]) -> None:
    table = tables["volume_by_role_and_operation"]
    figure = figures.volume(table)
    scale = style.bytes_scale([*table["payload_bytes"], *table["wire_bytes"], table["payload_bytes"].sum()])
    assert scale.unit in figure.layout.xaxis2.title.text
    for axis in ("x", "x2"):  # by operation, by dimension
        drawn = sum(sum(bar.x) for bar in bars(figure, xaxis=axis) if bar.name != "wire (min)")
        assert drawn * scale.divisor == pytest.approx(table["payload_bytes"].sum())
    (wire,) = bars(figure, name="wire (min)")
    assert sum(wire.x) * scale.divisor == pytest.approx(table["wire_bytes"].sum())


def test_message_sizes_show_every_call_and_byte_at_its_size(tmp_path: Path) -> None:
    table = pd.DataFrame(
        [("all_reduce", 0, 1, 3, 0), ("all_reduce", 4096, 8192, 7, 7 * 5000), ("all_gather", 4096, 8192, 1, 4096)],
        columns=["op", "from_bytes", "below_bytes", "calls", "sum_bytes"],
    )
    figure = figures.message_sizes(table)
    calls = {
        (bar.name, round(float(x), 2)): y for bar in bars(figure, yaxis="y") for x, y in zip(bar.x, bar.y, strict=True)
    }
    assert calls == {("all_reduce", -0.93): 3, ("all_reduce", 12.07): 7, ("all_gather", 12.5): 1}
    assert figure.layout.yaxis.type == "log"
    total = sum(sum(bar.y) for bar in bars(figure, yaxis="y2"))
    assert total * 1024 == pytest.approx(7 * 5000 + 4096)
    assert "KiB" in figure.layout.yaxis2.title.text


def test_many_steps_are_drawn_as_means(tmp_path: Path) -> None:
    count = 1000
    columns = {f"{name}_per_rank": 0.0 for name in ("calls", "wire_bytes", "in_call_ns", "to_completion_ns")}
    table = pd.DataFrame({"step": [-1, *range(count)], "op": "all_reduce", **columns})
    table["payload_bytes_per_rank"] = [10**9, *(1024.0 * (step % 3) for step in range(count))]
    table["waiting_ns_per_rank"] = np.nan
    figure = figures.steps(table)
    (volume,) = bars(figure)
    assert len(volume.x) == 334  # 3 steps per bar, and one in the last bar
    assert volume.y[:-1] == pytest.approx([1.0] * 333)
    assert volume.y[-1] == 0.0  # step 999 alone
    assert figure.layout.xaxis2.title.text == "training step (means of 3)"
    assert [trace.name for trace in figure.data if trace.type == "scatter"] == [
        "from the call to its end",
        "inside the call",
    ]


def test_the_timeline_draws_every_call(tmp_path: Path) -> None:
    table = steps_of(tmp_path, 0, 1, more=3).table("timeline")
    (calls,) = bars(figures.timeline(table))
    assert len(calls.x) == 6
    assert list(calls.base) == pytest.approx([begin / 1000 for begin in table["begin_ns"]])
    assert list(calls.x) == pytest.approx([length / 1000 for length in table["to_completion_ns"]])
    assert len(set(calls.y)) == 2


def test_a_crowded_timeline_loses_no_call_and_no_byte(tmp_path: Path) -> None:
    table = steps_of(tmp_path, 0, more=3000).table("timeline")
    (calls,) = bars(figures.timeline(table))
    assert len(calls.x) < 3000
    texts = calls.customdata
    counts = [int(text.split(" calls of")[0].replace(",", "")) if " calls of" in text else 1 for text in texts]
    assert sum(counts) == len(table) == 6000


def test_an_end_that_nobody_saw_is_not_drawn_as_one(tmp_path: Path) -> None:
    LogFactory(tmp_path).process(0).known().write([record(step=0, t_begin=10, t_return=30, t_end=0, clock=0)]).end()
    (calls,) = bars(open_run(tmp_path).figure("timeline"))
    assert list(calls.x) == [20]
    assert "20 ns inside the call; the end was not observed" in calls.customdata[0]


def test_a_waterfall_leads_from_the_closed_form_to_the_measured_volume() -> None:
    (bar,) = bars(figures.waterfall(waterfall_table()))
    base, length = np.array(bar.base, float), np.array(bar.x, float)
    assert list(base) == [0, 18, 27, 25, 0]
    assert list(base + length) == [18, 27, 25, 26, 26]
    assert list(bar.text) == ["18.0 MiB", "+9.00 MiB", "-2.00 MiB", "+1.00 MiB", "26.0 MiB"]
    shapes = figures.waterfall(waterfall_table()).layout.shapes
    assert [(shape.x0, shape.x1) for shape in shapes] == [(18, 18), (27, 27), (25, 25), (26, 26)]
    assert bar.marker.color[1] != bar.marker.color[2] != bar.marker.color[3]
    assert bar.marker.pattern.shape == ("", "", "", "/", "")


def test_expected_and_measured_are_of_one_rank_and_step() -> None:
    figure = figures.expected_and_measured(reconciliation_table())
    drawn = {(bar.y[0], bar.offsetgroup): bar.x[0] for bar in bars(figure) if bar.y[0] is not None}
    assert drawn == {
        ("all_reduce", "expected"): 0,
        ("all_reduce", "measured"): 6,
        ("all_gather", "expected"): 6,
        ("all_gather", "measured"): 6,
        ("reduce_scatter", "expected"): 6,
        ("reduce_scatter", "measured"): 0,
    }


# --- looks ----------------------------------------------------------------------------------------------------------


def test_an_operation_looks_the_same_everywhere_and_like_no_other(tables: dict[str, pd.DataFrame]) -> None:
    styles = defaultdict(set)
    for name in ("volume", "message_sizes", "steps", "timeline", "expected_and_measured"):
        kind = figures.FIGURES[name]
        for bar in kind.draw(tables[kind.table]).data:
            if bar.name in OPERATIONS:
                styles[bar.name].add((bar.marker.color, bar.marker.pattern.shape))
    assert {len(of_operation) for of_operation in styles.values()} == {1}
    looks = [style.paint(op) for op in (*OPERATIONS, "other")]
    assert len({(paint["color"], paint["pattern"]["shape"]) for paint in looks}) == len(OPERATIONS) + 1


@pytest.mark.parametrize(
    ("text", "shown_as"),
    [
        ("all_reduce", "all_reduce"),
        ("<b>&lt;", "&lt;b&gt;&amp;lt;"),
        ("a\u202eb\x00c\n", "a\ufffdb\ufffdc\ufffd"),
        ("x" * 90, "…" + "x" * 79),
    ],
)
def test_a_label_means_nothing_to_plotly(text: str, shown_as: str) -> None:
    assert style.label(text) == shown_as


def strings(value: Any) -> list[str]:
    """Return all strings in a JSON document."""
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("name", [*figures.FIGURES, *figures.COMPARISONS])
def test_hostile_names_reach_no_figure(
    name: str, tables: dict[str, pd.DataFrame], compared: dict[str, pd.DataFrame]
) -> None:
    kind = {**figures.FIGURES, **figures.COMPARISONS}[name]
    table = {**tables, **compared}[kind.table].copy()
    for column in {"op", "role", "site", "phase", "label", "run"} & {*table.columns}:
        table[column] = EVIL
    texts = strings(json.loads(kind.draw(table).to_json()))
    assert not [text for text in texts if "<script" in text or "<a " in text or "\u202e" in text]
    # plotly expands %{...} only in templates, and no text of a log is in a template.
    assert not [text for text in texts if "<extra>" in text and "alert" in text]


@pytest.mark.parametrize(
    ("values", "unit", "largest"),
    [
        ([0], "bytes", 0),
        ([1023], "bytes", 1023),
        ([1024], "KiB", 1),
        ([5 << 20, float("nan")], "MiB", 5),
        ([3 << 70], "EiB", 3 << 10),
    ],
)
def test_bytes_have_binary_units(values: list[float], unit: str, largest: float) -> None:
    scale = style.bytes_scale(values)
    assert scale.unit == unit
    assert max(value for value in scale.axis(values) if value is not None) == largest


# --- runs side by side ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Return training runs of two and of four ranks."""
    folder = tmp_path_factory.mktemp("two_runs")
    training(folder / "one", steps=2)
    training(folder / "two", steps=4, ranks=4)
    return {name: open_run(folder / name) for name in ("one", "two")}


def test_runs_are_compared_by_rank_and_step(two_runs: dict[str, Run]) -> None:
    tables = compare(two_runs)
    assert rows(tables["runs"], "run", "ranks_seen", "steps", "calls_per_rank", "payload_bytes_per_rank") == [
        ("one", 2, 2, 2, 6144),
        ("two", 4, 4, 2, 6144),
    ]
    volumes = tables["runs_by_operation"].set_index(["run", "part", "op"])["payload_bytes_per_rank"]
    assert volumes["two", "training step", "all_reduce"] == 4096
    assert volumes["two", "whole run", "all_reduce"] == 4 * 4096
    assert tables["runs_predicted"]["predicted_bytes"].isna().all()


def test_predictions_come_from_the_waterfall(two_runs: dict[str, Run]) -> None:
    tables = {name: dict(run.tables()) for name, run in two_runs.items()}
    tables["two"]["waterfall"] = waterfall_table()
    predicted = compare(two_runs, tables)["runs_predicted"]
    assert predicted["measured_bytes"].tolist()[1] == 26 * MIB
    figure = figures.measured_and_predicted(predicted)
    assert [trace.text[1] for trace in figure.data] == ["18.0 MiB", "26.0 MiB · 1.44 x"]
    assert [trace.text[0] for trace in figure.data] == ["-", "-"]


def test_predictions_by_dimension(two_runs: dict[str, Run]) -> None:
    """The volume of a pipeline is that of all its stages; the volume of another dimension is that of one rank."""
    tables = {name: dict(run.tables()) for name, run in two_runs.items()}
    sends = reconciliation_table().assign(role="pipeline", op="send")
    tables["two"] |= {"waterfall_by_role": two_roles_table(), "reconciliation": sends}
    compared = compare(two_runs, tables)
    by_role = compared["runs_predicted_by_role"]
    assert rows(by_role, "run", "role", "predicted_bytes", "measured_bytes") == [
        ("two", "data", 18 * MIB, 26 * MIB),
        ("two", "pipeline", 18 * MIB, 2 * 12 * MIB),
    ]
    figure = figures.predicted_by_role(by_role)
    assert list(figure.data[0].y) == ["two · data", "two · pipeline"]
    volumes = compared["runs_by_role"].set_index(["run", "role"])["payload_bytes_per_rank"]
    assert volumes["two", "data"] == pytest.approx(24 * 1024)
    assert {trace.name for trace in bars(figures.role_volumes(compared["runs_by_role"]))} == {"data"}


def test_waterfalls_of_dimensions_each_begin_at_their_own_form() -> None:
    (bar,) = bars(figures.waterfall_by_role(two_roles_table()))
    assert list(bar.base[:5]) == list(bar.base[5:])
    assert len(figures.waterfall_by_role(two_roles_table()).layout.shapes) == 8  # none between the two waterfalls


def test_shares_are_of_the_whole_run(two_runs: dict[str, Run]) -> None:
    figure = figures.operation_shares(compare(two_runs)["runs_by_operation"])
    assert {trace.name: list(trace.x) for trace in figure.data} == {
        "all_reduce": pytest.approx([200 / 3] * 2),
        "all_gather": pytest.approx([100 / 3] * 2),
    }


def test_volumes_are_of_the_whole_run_and_of_a_step(two_runs: dict[str, Run]) -> None:
    figure = figures.operation_volumes(compare(two_runs)["runs_by_operation"])
    sums = {axis: np.sum([bar.x for bar in bars(figure, xaxis=axis)], axis=0) for axis in ("x", "x2")}
    assert list(sums["x"]) == [12, 24]
    assert list(sums["x2"]) == [6, 6]
    legend = [trace.name for trace in figure.data if trace.showlegend]
    assert legend == ["all_reduce", "all_gather"]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["logs/a", "logs/b"], ["a", "b"]),
        (["x/run", "y/run"], ["x/run", "y/run"]),
        (["run", "run"], ["run (1)", "run (2)"]),
        (["run"], ["run"]),
        (["x/run", "x/run", "y/run"], ["x/run (1)", "x/run (2)", "y/run"]),
    ],
)
def test_runs_have_names_that_tell_them_apart(paths: list[str], names: list[str]) -> None:
    assert list(short_names([Path(path) for path in paths])) == names


def without(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a library appear not installed, and the modules that need it not yet imported."""
    for name in [*sys.modules]:
        if name.startswith(("commtrace.analyses.figures", "commtrace.analyses.report.html", f"{module}.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize("module", ["plotly", "jinja2"])
def test_without_a_library_the_page_says_how_to_get_it(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training(tmp_path / "log")
    without(module, monkeypatch)
    assert main(["report", str(tmp_path / "log"), "--html", str(tmp_path / "page.html")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert module in err
    assert "pip install 'commtrace[html]'" in err
    assert not (tmp_path / "page.html").exists()


def test_without_plotly_everything_else_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training(tmp_path)
    without("plotly", monkeypatch)
    assert main(["report", str(tmp_path)]) == 0
    with pytest.raises(CommtraceError, match="pip install"):
        open_run(tmp_path).figure("volume")
