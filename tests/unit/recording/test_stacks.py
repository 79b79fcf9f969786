"""When stack samples are taken, with a fake clock, and what they contain."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import processes
import pytest

from commtrace.hooks.group_creation import GroupCreations
from commtrace.recording import stacks
from commtrace.recording.stacks import MAX_FRAMES, StackSampler
from commtrace.schema import RECORD, Flag, State
from commtrace.settings import Settings


class Process:
    """A sampler, the clock of its process in seconds, and the samples that it took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
        self.now = 100.0
        self.samples: list[dict[str, Any]] = []
        self.records = np.zeros(4, RECORD)
        monkeypatch.setattr(time, "monotonic_ns", lambda: int(self.now * 1e9))
        slots: Any = SimpleNamespace(ring=SimpleNamespace(records=self.records))
        tables: Any = SimpleNamespace(add=lambda table, **row: self.samples.append({"table": table, **row}))
        self.sampler = StackSampler(Settings("/logs", **settings), slots, tables)
        self.calls = 0

    def run(self, seconds: float, calls: int = 0) -> list[float]:
        """Let time pass, in turns of 0.1 s, with new calls at its begin. Return the times of new samples."""
        self.calls += calls
        begin, count = self.now, len(self.samples)
        for turn in range(round(seconds * 10)):
            self.sampler.turn(self.calls)
            self.now = begin + (turn + 1) / 10
        return [round(row["mono_ns"] / 1e9 - begin, 1) for row in self.samples[count:]]


def test_samples_at_doubling_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    assert process.run(1, calls=3) == []
    # The pause is at least 5 s; each sample follows the first look at processor times by a turn.
    assert process.run(60) == [4.1, 9.3, 19.7, 40.5]
    assert [row["calls"] for row in process.samples] == [3] * 4
    assert [row["window_ns"] for row in process.samples] == pytest.approx([1e8] * 4, abs=2)


def test_a_pause_must_exceed_the_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.run(4, calls=1)
    assert process.run(7.9, calls=1) == []
    assert process.run(20, calls=1) == [15.9]
    assert Process(monkeypatch, stall_factor=1.0).run(6, calls=1) == [5.1]


