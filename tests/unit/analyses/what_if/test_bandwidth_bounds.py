"""`commtrace whatif DRYRUN --required-bandwidth`: bandwidths and latencies of steps computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pytest
from counted_dry_runs import ACTIVATIONS, Call, dry_run
from factory import ALL_GATHER, REDUCE_SCATTER, LogFactory, record
from simulated_steps import PROGRAMS, Simulation

import commtrace
from commtrace.analyses.grouping import Array
from commtrace.analyses.what_if import layouts
from commtrace.analyses.what_if.bandwidth_bounds import largest
from commtrace.analyses.what_if.simulated_step import simulated_step
from commtrace.cli import main
from commtrace.schema import Phase

NORM: Final = Call(2, 0, 0, phase=Phase.OPTIMIZER)
CALLS: Final = [Call(6, 1, ACTIVATIONS, phase=Phase.FORWARD), Call(4, 6), Call(8, 2), NORM]
"""20 ms of computation at 1 TFLOP/s; bytes of all_reduces of two ranks at 1 GB/s: 1, 6 and 2 ms."""


def tables_of(folder: Path, **options: Any) -> tuple[dict[tuple[str, str], pd.Series[Any]], pd.DataFrame]:
    """Return the rows of `bandwidth_bounds` by dimension and purpose, and `exposed_by_bandwidth`."""
    log = dry_run(folder, {0: CALLS, 1: CALLS})
    tables = commtrace.open(log).bandwidth_bounds(**options)
    rows = {(row.role, row.purpose): row for _, row in tables["bandwidth_bounds"].iterrows()}
    return rows, tables["exposed_by_bandwidth"]


def of_one_call(kind: int, backend: str, folder: Path) -> tuple[float, str]:
    """Return the bandwidth for 20 % exposed if two ranks make one call after 20 ms, and the remarks."""
    calls = [Call(20, 4, kind=kind, phase=Phase.FORWARD)]
    run = commtrace.open(dry_run(folder, {0: calls, 1: calls}, backend=backend))
    table = run.bandwidth_bounds(rate=1e12)["bandwidth_bounds"]
    [gb_per_s] = table["worst_20_gb_per_s"]
    return gb_per_s, "\n".join(table.attrs["remarks"])


@pytest.mark.parametrize(
    ("backend", "times"), [("nccl", 1), ("gloo", 2), ("cpu:gloo,cuda:gloo", 2), ("cpu:gloo,cuda:nccl", 1), ("", 1)]
)
def test_what_a_backend_sends(backend: str, times: int, tmp_path: Path) -> None:
    """gloo sends as much for a reduce_scatter as for an all_reduce."""
    gb_per_s, remarks = of_one_call(REDUCE_SCATTER, backend, tmp_path)
    assert gb_per_s == pytest.approx(times * 2 / 5)
    assert ("as an all_reduce" in remarks) == (times == 2)


@pytest.mark.parametrize(("backend", "times"), [("gloo", 1.5), ("nccl", 1)])
def test_an_all_gather_that_a_rank_calls_late(backend: str, times: float, tmp_path: Path) -> None:
    """Two gloo ranks have one connection, in which the late one is ready to receive only behind its own bytes."""
    gb_per_s, remarks = of_one_call(ALL_GATHER, backend, tmp_path)
    assert gb_per_s == pytest.approx(times * 2 / 5)
    assert ("as one is late" in remarks) == (times > 1)


def test_bandwidths_of_a_step(tmp_path: Path) -> None:
    rows, _ = tables_of(tmp_path, rate=1e12)
    assert list(rows) == [
        ("data", "all"),
        ("data", "gradients reduced"),
        ("data", "activations"),
        ("data", "not recorded"),
    ]
    every, gradients, activations = list(rows.values())[:3]
    assert every.calls_per_rank == 4
    assert every.wire_bytes_per_rank == 9e6
    for share in (0.2, 0.1, 0.05):
        percent, exposed_ms = round(100 * share), 20 * share / (1 - share)
        # Nothing is hidden: 9 ms at 1 GB/s.
        assert every[f"worst_{percent}_gb_per_s"] == pytest.approx(9 / exposed_ms)
        assert gradients[f"worst_{percent}_gb_per_s"] == pytest.approx(8 / exposed_ms)
        assert activations[f"worst_{percent}_gb_per_s"] == pytest.approx(1 / exposed_ms)
        # Activations are never hidden.
        assert activations[f"best_{percent}_gb_per_s"] == pytest.approx(1 / exposed_ms)
    # Buckets are ready after 10 and 18 ms, and the norm waits for both after 20. With x ms for a MB, the step exceeds
    # 20 ms by the longer of 2 x - 2 and 8 x - 10.
    for share in (0.2, 0.1):
        exposed_ms = 20 * share / (1 - share)
        x = min((exposed_ms + 2) / 2, (exposed_ms + 10) / 8)
        assert gradients[f"best_{round(100 * share)}_gb_per_s"] == pytest.approx(1 / x)


def test_the_latency_that_hides_communication(tmp_path: Path) -> None:
    rows, _ = tables_of(tmp_path / "fast", rate=1e12)
    # An all_reduce of two ranks is two messages: three of them, and one without bytes.
    of_20 = 20 * 0.2 / 0.8 * 1e6
    assert rows["data", "activations"].worst_20_latency_ns == pytest.approx(of_20 / 2)
    assert rows["data", "gradients reduced"].worst_20_latency_ns == pytest.approx(of_20 / 4)
    slow, _ = tables_of(tmp_path / "slow", rate=1e12, latency_s=1e-3)
    activations = slow["data", "activations"]
    assert activations.worst_20_gb_per_s == pytest.approx(1 / (5 - 2))
    assert activations.worst_20_latency_ns == pytest.approx(of_20 / 2), "at unlimited bandwidth"
    assert pd.isna(activations.worst_5_gb_per_s), "two messages of 1 ms take longer than 1.05 ms"


def test_shares_by_bandwidth(tmp_path: Path) -> None:
    rows, curve = tables_of(tmp_path, rate=1e12)
    assert curve["dimension"].unique().tolist() == ["data"]
    assert (curve["exposed_low"] <= curve["exposed_high"] + 1e-12).all()
    assert curve["exposed_high"].tolist() == pytest.approx([9 / x / (20 + 9 / x) for x in curve["gb_per_s"]])
    every = rows["data", "all"]
    for bound, column in (("best", "exposed_low"), ("worst", "exposed_high")):
        for percent in (20, 10, 5):
            share = np.interp(np.log(every[f"{bound}_{percent}_gb_per_s"]), np.log(curve["gb_per_s"]), curve[column])
            assert share == pytest.approx(percent / 100, abs=0.005)


def test_dimensions_are_each_without_the_others(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    for rank in (0, 1):
        facts: dict[str, Any] = {"world_size": 4, "simulated": True, "simulated_device": "cpu"}
        files = log.process(rank, pid=100 + rank, **facts)
        files.known({1: [0, 1], 2: [rank, rank + 2], 3: [0, 1, 2, 3]}, {1: "tensor", 2: "data"})
        files.add("sites", id=1, file="/x.py", line=1, function="f", purpose={"name": "activations"})
        rows = [
            record(kind=1, payload=payload, local=0, seq=step, step=step, site=1, group=group, t_begin=2 * step + group,
                t_return=0, t_wait=0, t_end=0)
            for step in range(4) for group, payload in ((1, 1_000_000), (2, 3_000_000))
        ]  # fmt: skip
        numbers = [2 * step + group for step in range(4) for group in (1, 2)]
        files.add("flops", calls=numbers, flops=[10**10] * len(rows), forward=[10**10] * len(rows))
        files.write(rows).end()
    table = commtrace.open(tmp_path).bandwidth_bounds(rate=1e12)["bandwidth_bounds"]
    assert table["role"].tolist() == ["all", "data", "tensor"]
    worst = dict(zip(table["role"], table["worst_20_gb_per_s"], strict=True))
    assert worst["all"] == pytest.approx(worst["data"] + worst["tensor"])


def test_speeds(tmp_path: Path) -> None:
    by_rate, _ = tables_of(tmp_path, rate=1e12)
    by_time = commtrace.open(tmp_path).bandwidth_bounds(computation_s=0.04)["bandwidth_bounds"]
    assert by_time["worst_20_gb_per_s"].iloc[0] == pytest.approx(by_rate["data", "all"].worst_20_gb_per_s / 2)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = dry_run(tmp_path / "log", {0: CALLS})
    command = ["whatif", str(log), "--required-bandwidth", "--rate", "1TFLOPS", "--latency", "10us"]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    row = document["tables"]["bandwidth_bounds"][0]
    assert row["worst_20_gb_per_s"] == pytest.approx(9 / (5 - 8 * 0.01))
    for width in (80, 160):
        assert main([*command, "--width", str(width)]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= width
        assert "Ranks that were not simulated" in text
    for more, message in ((["--balance"], "is without changes"), ([str(log)], "is of one run")):
        assert main(["whatif", *more, *command[1:]]) == 2
        assert message in capsys.readouterr().err
    PROGRAMS["data parallel"](Simulation(2), 8).write(tmp_path / "real")
    assert main(["whatif", str(tmp_path / "real"), "--required-bandwidth", "--computation", "1s"]) == 2
    assert "this is no dry run" in capsys.readouterr().err


def test_the_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly.graph_objects", reason="plotly is not installed")
    log = dry_run(tmp_path / "log", {0: CALLS, 1: CALLS})
    page = tmp_path / "page.html"
    assert main(["whatif", str(log), "--required-bandwidth", "--rate", "1TFLOPS", "--html", str(page)]) == 0
    assert 'id="exposed_by_bandwidth"' in page.read_text()
    from commtrace.analyses import figures

    tables = commtrace.open(log).bandwidth_bounds(rate=1e12)
    low, high = figures.exposed_by_bandwidth(tables["exposed_by_bandwidth"]).data
    assert max(high.y) > 50
    assert [*low.y] <= [*high.y]


@pytest.mark.parametrize("seed", range(50))
def test_the_largest_x_of_random_functions(seed: int) -> None:
    random = np.random.default_rng(seed)
    pieces = random.integers(1, 6)
    slopes = np.concatenate([[0.0], random.exponential(10.0 ** random.uniform(-6, 6, pieces))])
    offsets = np.concatenate([[100.0], 100 - random.exponential(1000, pieces)])

    def function(x: Array) -> Array:
        return np.asarray((slopes[:, None] * x + offsets[:, None]).max(axis=0))

    longest = 100 * random.uniform(1.01, 3)
    exact = min((longest - offset) / slope for slope, offset in zip(slopes[1:], offsets[1:], strict=True))
    assert largest(function, longest) == pytest.approx(exact, rel=1e-5)
    assert largest(function, 99.0) is None
    assert largest(lambda x: np.full(len(x), 100.0), longest) == np.inf


def test_the_rate_of_the_run_itself(tmp_path: Path) -> None:
    step = simulated_step(commtrace.open(dry_run(tmp_path, {0: CALLS, 1: CALLS})))
    assert layouts.stated_rate([step], None, 0.02, None).flops_per_s == pytest.approx(1e12)
