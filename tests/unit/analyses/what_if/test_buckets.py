"""Predictions for buckets of another size, held to a simulator of the same program with that size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from factory import ALL_REDUCE, BARRIER
from replayed_programs import GRADIENTS_SITE, Instruction, Operation, Program, run, write
from simulated_steps import PROGRAMS, Simulation

import commtrace
from commtrace.analyses.what_if import bucket_size
from commtrace.analyses.what_if.buckets import new_buckets
from commtrace.analyses.what_if.changed_run import replayed_run
from commtrace.analyses.what_if.changes import changed_run
from commtrace.analyses.what_if.predictions import required_bandwidth, what_if
from commtrace.cli import main
from commtrace.errors import CommtraceError
from commtrace.schema import Phase
from commtrace.theory.rules.gradients import buckets_reaching_limit

US = 1_000
MIB = 1 << 20
LATENCY_US, US_PER_MIB = 40, 100
FORWARD_US, BACKWARD_US, OPTIMIZER_US = 300, 80, 50
"""Computation of a step before backward, in backward for each MiB of gradients, and after it."""
GRADIENTS = [1] * 10
"""MiB of each gradient, in the order in which they become ready."""


def trained(
    folder: Path, limit: float, gradients: list[int] = GRADIENTS, *, rank_us: int = 0, steps: int = 7, factor: int = 1
) -> list[int]:
    """Write a run of data-parallel ranks, of which rank 1 computes longer. Return the duration of steps, ns.

    Args:
        folder: Directory of the log.
        limit: Limit of buckets, MiB.
        gradients: MiB of each gradient.
        rank_us: Additional computation of rank 1 in forward, us.
        steps: Number of steps.
        factor: Ratio by which transfers are longer.
    """
    program = Program(3, [], [[] for _ in range(3)])
    everyone = (0, 1, 2)
    seq = 0

    def operation(kind: int, us: float, payload: int, site: int, *, is_async: bool) -> int:
        nonlocal seq
        times = dict.fromkeys(everyone, round(us * US * factor))
        program.operations.append(Operation(kind, everyone, 0, times, seq, is_async, payload=payload, site=site))
        seq += 1
        return len(program.operations) - 1

    for step in range(steps):

        def add(what: str, ns: int, number: int, phase: Phase, step: int = step) -> None:
            for rank in everyone:
                program.instructions[rank].append(Instruction(what, ns, number, phase, step))

        for rank in everyone:
            own = (FORWARD_US + (rank_us if rank == 1 else 0)) * US
            program.instructions[rank].append(Instruction("compute", own, -1, Phase.BACKWARD, step))
        pending = []
        for bucket in buckets_reaching_limit(gradients, [limit]):  # type: ignore[list-item]
            size = sum(bucket)
            add("compute", size * BACKWARD_US * US, -1, Phase.BACKWARD)
            number = operation(ALL_REDUCE, LATENCY_US + US_PER_MIB * size, size * MIB, GRADIENTS_SITE, is_async=True)
            add("call", 0, number, Phase.BACKWARD)
            pending.append(number)
        for number in pending:
            add("wait", 0, number, Phase.BACKWARD)
        add("compute", OPTIMIZER_US * US, -1, Phase.OPTIMIZER)
        add("call", 0, operation(BARRIER, 5, 0, 2, is_async=False), Phase.OPTIMIZER)
    ran = run(program)
    write(program, ran, folder)
    return ran.step_ns(3, range(2, steps - 1))


@pytest.mark.long
@pytest.mark.parametrize("rank_us", [0, 500])
@pytest.mark.parametrize(("before", "after"), [(3, 9), (3, 100), (3, 1), (4, 2), (4, 1), (4, 100), (6, 1), (2, 2)])
def test_a_prediction_agrees_with_the_simulator(before: int, after: int, rank_us: int, tmp_path: Path) -> None:
    """Gradients of 1 MiB: buckets are merged, and divided, also the first one, where forward precedes backward."""
    gradients = GRADIENTS if before != 2 else [1] * 9  # the last bucket is smaller: two sizes
    trained(tmp_path / "before", before, gradients, rank_us=rank_us)
    expected = trained(tmp_path / "after", after, gradients, rank_us=rank_us)
    replayed = replayed_run(commtrace.open(tmp_path / "before"))
    changed = changed_run(replayed, [f"bucket={after}MB"])
    found = changed.replayed.replay.step_ns(changed.delays[0])[1:]
    assert found == pytest.approx(expected, abs=7 * US)  # two launches, of 3 us each
    back = changed_run(replayed, [f"bucket={before}MB"])
    assert back.replayed is replayed, "nothing changes"


@pytest.mark.long
def test_changes_compose(tmp_path: Path) -> None:
    """In both orders, since times of messages are fitted to the transfers after the changes before."""
    trained(tmp_path / "before", 3)
    expected = trained(tmp_path / "after", 6, factor=2)
    run_before = replayed_run(commtrace.open(tmp_path / "before"))
    for texts in (["bucket=6MiB", "scale-network=0.5x"], ["scale-network=0.5x", "bucket=6m"]):
        changed = changed_run(run_before, texts)
        assert changed.replayed.replay.step_ns(changed.delays[0])[1:] == pytest.approx(expected, abs=15 * US)
    alone = changed_run(run_before, ["bucket=6MB"])
    table = required_bandwidth(alone)
    assert table["wire_bytes"].tolist() == required_bandwidth(changed_run(run_before))["wire_bytes"].tolist()
    free = what_if(changed_run(run_before, ["bucket=6MB", "free=all_reduce"]))["step_ns"].iloc[-1]
    assert free / US == pytest.approx(FORWARD_US + 10 * BACKWARD_US + OPTIMIZER_US + 5, abs=20)
    late = replayed_run(commtrace.open(tmp_path / "before"))
    for text in ("without-straggler=worst", "balance", "no-wait", "compute=0.5x"):
        both = [
            what_if(changed_run(late, texts))["step_ns"].iloc[-1]
            for texts in ((text, "bucket=6MB"), ("bucket=6MB", text))
        ]
        assert both[0] == pytest.approx(both[1], rel=0.02), text


def test_gradients_of_the_model_fill_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 MiB cannot be divided; without the model's sizes, they would be."""
    gradients = [2, 1, 5, 1, 3, 1]
    trained(tmp_path / "before", 3, gradients)
    expected = trained(tmp_path / "after", 1, gradients)
    replayed = replayed_run(commtrace.open(tmp_path / "before"))
    changed = changed_run(replayed, ["bucket=1MB"])
    assert changed.remarks
    monkeypatch.setattr(bucket_size, "_gradients", lambda _run: [size * MIB for size in gradients])
    changed = changed_run(replayed, ["bucket=1MB"])
    assert changed.replayed.replay.step_ns(changed.delays[0])[1:] == pytest.approx(expected, abs=15 * US)


