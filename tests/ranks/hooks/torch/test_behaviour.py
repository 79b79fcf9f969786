"""Hooks neither break nor change the program."""

from __future__ import annotations

import sys
from pathlib import Path

import processes
import pytest
from hook_programs.runs import FOLDER, launch, logs
from recorders import KEPT, WAITED, end

import commtrace
from commtrace.schema import Clock, State

pytest.importorskip("torch")


def test_a_program_sees_no_difference(recorder: str, tmp_path: Path) -> None:
    """The program asserts that nothing differs; this test checks its logs."""
    result = processes.run([sys.executable, FOLDER / "behaviour.py", tmp_path], limit=100, COMMTRACE_RECORDER=recorder)
    assert result.status == 0, result.err[-6000:]
    assert "commtrace" not in result.err + result.out
    assert "Exception ignored" not in result.err
    for number in range(2):
        (log,) = logs(tmp_path / str(number), recorder)
        payloads = [call.payload for call in log.calls]
        assert 4 * 13 not in payloads  # made after tracing was switched off
        sent_by_threads = [call for call in log.calls if call.payload == 8]
        assert len(sent_by_threads) == 4 * 200
        assert len({call.group["id"] for call in sent_by_threads}) == 4
        assert len({call.thread for call in sent_by_threads}) == 4
        for group in {call.group["id"] for call in sent_by_threads}:
            assert [call.seq for call in sent_by_threads if call.group["id"] == group] == list(range(200))
        (inherited,) = (call for call in log.calls if call.payload == 24)  # waited for by the parent, not by its child
        assert (inherited.state, inherited.clock) == end(WAITED, inherited.variant, recorder)
        (kept,) = (call for call in log.calls if call.payload == 48)
        assert (kept.state, kept.clock) == end(KEPT, kept.variant, recorder)
    (log,) = logs(tmp_path / "end", recorder)
    (kept,) = log.calls
    assert kept.payload == 56
    # The last call before the end may still be in flight when the log ends.
    assert (kept.state, kept.clock) in (end(KEPT, kept.variant, recorder), (State.RETURNED, Clock.NONE))


def test_off_is_off(tmp_path: Path) -> None:
    launch("null_log", tmp_path, log=None)
    assert not list(tmp_path.iterdir())


def test_a_process_that_never_communicates_leaves_nothing(recorder: str, tmp_path: Path) -> None:
    code = "import torch.distributed; torch.nn.Linear(2, 2)(torch.ones(2)).sum().backward()"
    assert processes.python(code, COMMTRACE=tmp_path / "log", COMMTRACE_RECORDER=recorder).status == 0
    assert not (tmp_path / "log").exists()


COMPILED = """
import sys, torch, torch.distributed as dist
from torch._dynamo.utils import counters
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
model = torch.compile(torch.nn.parallel.DistributedDataParallel(layers), backend="aot_eager")
for _ in range(3):
    model(torch.ones(4, 8)).sum().backward()
print(sorted(place for place in counters["graph_break"] if "commtrace" in place))
dist.destroy_process_group()
"""


def test_a_compiled_model_has_all_records(recorder: str, tmp_path: Path) -> None:
    """Where a compiled model communicates between its graphs, torch must not compile hooks: sizes would be symbols."""
    code = f"import sys; sys.argv[1:] = [{str(tmp_path / 'store')!r}]{COMPILED}"
    result = processes.python(code, COMMTRACE=tmp_path / "log", COMMTRACE_RECORDER=recorder)
    assert result.status == 0, result.err[-4000:]
    assert result.out.splitlines()[-1] == "[]"
    (process,) = commtrace.open(tmp_path / "log").processes
    stats = process.tables.stats or {}
    assert (stats["hook_errors"], stats["unrecorded"]) == (0, 0), stats["first_error"]
    variants = [call.variant for (log,) in [logs(tmp_path / "log", recorder)] for call in log.calls]
    assert variants.count("broadcast_") >= 3  # buffers, before each forward pass
