"""Show a run while it is recorded.

The first lines say what is wrong: which process ended first and by what, in
which call the job hangs, and what the ranks that do not come are doing. Then
follow the last steps, where the time of a step goes, ranks that delay the
others, and the volumes so far.

    commtrace top logs/run1

Records are read once, from the log's files and from the memory of the
processes of this host, and the traced processes have no work with it. Times
are of the last steps; volumes are sums over all records, as in a report.

Keys: Tab  show purposes, ranks     q  end

Exit status, also of --once: 0; 4 if the job hangs; 5 if a process failed or
died; 2 if there is no log.
"""

from __future__ import annotations

import argparse
import contextlib
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from commtrace.errors import LogError

from .exit_status import AS_EXPECTED, PROGRAM_FAILED, STUCK
from .log_reading import SLOW_SECONDS, LogReading
from .option_types import add_shared, positive_number

if TYPE_CHECKING:
    from rich.console import RenderableType

    from commtrace.analyses.live.followed_run import FollowedRun, LiveRun

_BESIDE_ROWS: Final = 24
"""Lines of the screen that are not rows of the last table, at most."""
_LEAST_ROWS: Final = 5
_READING_SECONDS: Final = 1.0
"""Time for which a reading is awaited before keys are read again."""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_shared(parser, "directory")
    parser.add_argument("--once", action="store_true", help="print the state once, and end")
    parser.add_argument("--interval", metavar="SECONDS", type=positive_number, default=2.0,
        help="time between two readings (default: 2)")  # fmt: skip
    add_shared(parser, "--width")


def run(arguments: argparse.Namespace) -> int:
    """Print the state once, or show it until a key ends it."""
    from commtrace.analyses.live.followed_run import FollowedRun
    from commtrace.analyses.live.screen import render

    from .report import print_text

    followed = FollowedRun(arguments.directory)
    if arguments.once or not sys.stdout.isatty():
        live = followed.read()
        print_text(render(live, arguments.width), arguments.width)
    else:
        live = _show(followed, arguments)
    return status_of(live)


def status_of(live: LiveRun) -> int:
    """Return the exit status for the state of a run."""
    if len(live.tables["stuck_calls"]):
        return STUCK
    return PROGRAM_FAILED if live.has_failed else AS_EXPECTED


def _show(followed: FollowedRun, arguments: argparse.Namespace) -> LiveRun:
    """Show the run on the whole screen until the user ends it. Return its last state."""
    from rich.console import Console
    from rich.live import Live

    from commtrace.analyses.live.screen import VIEWS

    live = followed.read()  # raises before the screen changes if there is no log
    view, problem, next_reading = 0, "", 0.0
    reading: LogReading | None = None
    screen = Console(highlight=False, markup=False, emoji=False)
    with _single_keys() as keys, Live(console=screen, screen=True, auto_refresh=False) as display:
        while True:
            if reading is None and time.monotonic() >= next_reading:
                reading = LogReading(followed)
            if reading is not None and reading.is_done(_READING_SECONDS):
                try:
                    live, problem = reading.result(), ""
                except (LogError, OSError) as error:  # removed, or replaced
                    problem = str(error)
                reading = None
                next_reading = time.monotonic() + max(arguments.interval, 4 * live.took_s)
            elif reading is not None and reading.seconds > SLOW_SECONDS:
                problem = reading.slowness
            display.update(_screen(live, VIEWS[view], problem, screen), refresh=True)
            key = keys(max(0.0, next_reading - time.monotonic()))
            if key in ("q", "\x03"):
                return live
            view = (view + (key == "\t")) % len(VIEWS)


def _screen(live: LiveRun, view: str, problem: str, screen: object) -> RenderableType:
    from rich.console import Console, Group
    from rich.text import Text

    from commtrace.analyses.live.screen import render

    assert isinstance(screen, Console)
    width, height = screen.size
    lines = [*render(live, width, view, max(_LEAST_ROWS, height - _BESIDE_ROWS))]
    if problem:
        lines.insert(0, Text(f"Not read again: {problem}", style="bold red"))
    elif live.is_over:
        lines.insert(1, Text("The run is over: commtrace report shows all of it.", style="bold"))
    return Group(*lines, Text(), Text("Tab: purposes, ranks   q: end", style="dim"))


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
        return sys.stdin.read(1) if select.select([sys.stdin], [], [], seconds)[0] else ""

    try:
        tty.setcbreak(sys.stdin)
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
