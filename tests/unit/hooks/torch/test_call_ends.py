"""The cost of an asynchronous call counts once, however its end is seen."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest

pytest.importorskip("torch")

from commtrace.hooks.torch.call_ends import PendingWork, Works
from commtrace.recording.recorder import now


class _Work:
    """A Work, as far as it is referred to."""


def test_a_sampled_cost_counts_with_every_end(tmp_path: Path) -> None:
    recorder = processes.Recorder(
        processes.Settings(str(tmp_path)), processes.RankIdentity(0, 1), blind_spots=[], calibrate=lambda: 0
    )
    works, held = Works(recorder), [_Work() for _ in range(4)]

    def pending(work: _Work) -> PendingWork:
        added = works.add(work, [], on_host=True)
        added.cost, added.first = 1_000_000_000, True
        return added

    died, waited, polled, failed = (pending(work) for work in held)  # the last Work of a thread is kept alive
    works.waited(waited, now(), now())
    works.polled(polled, now())
    works.failed(failed)
    for again in (waited, polled, failed):
        works.polled(again, now())
    assert recorder.counters.cost_sums(0)["cost_samples"] == 3
    held.clear()
    assert died() is None
    sums = recorder.counters.cost_sums(0)
    recorder.close("stop")
    assert (sums["cost_samples"], sums["first_calls"]) == (4, 4)
    assert 4_000_000_000 <= sums["cost_ns"] < 5_000_000_000
