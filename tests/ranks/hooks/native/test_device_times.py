"""Device times on a simulated device: they are correct, and taking them does not disturb the device."""

from __future__ import annotations

import functools
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import processes
import pytest
import recorders
from hook_programs.runs import FOLDER, extension_folder

from commtrace.schema import Clock, Flag, State

pytestmark = pytest.mark.long

pytest.importorskip("torch")

COMPILER = shutil.which("g++")
MS = 1_000_000
ROUNDING = 10  # ns; elapsed times are milliseconds in single precision
FAR_ROUNDING = 1000  # ns; the same, for up to four seconds between two calls
DRIFT_ONE_IN, RESOLUTION = 10_000, 1_000  # as DeviceClock allows

_folders: list[tempfile.TemporaryDirectory[str]] = []


class Ran:
    """Run of the program: its log and its own account."""

    def __init__(self, *arguments: str, **settings: Any) -> None:
        recorders.needs("native")
        build = extension_folder("simulated_device.cpp")
        _folders.append(tempfile.TemporaryDirectory())
        folder = Path(_folders[-1].name)
        command: list[str | Path] = [sys.executable, FOLDER / "on_device.py", folder, build, *arguments]
        settings = {"COMMTRACE_RECORDER": "native", "COMMTRACE_DRAIN_MS": 20, **settings}
        result = processes.run(command, limit=240, COMMTRACE=folder / "log", **settings)
        assert result.status == 0, result.err[-8000:]
        self.left = processes.read_one(folder / "log")
        self.told: dict[str, Any] = json.loads((folder / "told.json").read_text())

    def calls(self, name: str) -> list[Any]:
        """Return the records of a case in call order."""
        case, records = self.told["cases"][name], self.left.records
        case_records = records[(records["t_begin"] >= case["begin"]) & (records["t_begin"] <= case["end"])]
        return list(case_records[case_records["t_begin"].argsort(kind="stable")])

    def truth(self, name: str, number: int = 0) -> tuple[int, int]:
        """Return when the n-th collective of a case really began and ended, on the host's clock."""
        begin, end = self.told["truth"][self.told["cases"][name]["first"] + number]
        return int(begin), int(end)

    def counts(self, name: str) -> dict[str, int]:
        """Return how often each device operation was called during a case."""
        return dict(self.told["cases"][name]["counts"])


@functools.cache
def ran() -> Ran:
    return Ran(COMMTRACE_DEVICE_TIMES=1)


@functools.cache
def untimed() -> Ran:
    return Ran()


def outcome(call: Any) -> tuple[State, Clock]:
    return State(call["state"]), Clock(call["clock"])


def duration(call: Any) -> int:
    return int(call["t_end"]) - int(call["t_start"])


def test_the_recorder_made_no_mistake() -> None:
    assert ran().left.stats["hook_errors"] == 0, ran().left.stats["first_error"]
    assert ran().left.tables["process"][0]["recorder"] == "native"


@pytest.mark.parametrize(
    ("name", "durations", "clock"),
    [
        ("synchronous", [3, 7], Clock.DEVICE),
        ("waiting_for_the_other_stream", [5, 3], Clock.DEVICE),
        ("on_two_streams", [2, 5], Clock.DEVICE),
        ("waited_for", [8], Clock.DEVICE),
        ("functional", [4], Clock.DEVICE),
        ("given_up", [6, 1], Clock.DEVICE),
        ("batch", [5, 5], Clock.DEVICE),
        ("batch_with_a_work", [6, 6], Clock.DEVICE),
        ("afterwards", [3], Clock.DEVICE),
        ("group_is_gone", [5], Clock.DEVICE),
        # Observed when its stream had passed the wait: the call ended at that moment or before.
        ("hidden", [9], Clock.DEVICE_WAIT),
    ],
)
def test_durations_are_the_devices_own(name: str, durations: list[int], clock: Clock) -> None:
    calls = ran().calls(name)
    assert [outcome(call) for call in calls] == [(State.COMPLETE, clock)] * len(durations)
    for call, expected in zip(calls, durations, strict=True):
        assert abs(duration(call) - expected * MS) <= (FAR_ROUNDING if name.startswith("waiting") else ROUNDING)


@pytest.mark.parametrize(
    "name", ["synchronous", "on_two_streams", "waited_for", "hidden", "functional", "batch", "group_is_gone"]
)
def test_a_start_is_early_by_no_more_than_the_clock_allows(name: str) -> None:
    """The error is at most the shortest delay from host to device on an idle stream, plus drift and resolution."""
    run = ran()
    idle = run.calls("idle")
    delays = [run.truth("idle", number)[0] - int(call["t_begin"]) for number, call in enumerate(idle)]
    for number, call in enumerate(run.calls(name)[:1]):
        start = run.truth(name, number)[0]
        drift = (start - int(idle[0]["t_begin"])) // DRIFT_ONE_IN
        assert int(call["t_begin"]) <= int(call["t_start"])
        assert -ROUNDING <= start - int(call["t_start"]) <= min(delays) + drift + 2 * RESOLUTION


