"""The pages of `commtrace top --web`: the report of the moment, and the state of the run as JSON.

    /              the page of `commtrace report --html`, of the log as read so far; /?refresh=60 reloads itself
    /state.json    what `commtrace top --json` prints

A page is made when it is asked for, and at most as often as costs a fifth of a core: nobody pays for pages that nobody
looks at. If the log cannot be read, or takes long, the last page is shown, and says so.
"""

from __future__ import annotations

import gzip
import html
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

from commtrace.errors import CommtraceError
from commtrace.formatting import format_moment

from .http_server import answer
from .log_reading import LogReading, pause_after

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

    from commtrace.analyses.live.followed_run import LiveRun

_FIRST_SECONDS: Final = 20.0
"""Time for which a request waits for the first page."""
_NEXT_SECONDS: Final = 10.0
"""Time for which a request waits for a page that is newer than the last one."""
_RETRY_SECONDS: Final = 5
_LEAST_REFRESH: Final = 5
_COMPRESSION: Final = 1
"""Level of gzip: a third of the size in a tenth of a second."""


@dataclass(frozen=True)
class _Page:
    """A page, before and after the line on its state.

    Attributes:
        read_ns: Wall-clock time at which the log was read, ns since 1970.
        took_s: Processor time that the page took, s.
    """

    before: str
    after: str
    read_ns: int
    took_s: float


class ReportPage:
    """The page of a log that grows.

    Args:
        make: Returns the page, given its line on its state.
        interval: Least time between two pages, s.
    """

    def __init__(self, make: Callable[[str], str], interval: float) -> None:
        self._make, self._interval = make, interval
        self._lock = threading.Lock()
        self._page: _Page | None = None
        self._reading: LogReading[_Page] | None = None
        self._problem, self._next = "", 0.0

    def text(self) -> str | None:
        """Return the page of the moment, or, after some seconds, the last one; None if there is none."""
        with self._lock:
            if self._reading is None and time.monotonic() >= self._next:
                self._reading = LogReading(self._read)
            reading = self._reading
        if reading is not None and reading.is_done(_NEXT_SECONDS if self._page else _FIRST_SECONDS):
            self._take(reading)
        page = self._page
        return None if page is None else f"{page.before}{html.escape(self._state(page))}{page.after}"

    @property
    def problem(self) -> str:
        """Why there is no newer page; "" if there is no reason but the time that it takes."""
        return self._problem

    def _read(self) -> _Page:
        place, now, began = secrets.token_hex(), time.time_ns(), time.thread_time()
        before, after = self._make(place).split(place)
        return _Page(before, after, now, time.thread_time() - began)

    def _take(self, reading: LogReading[_Page]) -> None:
        """Keep the page of a reading that has ended, or note why there is none."""
        with self._lock:
            if self._reading is not reading:  # of another request
                return
            self._reading, took_s = None, 0.0
            try:
                self._page, self._problem = reading.result(), ""
                took_s = self._page.took_s
            except (CommtraceError, OSError) as error:
                self._problem = str(error)
            except Exception as error:  # whatever a log may be while it is written or removed
                self._problem = repr(error)
            self._next = time.monotonic() + pause_after(took_s, self._interval)

    def _state(self, page: _Page) -> str:
        """Return of when a page is, and why it is no newer."""
        moment = f"As of {format_moment(page.read_ns)} UTC"
        age = f"{(time.time_ns() - page.read_ns) / 1e9:.0f} s ago"
        if self._problem:
            return f"{moment}, {age}. There is no newer page: {self._problem}"
        if self._reading is not None:
            return f"{moment}, {age}. A newer page is being made: reload in some seconds."
        return f"{moment}. Reload for a later state of the run."


class LivePages:
    """A WSGI application of the pages.

    Args:
        directory: The log.
        interval: Least time between two pages, s.
        state: Returns the run as of the last reading, and why it is not newer, or "".
    """

    def __init__(self, directory: Path, interval: float, state: Callable[[], tuple[LiveRun, str]]) -> None:
        from .report import page_of_log

        self._report = ReportPage(lambda line: page_of_log(directory, line), interval)
        self._state = state

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> list[bytes]:
        """Answer a request."""
        match environ["PATH_INFO"]:
            case "/":
                return self._answer_report(environ, start)
            case "/state.json":
                return self._answer_state(environ, start)
            case _:
                return answer(start, "404 Not Found", "There are / and /state.json.\n")

    def _answer_report(self, environ: WSGIEnvironment, start: StartResponse) -> list[bytes]:
        page = self._report.text()
        if page is None:
            why = self._report.problem or "the log is large, or its storage does not answer"
            again = {"Retry-After": str(_RETRY_SECONDS), "Refresh": str(_RETRY_SECONDS)}
            return answer(start, "503 Service Unavailable", f"There is no page yet: {why}\n", headers=again)
        refresh = parse_qs(environ.get("QUERY_STRING", "")).get("refresh", [""])[0]
        seconds = {"Refresh": str(max(_LEAST_REFRESH, int(refresh[:9])))} if refresh.isdecimal() else {}
        return _compressed(environ, start, page, "text/html", seconds)

    def _answer_state(self, environ: WSGIEnvironment, start: StartResponse) -> list[bytes]:
        from commtrace.analyses.live.state import state_to_json

        return _compressed(environ, start, state_to_json(*self._state()) + "\n", "application/json", {})


def _compressed(
    environ: WSGIEnvironment, start: StartResponse, text: str, kind: str, headers: dict[str, str]
) -> list[bytes]:
    """Answer with a text, in fewer bytes if the client takes them."""
    if "gzip" not in environ.get("HTTP_ACCEPT_ENCODING", ""):
        return answer(start, "200 OK", text, kind, headers)
    body = gzip.compress(text.encode(), _COMPRESSION)
    return answer(start, "200 OK", body, kind, {**headers, "Content-Encoding": "gzip"})
