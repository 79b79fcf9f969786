"""Why live processes take no turns: copies of rings, and threads of this process in their place."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from waiting_threads import waiting_for_a_file

from commtrace.analyses.across_ranks.stuck_calls import MIN_WAIT_NS
from commtrace.reading import live_processes
from commtrace.reading.live_processes import LATE_NS, SILENT_NS, with_silences
from commtrace.recording.ring import TURN_AT, RingContent, Silence
from commtrace.recording.summary_files import Snapshot
from commtrace.schema import RECORD
from commtrace.settings import Settings

NONE = np.zeros(0, RECORD)
TURN_NS = 7
DRAIN_MS = 60_000


def ring(path: Path, turn_ns: int = TURN_NS, silent_ns: int = SILENT_NS) -> RingContent:
    """Write a ring of this process. Return a copy of it from before its turn at `turn_ns`."""
    path.write_bytes(bytes(TURN_AT) + struct.pack("<Q", turn_ns))
    identity = {"pid": os.getpid(), "drain_ms": DRAIN_MS}
    now_ns = TURN_NS + DRAIN_MS * 1_000_000 + silent_ns
    copy = RingContent(path, now_ns, identity, {}, NONE, b"", NONE, 0, Snapshot(0, {}, {}))
    return copy._replace(is_alive=True, turn_ns=TURN_NS, process_state="S")


def silence(copy: RingContent) -> Silence:
    """Return what is found of a ring."""
    return with_silences({Path("tables"): copy})[Path("tables")].silence


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_processes, "CONFIRM_SECONDS", 0.01)


def test_a_process_that_takes_turns(tmp_path: Path) -> None:
    assert silence(ring(tmp_path / "ring", silent_ns=LATE_NS - 1)) == ""
    assert silence(ring(tmp_path / "ring")._replace(is_alive=False)) == ""
    assert silence(ring(tmp_path / "ring")._replace(turn_ns=0)) == "", "of an earlier version, before its first turn"
    assert silence(ring(tmp_path / "ring")._replace(identity={"drain_ms": "damaged"})) == ""


def test_a_turn_that_is_overdue(tmp_path: Path) -> None:
    """For longer than a process on a busy host takes, and not for as long as it takes to say why."""
    for silent_ns in (LATE_NS, SILENT_NS - 1):
        assert silence(ring(tmp_path / "ring", silent_ns=silent_ns)) == "late"
    assert silence(ring(tmp_path / "ring", silent_ns=0)._replace(process_state="T")) == "late"
    wait_ns = LATE_NS + Settings.drain_ms * 1_000_000
    assert wait_ns < MIN_WAIT_NS, "before a call that a stopped process is in may be said to be stuck"


@pytest.mark.parametrize("letter", ["T", "t"])
def test_a_stopped_process(letter: str, tmp_path: Path) -> None:
    """Even if it takes its next turn during the reading: it was stopped when its ring was copied."""
    copy = ring(tmp_path / "ring", turn_ns=TURN_NS + 1)
    assert silence(copy._replace(process_state=letter)) == "stopped"


def test_a_process_that_goes_on(tmp_path: Path) -> None:
    """Until its next turn it looks as if a thread kept the interpreter's lock."""
    assert silence(ring(tmp_path / "ring")) == "lock"
    assert silence(ring(tmp_path / "ring", turn_ns=TURN_NS + 1)) == "resumed"
    copy = ring(tmp_path / "ring")
    copy.path.unlink()  # it has ended
    assert silence(copy) == "resumed"


def test_a_drain_thread_that_waits_for_storage(tmp_path: Path) -> None:
    with waiting_for_a_file() as thread:
        assert silence(ring(tmp_path / "ring")._replace(drain_thread=thread)) == "storage"