def test_the_error_of_the_clock_is_told() -> None:
    """The error of the device clock is in the counter `device_clock_ns`."""
    assert ran().left.stats["device_clock_ns"] > 0


def test_a_call_begins_when_the_one_before_it_on_the_backend_is_done() -> None:
    calls = ran().calls("one_after_the_other")
    assert [outcome(call) for call in calls] == [(State.COMPLETE, Clock.DEVICE)] * 2
    for call, expected in zip(calls, [8, 3], strict=True):
        assert abs(duration(call) - expected * MS) <= FAR_ROUNDING


def test_a_call_that_nobody_waits_for_has_no_end() -> None:
    for name in ("never_waited_for", "future_only"):
        (call,) = ran().calls(name)
        assert (outcome(call), call["t_start"], call["t_end"]) == ((State.RETURNED, Clock.NONE), 0, 0)


def test_a_future_that_is_complete_at_launch_is_not_even_asked_for() -> None:
    account = ran().told
    assert account["cases"]["future_only"]["tells"] is True
    assert account["counts"]["peeks"] == 1  # the program's own


def test_nothing_is_held_until_the_device_has_come_to_it() -> None:
    assert ran().told["cases"]["given_up"]["tells"] == 0


def test_nothing_is_put_into_a_stream_under_capture() -> None:
    assert ran().told["counts"]["trespasses"] == 0
    assert ran().counts("captured")["records"] == 0
    calls = ran().calls("captured")
    assert len(calls) == 3
    for call in calls:
        assert Flag(int(call["flags"])) & Flag.CAPTURED
        assert (outcome(call), call["t_start"], call["t_end"]) == ((State.UNOBSERVABLE, Clock.NONE), 0, 0)
    (call,) = ran().calls("waited_for_under_capture")
    assert (outcome(call), int(call["flags"])) == ((State.UNOBSERVABLE, Clock.NONE), Flag.ASYNC)


def test_the_device_is_never_waited_for() -> None:
    assert ran().told["counts"]["synchronizations"] == 0


def test_a_wait_that_raises_has_failed_the_call() -> None:
    assert "aborted" in ran().told["cases"]["wait_that_raises"]["tells"]
    assert [outcome(call) for call in ran().calls("wait_that_raises")] == [(State.FAILED, Clock.NONE)]


def test_calls_beyond_the_events_are_counted() -> None:
    calls = ran().calls("too_many")
    states = [State(call["state"]) for call in calls]
    timed = states.count(State.COMPLETE)
    assert states == [State.COMPLETE] * timed + [State.UNOBSERVABLE] * (len(calls) - timed)
    assert 4000 < timed <= 4096
    others = [call for call in ran().left.records if call["state"] == State.UNOBSERVABLE and not call["flags"]]
    assert ran().left.stats["untimed"] == len(others) >= len(calls) - timed


def test_it_is_off_unless_asked_for() -> None:
    counts = untimed().told["counts"]
    assert (counts["records"], counts["queries"], counts["synchronizations"]) == (0, 0, 0)
    for call in untimed().calls("synchronous") + untimed().calls("waited_for") + untimed().calls("batch"):
        assert (outcome(call), call["t_start"]) == ((State.UNOBSERVABLE, Clock.NONE), 0)
    assert untimed().left.stats["untimed"] == untimed().left.stats["device_clock_ns"] == 0


def test_a_device_that_fails_is_left_alone() -> None:
    run = Ran("breaks", COMMTRACE_DEVICE_TIMES=1)
    assert run.left.stats["hook_errors"] == 1
    assert "the device is gone" in run.left.stats["first_error"]
    assert [outcome(call) for call in run.calls("broken")] == [(State.UNOBSERVABLE, Clock.NONE)] * 2
    assert run.told["counts"]["records"] == run.told["cases"]["broken"]["counts"]["records"]


def test_the_arithmetic_of_the_clock(tmp_path: Path) -> None:
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    program = processes.NATIVE_PROGRAMS / "device_clock.cpp"
    build = processes.run([COMPILER, "-std=c++17", "-O1", "-Wall", "-Werror", program, "-o", tmp_path / "clock"])
    assert build.status == 0, build.err
    result = processes.run([tmp_path / "clock"])
    assert result.status == 0, result.out