def test_a_pause_in_which_the_process_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no pause of the program: a sample follows at 5 s, not at twice the 100 s, and not at once."""
    process = Process(monkeypatch)
    process.run(1, calls=1)
    process.now += 100
    process.sampler.turn(process.calls, is_late=True)
    assert process.run(6) == [5.1]
    process.now += 100
    process.sampler.turn(process.calls + 1, is_late=True)
    assert process.run(6, calls=1) == [5.1]


def test_no_samples_without_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Process(monkeypatch, stall_seconds=0.0).run(100, calls=1) == []


def test_the_return_from_a_call_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.records["state"][2] = State.BEGUN
    assert process.run(4, calls=1) == []
    process.records["state"][2] = State.COMPLETE
    assert process.run(4) == []  # 8 s after the call began, 4 s after it returned
    process.records["state"][2] = State.BEGUN
    assert process.run(16, calls=1) == [8.1]  # twice the longest pause of 4 s
    assert process.samples[-1]["in_call"] is True


@pytest.mark.parametrize(("flags", "in_call"), [(0, True), (Flag.ASYNC, False)])
def test_a_synchronous_call_lasts_until_its_end(flags: int, in_call: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.records["state"][2], process.records["flags"][2] = State.RETURNED, flags
    process.run(6, calls=1)
    assert [row["in_call"] for row in process.samples] == [in_call]


def test_the_threads_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, inside = threading.Event(), threading.Event()

    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        else:
            inside.set()
            waits.wait()

    thread = threading.Thread(target=deep, args=(100,), name="deep")
    thread.start()
    inside.wait()
    deadline = time.monotonic() + 30
    try:
        while True:
            rows = {row["name"]: row for row in stacks._threads(stacks._usages())}
            sampled = rows["deep"]
            if sampled["state"] == "S" or time.monotonic() > deadline:  # it has yet to begin to wait
                break
    finally:
        waits.set()
        thread.join()
    assert "MainThread" not in rows  # the sampling thread
    assert not sampled["main"]
    assert len(sampled["frames"]) == MAX_FRAMES
    assert sampled["frames"][0][2].endswith("wait")
    assert sampled["frames"][-1][0] == __file__
    assert sampled["state"] == "S"
    assert sampled["cpu_ns"] >= 0


def test_a_thread_that_writes_to_storage(tmp_path: Path) -> None:
    """It is at a moment in no system call, and computes little: what it has written shows what it does."""
    stop, written = threading.Event(), [0]

    def save() -> None:
        with (tmp_path / "checkpoint").open("wb") as file:
            while not stop.is_set():
                file.write(b"x" * (1 << 16))
                os.fsync(file.fileno())
                written[0] += 1

    thread = threading.Thread(target=save, name="saves")
    thread.start()
    try:
        processes.wait_for(lambda: written[0] > 0)
        before, begun = stacks._usages(), written[0]
        processes.wait_for(lambda: written[0] > begun + 1)  # one of them has begun since
        rows = {row["name"]: row for row in stacks._threads(before)}
    finally:
        stop.set()
        thread.join()
    if not any(usage.storage_bytes for usage in before.values()):
        pytest.skip("files of tests are not on storage, or the kernel does not count")
    assert rows["saves"]["storage_bytes"] >= 1 << 16


def test_processes_that_compute_for_this_one() -> None:
    """Those that run, those that they started, and those that have ended, as compilers do."""
    burn = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    started = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); input()"
    before = stacks._children()
    with subprocess.Popen([sys.executable, "-c", started], stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while stacks._children().since(before)[0] < 300_000_000 and time.monotonic() < deadline:
            time.sleep(0.05)
        while_running, _ = stacks._children().since(before)
        process.communicate(b"\n")
    assert while_running >= 300_000_000
    assert stacks._children().cpu_ns - before.cpu_ns >= 300_000_000, "with what they used before they ended"


def test_processes_that_are_ready_for_a_busy_processor() -> None:
    """Four processes that share one processor compute, though each is on it for a quarter of the time."""
    pinned = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    burn = f"{pinned}\nprint(flush=True)\nwhile True: pass"
    command = [sys.executable, "-c", burn]
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE)) for _ in range(4)]
        try:
            for process in started:
                assert process.stdout is not None
                process.stdout.readline()
            before, begun = stacks._children(), time.monotonic_ns()
            time.sleep(1)
            share = stacks._children().since(before)[0] / (time.monotonic_ns() - begun)
        finally:
            for process in started:
                process.kill()
    assert share > 2, "on one processor, they are on it for all of the time, and ready for it for three times as long"


def test_a_process_that_writes_to_storage(tmp_path: Path) -> None:
    """While it waits for its standard input, it uses none."""
    saves = """
import os, sys
for _ in range(2):
    print(flush=True)
    sys.stdin.readline()
    with open(sys.argv[1], "wb") as file:
        file.write(bytes(1 << 20))
        os.fsync(file.fileno())
"""
    command = [sys.executable, "-c", saves, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        before = stacks._children()
        _, used_before = stacks._children().since(before)
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        written = stacks._children()
        process.communicate("\n")
    if not sum(written.storage_bytes.values()):
        pytest.skip("files of tests are not on storage, or the kernel does not count")
    assert not used_before
    assert written.since(before)[1]


def test_frames_of_wrappers_are_left_out() -> None:
    """The program's line is the one that called the library, though a wrapper of it is in between."""
    waits, inside = threading.Event(), threading.Event()

    def create() -> None:
        inside.set()
        waits.wait()

    thread = threading.Thread(target=GroupCreations().timed(lambda _: None)(create), name="wrapped")
    thread.start()
    inside.wait()
    try:
        sampled = next(row for row in stacks._threads({}) if row["name"] == "wrapped")
    finally:
        waits.set()
        thread.join()
    assert __file__ in [file for file, _, _ in sampled["frames"]]
    assert not [file for file, _, _ in sampled["frames"] if "group_creation" in file]
