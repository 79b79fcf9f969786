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
from ranks import Nursery

from commtrace.analyses.what_if.buckets import gradient_buckets
from commtrace.analyses.what_if.changed_run import ReplayedRun, replayed_run
from commtrace.analyses.what_if.changes import changed_run
from commtrace.analyses.what_if.recorded_graph import Part
from commtrace.run import open_run


@pytest.fixture(scope="module")
def native() -> Iterator[Nursery]:
    """A process that forks ranks with the native recorder: the Python one does not observe when DDP's messages end."""
    recorders.needs("native")
    with Nursery("native", "torch._dynamo", TORCHINDUCTOR_COMPILE_THREADS=1) as parent:
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
