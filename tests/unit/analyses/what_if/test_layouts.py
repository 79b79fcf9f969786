"""`commtrace whatif` of dry runs: bounds of steps computed by hand, rates, and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pytest
from counted_dry_runs import ACTIVATIONS, PARAMETERS, STAGES, Call, dry_run
from factory import ALL_GATHER, ALL_REDUCE, RECV, SEND, LogFactory, record
from simulated_steps import PROGRAMS, Simulation

from commtrace.analyses.what_if import layouts
from commtrace.analyses.what_if.changed_run import replayed_run
from commtrace.analyses.what_if.simulated_step import SimulatedStep, simulated_step
from commtrace.cli import main
from commtrace.errors import CommtraceError
from commtrace.run import open_run
from commtrace.schema import Phase

NETWORK: Final = "1GB/s"
"""An all_reduce of two ranks takes 1 ms for each MB, a message too, an all_gather half of it."""
RATE: Final = layouts.Rate(1e12, "as stated")
"""A GFLOP takes 1 ms."""
MS: Final = 1e6


def both(calls: Sequence[Call]) -> dict[int, Sequence[Call]]:
    """Return the calls of two ranks that make the same ones."""
    return {0: calls, 1: calls}


def step_of(folder: Path) -> SimulatedStep:
    """Return the step of a dry run."""
    return simulated_step(open_run(folder))


def predicted(folder: Path, calls: Mapping[int, Sequence[Call]], **options: Any) -> tuple[pd.Series[Any], pd.DataFrame]:
    """Return the row of a layout, and those of its transfers."""
    step = step_of(dry_run(folder, calls, **options))
    tables = layouts.predicted_layouts({"a": step}, layouts.networks_of([NETWORK]), RATE)
    return tables["layouts"].iloc[0], tables["layout_transfers"]


FORWARD: Final = Call(6, 1, ACTIVATIONS, phase=Phase.FORWARD)


def test_gradients_are_hidden_behind_the_rest_of_backward(tmp_path: Path) -> None:
    # Computation 6, 4, 8; transfers 1, 3, 5. The first bucket takes 3 of the 8 ms of computation after it.
    row, transfers = predicted(tmp_path, both([FORWARD, Call(4, 3), Call(8, 5)]))
    assert row.computation_ns == 18 * MS
    assert row.transfer_ns == 9 * MS
    assert row.high_ns == 27 * MS
    assert row.low_ns == (6 + 1 + 4 + 8 + 5) * MS
    assert (row.exposed_low, row.exposed_high) == (pytest.approx(6 / 24), pytest.approx(9 / 27))
    gradients = transfers.set_index("purpose").loc["gradients reduced"]
    assert (gradients.exposed_low_ns, gradients.exposed_high_ns) == (5 * MS, 8 * MS)
    assert gradients.calls_per_rank == 2
    assert gradients.role == "data"


def test_gradients_of_one_group_are_reduced_one_after_the_other(tmp_path: Path) -> None:
    # The first bucket is ready after 10 ms and takes 20 ms; the second waits for it.
    row, _ = predicted(tmp_path, both([FORWARD, Call(4, 20), Call(8, 5)]))
    assert row.low_ns == (6 + 1 + 4 + 20 + 5) * MS
    assert row.high_ns == (18 + 26) * MS


def test_the_rank_waits_for_gradients_before_its_optimizer(tmp_path: Path) -> None:
    norm = Call(7, 2, 0, phase=Phase.OPTIMIZER)
    row, _ = predicted(tmp_path, both([FORWARD, Call(4, 9), norm]))
    # 9 ms of transfer behind 7 ms of computation: 2 are left before the norm.
    assert row.low_ns == (6 + 1 + 4 + 9 + 2) * MS


def test_parameters_are_prefetched(tmp_path: Path) -> None:
    gather = Call(0, 4, PARAMETERS, ALL_GATHER, Phase.FORWARD)
    calls = [gather, Call(5, 8, PARAMETERS, ALL_GATHER, Phase.FORWARD), Call(10, 1)]
    row, _ = predicted(tmp_path, both(calls))
    # All-gathers of 3 and 6 ms (1.5 times their bytes: two gloo ranks, one of which is late) begin with forward, and
    # must have arrived before the first call of backward.
    assert row.low_ns == (5 + 10 + 1) * MS
    assert row.high_ns == (3 + 5 + 6 + 10 + 1) * MS


def test_ranks_wait_for_the_last_one(tmp_path: Path) -> None:
    row, _ = predicted(
        tmp_path, {0: [Call(2, 3, ACTIVATIONS, phase=Phase.FORWARD)], 1: [FORWARD._replace(megabytes=3)]}
    )
    assert row.low_ns == row.high_ns == 9 * MS
    assert row.computation_ns == 6 * MS


def test_a_pipeline_has_its_bubble(tmp_path: Path) -> None:
    """Stage 0 computes 4, 4 in forward and 6, 6 in backward; stage 1 computes 10 for each of the two micro-batches."""
    sent = [Call(4, 1, STAGES, SEND, Phase.FORWARD, 1), Call(4, 1, STAGES, SEND, Phase.FORWARD, 1)]
    returned = [Call(0, 1, STAGES, RECV, Phase.BACKWARD, 1), Call(6, 1, STAGES, RECV, Phase.BACKWARD, 1)]
    received = Call(0, 1, STAGES, RECV, Phase.FORWARD, 0), Call(10, 1, STAGES, SEND, Phase.BACKWARD, 0)
    end = Call(6, 0, 0, phase=Phase.OPTIMIZER)
    calls = {0: [*sent, *returned, end], 1: [*received * 2, end._replace(gflop=0)]}
    row, _ = predicted(tmp_path, calls, role="pipeline")
    # The first activations arrive after 4 + 1; the last backward of stage 0 follows the last gradients.
    assert row.computation_ns == 20 * MS
    assert row.low_ns == pytest.approx((4 + 1 + 10 + 10 + 1 + 6) * MS)
    assert row.high_ns >= row.low_ns


def test_messages_need_both_ends(tmp_path: Path) -> None:
    calls = {0: [Call(4, 1, STAGES, SEND, Phase.FORWARD, 1)]}
    with pytest.raises(CommtraceError, match=r"with rank 1, not simulated.*--ranks 0-1"):
        predicted(tmp_path, calls, role="pipeline")


def test_exchanged_messages_do_not_wait_in_a_circle(tmp_path: Path) -> None:
    """Each rank sends, computes, and then receives: sends that waited for receives would never end."""
    calls = {
        rank: [
            Call(2, 1, STAGES, SEND, Phase.FORWARD, 1 - rank), Call(3, 1, STAGES, RECV, Phase.FORWARD, 1 - rank)
        ]
        for rank in (0, 1)
    }  # fmt: skip
    row, _ = predicted(tmp_path, calls, role="pipeline")
    assert row.low_ns == 5 * MS
    assert row.high_ns == (2 + 1 + 3 + 1) * MS


def test_the_last_step_does_not_count_if_it_differs(tmp_path: Path) -> None:
    both_ranks = both([FORWARD, Call(4, 3)])
    dry_run(tmp_path, both_ranks)
    for tables in tmp_path.rglob("*.npy"):
        rows = np.load(tables)
        last = rows[-1:].copy()
        last["t_begin"], last["seq"] = len(rows) + 1, last["seq"] + 1
        np.save(tables, np.concatenate([rows, last]))
    assert len(step_of(tmp_path).calls) == 4


def test_rates(tmp_path: Path) -> None:
    step = step_of(dry_run(tmp_path, both([FORWARD, Call(4, 3)])))
    assert layouts.rate_of_computation(step, 0.02).flops_per_s == pytest.approx(10e9 / 0.02)


def test_the_rate_of_a_recorded_run(tmp_path: Path) -> None:
    PROGRAMS["data parallel"](Simulation(2), 8).write(tmp_path / "real")
    recorded = replayed_run(open_run(tmp_path / "real"))
    events = open_run(tmp_path / "real").events()
    last = events.loc[(events["rank"] == 0) & (events["step"] == 5)]
    calls = [
        Call(3, 0, kind={"all_reduce": ALL_REDUCE, "all_gather": ALL_GATHER}[str(op)], phase=Phase.FORWARD)
        for op in last["op"]
    ]
    other = step_of(dry_run(tmp_path / "other", both(calls)))
    with pytest.raises(CommtraceError, match="no dry run makes the calls of its steps"):
        layouts.rate_of_run(recorded, [other])
    # The same bytes.
    calls = [call._replace(megabytes=size / 1e6) for call, size in zip(calls, last["payload_bytes"], strict=True)]
    same = step_of(dry_run(tmp_path / "dry", both(calls)))
    rate = layouts.rate_of_run(recorded, [other, same])
    edges = recorded.gaps.edges[recorded.gaps.gap]
    seconds = recorded.replay.delays[edges].clip(min=0).sum() / 2 / len(recorded.replay.paths.steps) / 1e9
    assert rate.flops_per_s == pytest.approx(3e9 * len(calls) / seconds, rel=0.05)


def test_the_command_compares_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = dry_run(tmp_path / "small", both([FORWARD, Call(4, 3)]))
    large = dry_run(tmp_path / "large", both([FORWARD, FORWARD, Call(30, 3)]))
    command = ["whatif", str(small), str(large), "--network", NETWORK]
    assert main([*command, "--rate", "1TFLOPS", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = document["tables"]["layouts"]
    # Twice the batch in less than twice the time would be faster; here it is 3 times.
    assert [(row["run"], row["batch"]) for row in rows] == [("small", 1), ("large", 2)]
    assert rows[0]["high_ns"] == 14 * MS
    assert rows[1]["high_ns"] == 47 * MS
    assert main([*command, "--network", "data:2GB/s", "--computation", "20ms", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["tables"]["layouts"]
    assert rows[0]["computation_ns"] == 20 * MS
    assert rows[0]["high_ns"] == 22 * MS
    assert main([*command, "--rate", "1TFLOPS", "--width", "80"]) == 0
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in (head, *rows[:2])] == ["run", "small", "large"]
    assert max(map(len, (head, *rows[:2]))) <= 80


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = dry_run(tmp_path / "dry", both([FORWARD]))
    for options, message in (
        (["--rate", "1TFLOPS"], "the network is missing"),
        ([str(run)], "add --rate"),
        (["--network", NETWORK, "--rate", "1TFLOPS", "--balance"], "only --network is possible"),
        (["--network", NETWORK, "--network", NETWORK, "--rate", "1TFLOPS"], "another network is given"),
        (["--network", "1GB/h", "--rate", "1TFLOPS"], "no such file"),
        ([], "a dry run has no times"),
    ):
        assert main(["whatif", str(run), *options]) == 2
        assert message in capsys.readouterr().err
    log = LogFactory(tmp_path / "old")
    log.process(0, simulated=True).known().write([record(step=step) for step in range(4)]).end()
    assert main(["whatif", str(tmp_path / "old"), "--network", NETWORK, "--rate", "1TFLOPS"]) == 2
    assert "repeat the dry run" in capsys.readouterr().err
