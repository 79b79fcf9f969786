"""Buckets of another size that a run predicts, beside those of real runs with that size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest

pytest.importorskip("torch")

import recorders
from processes import PROGRAMS
from ranks import Nursery

from commtrace.analyses.what_if.blocking_buckets import blocking_calls
from commtrace.analyses.what_if.buckets import gradient_buckets
from commtrace.analyses.what_if.changed_run import ReplayedRun, replayed_run
from commtrace.analyses.what_if.changes import changed_run
from commtrace.analyses.what_if.recorded_graph import Part
from commtrace.run import open_run
from commtrace.schema import Purpose

TRAINING: Final = "../../../benchmarks/what_if_training"
WIDTHS: Final = "widths=16,32,16,24,16,8,16"


@pytest.fixture(scope="module")
def native() -> Iterator[Nursery]:
    """A process that forks ranks with the native recorder: the Python one does not observe when DDP's messages end."""
    recorders.needs("native")
    modules = PROGRAMS.parents[2] / "benchmarks"
    with Nursery("native", "torch._dynamo", TORCHINDUCTOR_COMPILE_THREADS=1, PYTHONPATH=modules) as parent:
        yield parent


SIZES_MB: Final = (0.0005, 0.001, 0.002, 1.0)


def trained(nursery: Nursery, log: Path, bucket_mb: float) -> ReplayedRun:
    settings = {"scheme": "ddp", "blocks": 3, "width": 10, "steps": 7, "bucket_mb": bucket_mb}
    statuses, outputs = nursery.run("small_training", log, json.dumps(settings), ranks=2)
    assert statuses == [0, 0], outputs
    return replayed_run(open_run(log))


@pytest.mark.long
def test_messages_are_those_of_a_run_with_that_size(native: Nursery, tmp_path: Path) -> None:
    runs = {size: trained(native, tmp_path / str(size), size) for size in SIZES_MB}
    payloads = {size: [own.payload.tolist() for own in gradient_buckets(run.replay)] for size, run in runs.items()}
    assert len({len(of_run[0]) for of_run in payloads.values()}) == len(SIZES_MB)
    for before in SIZES_MB[:-1]:
        for after in SIZES_MB:
            if before == after:
                continue
            changed = changed_run(runs[before], [f"bucket={after}MB"])
            assert not changed.remarks or "real runs for sizes" in changed.remarks[0], "the model's gradients are known"
            replay = changed.replayed.replay
            edges, _ = replay.transfers(np.flatnonzero((replay.part == Part.TRANSFER) & (replay.message >= 0)))
            first = edges[(replay.process[edges] == 0) & (replay.step[edges] == replay.step[edges].max())]
            order = np.argsort(replay.graph.target[first])
            assert [replay.message[first[order]].tolist()] == payloads[after]
            assert (replay.step_ns(changed.delays) > 0).all()


BLOCKING: Final = {
    "zero2": ("bucket_mb", (0.002, 0.004, 1.0)),  # 1 MiB: all in one message, from which nothing is predicted
    "fsdp2": ("unit_mb", (0.0001, 0.003, 0.005)),  # units of one layer are combined
}
"""Scheme -> option that limits its messages, and MiB."""


@pytest.mark.long
@pytest.mark.parametrize("scheme", [*BLOCKING])
def test_messages_that_block_are_those_of_a_run_with_that_size(native: Nursery, scheme: str, tmp_path: Path) -> None:
    """DeepSpeed's buckets of gradients, and units of FSDP2: parameters in forward and backward, and gradients."""
    option, sizes = BLOCKING[scheme]
    runs = {}
    for size in sizes:
        values = [scheme, f"{option}={size}", WIDTHS, "steps=7", "samples=4"]
        statuses, outputs = native.run(TRAINING, tmp_path / str(size), *values, ranks=2)
        assert statuses == [0, 0], outputs
        runs[size] = replayed_run(open_run(tmp_path / str(size)))
    recorded = {
        size: {(calls.purpose, calls.op): calls.payload for calls in blocking_calls(run.replay)}
        for size, run in runs.items()
    }  # fmt: skip
    counts = {
        len(payload)
        for own in recorded.values()
        for (purpose, _), payload in own.items()
        if purpose is Purpose.GRADIENTS
    }
    assert len(counts) == len(sizes)
    for before in sizes:
        for after in sizes:
            if before == after or before == 1.0 or (scheme == "fsdp2" and before != sizes[0]):
                continue
            changed = changed_run(runs[before], [f"bucket={after}MB"])
            assert not changed.remarks or "real runs for sizes" in changed.remarks[0], changed.remarks
            found = sent(changed.replayed)
            for (purpose, op), payload in recorded[after].items():
                if recorded[before][purpose, op] != payload:
                    assert found[purpose.value, op] == payload, (before, after, purpose)


def sent(run: ReplayedRun) -> dict[tuple[str, str], list[int]]:
    """Return the bytes of the changed messages of a rank in the last step, in their order, by purpose and operation."""
    replay, calls = run.replay, run.replay.paths.calls
    edges, _ = replay.transfers(np.flatnonzero((replay.part == Part.TRANSFER) & (replay.message >= 0)))
    own = edges[(replay.process[edges] == 0) & (replay.step[edges] == replay.step[edges].max())]
    result: dict[tuple[str, str], list[int]] = {}
    for edge in own[np.argsort(replay.graph.times(replay.delays)[replay.graph.target[own]], kind="stable")].tolist():
        call = np.array(replay.call[edge])
        key = str(calls.text("purpose", call)), str(calls.text("op", call))
        result.setdefault(key, []).append(int(replay.message[edge]))
    return result
