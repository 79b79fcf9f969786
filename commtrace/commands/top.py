"""Show a run while it is recorded.

The first lines say what is wrong: which process ended first and by what, in
which call the job hangs, and what the ranks that do not come are doing. Then
follow the last steps, where the time of a step goes, ranks that delay the
others, and the volumes so far.

    commtrace top logs/run1
    commtrace top logs/run1 --web 8400      # also as a page, at http://127.0.0.1:8400/

Records are read once, from the log's files and from the memory of the
processes of this host, and the traced processes have no work with it. Times
are of the last steps; volumes are sums over all records, as in a report. On
average, 3 % of a core is used (--share): the more ranks, the longer from one
reading to the next. The records of a long log are added to the volumes in
parts; until all are, the screen says of how many calls they are.

Keys: Tab  show purposes, ranks     r  read the log now     q  end

With --web PORT, a server shows the HTML report of the moment (/), and the state as
JSON (/state.json). It makes a page when one is asked for, at most as often as
costs a fifth of a core. It is read only, and answers on this host alone, unless
--address says otherwise; then requests need a token, which is part of the address
that is printed. Where standard output is no terminal, the server ends with the run
(--linger).

Exit status, also of --once: 0; 4 if the job hangs; 5 if a process failed or
died; 2 if there is no log.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from commtrace.errors import CommtraceError, LogError, MissingLibraryError
from commtrace.reading.allocator import share_freed_memory

from .exit_status import AS_EXPECTED, PROGRAM_FAILED, STUCK
from .log_reading import SLOW_SECONDS, LogReading, add_duration, first_reading, pause_of_view, readings
from .option_types import LOOPBACK, add_serving, add_shared, percentage, port_number, positive_number

if TYPE_CHECKING:
    from rich.console import RenderableType

    from commtrace.analyses.live.followed_run import FollowedRun, LiveRun

_BESIDE_ROWS: Final = 24
"""Lines of the screen that are not rows of the last table, at most."""
_LEAST_ROWS: Final = 5
_PAGE_LIBRARIES: Final = ("jinja2", "plotly")
"""Libraries that a page needs. They are not imported before one is asked for: they take 20 MiB of memory."""
_READING_SECONDS: Final = 1.0
"""Time for which a reading is awaited before keys are read again."""


@dataclass
class _State:
    """What is shown: the run as of its last reading, and why there is no newer one, or ""."""

    live: LiveRun
    problem: str = ""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_shared(parser, "directory")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--once", action="store_true", help="print the state once, and end")
    ways.add_argument(
        "--json", action="store_true", help="print the state once as one JSON document, with exact numbers"
    )
    ways.add_argument("--web", metavar="PORT", type=port_number, help="port to serve the report of the moment at")
    add_serving(parser, "token that requests must carry (default: none at 127.0.0.1, else one that is made)")
    add_duration(parser)
    parser.add_argument("--interval", metavar="SECONDS", type=positive_number, default=2.0,
        help="time between two readings (default: 2)")  # fmt: skip
    parser.add_argument("--share", metavar="PERCENT", type=_share_of_core, default="3%",
        help="largest share of a core to use on average while the run goes on (default: 3%%)")  # fmt: skip
    add_shared(parser, "--width")


def _share_of_core(text: str) -> float:
    share = float(percentage(text))
    if not share:
        raise argparse.ArgumentTypeError(f"{text!r}: the share must be above 0%")
    return share


def run(arguments: argparse.Namespace) -> int:
    """Print the state once, or show it until a key ends it."""
    share_freed_memory()  # before libraries start threads
    from commtrace.analyses.live.followed_run import FollowedRun

    if arguments.web is None and (arguments.token is not None or arguments.address != LOOPBACK):
        raise CommtraceError("--address and --token are for --web PORT; give it, too")
    is_shown_once = arguments.once or arguments.json or (arguments.web is None and not sys.stdout.isatty())
    followed = FollowedRun(arguments.directory, in_parts=not is_shown_once)
    # Raises before the screen changes if there is no log.
    state = _State(first_reading(followed, arguments.interval, arguments.wait))
    if arguments.web is not None:
        _serve(followed, state, arguments)
    elif is_shown_once:
        _print(state.live, arguments)
    else:
        _show(followed, state, arguments)
    return status_of(state.live)


def status_of(live: LiveRun) -> int:
    """Return the exit status for the state of a run."""
    if len(live.tables["stuck_calls"]):
        return STUCK
    return PROGRAM_FAILED if live.has_failed else AS_EXPECTED


def _print(live: LiveRun, arguments: argparse.Namespace) -> None:
    """Print the state once."""
    from commtrace.analyses.live.screen import render
    from commtrace.analyses.live.state import state_to_json

    from .report import print_text

    if arguments.json:
        print(state_to_json(live))
    else:
        print_text(render(live, arguments.width), arguments.width)


def _serve(followed: FollowedRun, state: _State, arguments: argparse.Namespace) -> None:
    """Serve the pages while the screen is shown, or, without a terminal, until the run is over."""
    for library in _PAGE_LIBRARIES:
        if importlib.util.find_spec(library) is None:
            raise MissingLibraryError.of_extra("--web", library, "html")

    from .http_server import serve
    from .live_pages import LivePages

    pages = LivePages(arguments.directory, arguments.interval, lambda: (state.live, state.problem))
    with serve(pages, arguments.web, arguments.address, arguments.token, requires_token=True) as server:
        if sys.stdout.isatty():
            _show(followed, state, arguments, server.url)
            return
        print(server.url, flush=True)
        for live, problem in readings(followed, state.live, arguments.interval, arguments.linger, arguments.share):
            state.live, state.problem = live, problem


def _show(followed: FollowedRun, state: _State, arguments: argparse.Namespace, url: str = "") -> None:
    """Show the run on the whole screen until the user ends it."""
    from rich.console import Console
    from rich.live import Live

    from commtrace.analyses.live.screen import VIEWS

    view, next_reading = 0, 0.0
    reading: LogReading[LiveRun] | None = None
    screen = Console(highlight=False, markup=False, emoji=False)
    signal.signal(signal.SIGTERM, _exit)
    with _single_keys() as keys, Live(console=screen, screen=True, auto_refresh=False) as display:
        while True:
            if reading is None and time.monotonic() >= next_reading:
                reading = LogReading(followed.read)
            if reading is not None and reading.is_done(_READING_SECONDS):
                try:
                    state.live, state.problem = reading.result(), ""
                except (LogError, OSError) as error:  # removed, or replaced
                    state.problem = str(error)
                reading = None
                next_reading = time.monotonic() + pause_of_view(state.live, arguments.interval, arguments.share)
            elif reading is not None and reading.seconds > SLOW_SECONDS:
                state.problem = reading.slowness
            display.update(_screen(state, VIEWS[view], url, screen), refresh=True)
            key = keys(max(0.0, next_reading - time.monotonic()))
            if key in ("q", "\x03"):
                return
            view = (view + (key == "\t")) % len(VIEWS)
            next_reading = 0.0 if key == "r" else next_reading


def _exit(number: int, _: object) -> None:
    """End by a signal with the terminal as it was."""
    sys.exit(128 + number)


def _screen(state: _State, view: str, url: str, screen: object) -> RenderableType:
    from rich.console import Console, Group
    from rich.text import Text

    from commtrace.analyses.live.screen import render

    assert isinstance(screen, Console)
    width, height = screen.size
    lines = [*render(state.live, width, view, max(_LEAST_ROWS, height - _BESIDE_ROWS))]
    if state.problem:
        lines.insert(0, Text(f"Not read again: {state.problem}", style="bold red"))
    elif state.live.is_over:
        lines.insert(1, Text("The run is over: commtrace report shows all of it.", style="bold"))
    keys = "Tab: purposes, ranks   r: read now   q: end"
    return Group(*lines, Text(), Text(f"{keys}   page: {url}" if url else keys, style="dim"))


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextlib.contextmanager
def _single_keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that returns a key that was pressed within some seconds, "" for none."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)

    def pressed(seconds: float) -> str:
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return ""
        # Not sys.stdin.read: it would keep further keys in its buffer, where select does not see them.
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q"  # at its end: the terminal is gone

    try:
        tty.setcbreak(sys.stdin)
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