def test_new_buckets() -> None:
    import numpy as np

    def cuts(payload: list[int], limit: int, gradients: list[int]) -> list[tuple[int, float, int]]:
        found = new_buckets(np.array(payload), limit, gradients)
        return [(cut.bucket, cut.part, cut.payload) for cut in found]

    assert cuts([4, 4, 2], 8, []) == [(1, 1, 8), (2, 1, 2)]
    assert cuts([4, 4, 2], 2, []) == [(0, 0.5, 2), (0, 1, 2), (1, 0.5, 2), (1, 1, 2), (2, 1, 2)]
    assert cuts([4, 4, 2], 5, [1, 3, 2, 2, 2]) == [(1, 0.5, 6), (2, 1, 4)]
    assert cuts([4, 4, 2], 8, [5, 5]) == [(1, 1, 8), (2, 1, 2)], "these gradients do not fill the buckets"


def test_one_size_needs_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, network = tmp_path / "log", tmp_path / "network.json"
    trained(log, 2)
    level = {"latency_us": 20, "bandwidth_gb_per_s": 14.0}
    head = {"format": "commtrace-network-description", "version": 1, "ranks_per_node": 1}
    network.write_text(json.dumps({**head, "intra_node": level, "inter_node": level}))
    assert main(["whatif", str(log), "--bucket", "4MB"]) == 2
    assert "the recorded messages have one size (2.00 MiB)" in capsys.readouterr().err
    assert main(["whatif", str(log), "--network", f"{network},{network}", "--bucket", "4MB", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["tables"]["what_if"][1]
    assert row["change"].endswith("bucket=4MB")
    assert row["low_ns"] is None
    assert main(["whatif", str(log), "--all", "--json"]) == 0
    changed = [row["change"] for row in json.loads(capsys.readouterr().out)["tables"]["what_if"]]
    assert not any(text.startswith("bucket") for text in changed)


def test_the_catalogue_has_buckets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, 4)
    assert main(["whatif", str(tmp_path), "--all", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["change"]: row for row in document["tables"]["what_if"]}
    assert {"bucket=2MB", "bucket=8MB"} <= {*rows}
    assert rows["bucket=2MB"]["low_ns"] <= rows["bucket=2MB"]["step_ns"] <= rows["bucket=2MB"]["high_ns"]
    table = commtrace.open(tmp_path).what_if("bucket=8MB")
    assert table["step_ns"].iloc[-1] == pytest.approx(rows["bucket=8MB"]["step_ns"])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["bucket=big"], "'big' is not a size such as 50MB"),
        (["bucket=0"], "'0' is not a size"),
        (["bucket=6MB", "bucket=9MB"], "the sizes of its messages have already been changed"),
    ],
)
def test_errors(texts: list[str], message: str, tmp_path: Path) -> None:
    trained(tmp_path, 3)
    replayed = replayed_run(commtrace.open(tmp_path))
    with pytest.raises(CommtraceError, match=message):
        changed_run(replayed, texts)


@pytest.mark.parametrize(("limit", "message"), [(100, "all gradients are in one bucket"), (2, "have one size")])
def test_runs_that_do_not_show_other_buckets(limit: int, message: str, tmp_path: Path) -> None:
    trained(tmp_path, limit)
    with pytest.raises(CommtraceError, match=message):
        changed_run(replayed_run(commtrace.open(tmp_path)), ["bucket=1MB"])


def test_runs_without_buckets(tmp_path: Path) -> None:
    PROGRAMS["data parallel"](Simulation(2), 6).write(tmp_path)
    with pytest.raises(CommtraceError, match="no gradients that DistributedDataParallel reduced"):
        changed_run(replayed_run(commtrace.open(tmp_path)), ["bucket=1MB"])


def test_what_was_not_validated_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, 1, [1] * 9 + [2])
    assert main(["whatif", str(tmp_path), "--bucket", "100MB", "--json"]) == 0
    sentences = json.loads(capsys.readouterr().out)["sentences"]
    assert any("validated with 2 ranks over gloo only" in text for text in sentences)
    assert any("11.0 MiB are predicted from 1.00 MiB to 2.00 MiB" in text for text in sentences)
    assert any("The sizes of the gradients are not known" in text for text in sentences)
