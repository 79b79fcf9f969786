"""Readings of a log that grows, in threads of their own: storage that does not answer must not stop a command."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from commtrace.errors import LogError

from .option_types import positive_number

if TYPE_CHECKING:
    from commtrace.analyses.live.followed_run import FollowedRun, LiveRun

Result = TypeVar("Result")

SLOW_SECONDS: Final = 30.0
"""Time after which a reading is said to take long."""
_GONE_SECONDS: Final = 3600.0
"""Time after which a log that was removed is not expected to come back."""


class LogReading(Generic[Result]):
    """A reading that has begun."""

    def __init__(self, read: Callable[[], Result]) -> None:
        self._read, self._began = read, time.monotonic()
        self._result: Future[Result] = Future()
        # Not of a pool: those are awaited at exit.
        threading.Thread(target=self._run, name="commtrace-reading", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result.set_result(self._read())
        except BaseException as error:
            self._result.set_exception(error)

    def is_done(self, seconds: float = 0.0) -> bool:
        """Return whether it has ended, after at most some seconds."""
        return bool(wait([self._result], seconds).done)

    @property
    def seconds(self) -> float:
        """Time since it began."""
        return time.monotonic() - self._began

    @property
    def slowness(self) -> str:
        """Why it may take long, in words."""
        return f"the log has not been read for {self.seconds:.0f} s: it is large, or its storage does not answer"

    def result(self) -> Result:
        """Return what was read, or raise what the reading has raised. It must have ended."""
        return self._result.result(0)


def pause_after(took_s: float, interval: float) -> float:
    """Return the time until the next reading: at least the interval, and with at most a fifth of a core in use."""
    return max(interval, 4 * took_s)


def pause_of_view(live: LiveRun, interval: float, share: float) -> float:
    """Return the time until the next reading for a person who looks on, and must not disturb the run.

    Args:
        live: The last reading.
        interval: Time between two readings at least, s. If the run is over and not yet read, the next follows at once.
        share: Largest share of a core to use, on average, but for records from before the first reading: a fifth.
    """
    if live.is_over and live.totalled < live.records:
        return 0.0
    pause = pause_after(live.took_s, interval)
    return pause if live.begins else max(pause, live.took_s * (1 / share - 1))


def add_duration(parser: argparse.ArgumentParser) -> None:
    """Add --wait and --linger, for a command that serves beside a job."""
    parser.add_argument("--wait", metavar="SECONDS", type=positive_number, default=0.0,
        help="time for which to wait for a log that does not exist yet (default: 0)")  # fmt: skip
    parser.add_argument("--linger", metavar="SECONDS", type=positive_number, default=0.0,
        help="time for which to go on after the end of the run (default: 0)")  # fmt: skip


def first_reading(followed: FollowedRun, interval: float, wait: float) -> LiveRun:
    """Return the first reading of a log that may not exist yet.

    Args:
        followed: The run.
        interval: Time between two tries, s.
        wait: Time for which to wait for it, s.

    Raises:
        LogError: There is no run.
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            return followed.read()
        except LogError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(interval)


def readings(
    followed: FollowedRun, live: LiveRun, interval: float, linger: float, share: float = 0.2
) -> Iterator[tuple[LiveRun, str]]:
    """Yield the run as of its last reading, and why there is no newer one, or "", until it is over and all is read.

    Args:
        followed: The run.
        live: Its first reading, which is yielded, too.
        interval: Least time between two readings, s.
        linger: Time for which to go on after its end, s, or until another run follows it.
        share: Largest share of a core to use; see `pause_of_view`.

    Raises:
        LogError: The log was gone for an hour.
        OSError: Likewise, it could not be read.
    """
    problem, seen, ended = "", time.monotonic(), 0.0
    while True:
        yield live, problem
        ended = (ended or time.monotonic()) if live.is_over and live.totalled == live.records else 0.0
        if ended and time.monotonic() - ended >= linger:
            break
        time.sleep(pause_of_view(live, interval, share))
        reading = LogReading(followed.read)
        while not reading.is_done(SLOW_SECONDS):
            yield live, reading.slowness
        try:
            live, problem, seen = reading.result(), "", time.monotonic()
        except (LogError, OSError) as error:  # removed, or replaced
            problem = str(error)
            if time.monotonic() - seen > _GONE_SECONDS:
                raise
