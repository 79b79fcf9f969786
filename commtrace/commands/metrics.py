"""Write the numbers of a run for TensorBoard or Prometheus.

    commtrace metrics logs/run1 --tensorboard runs/comm
    commtrace metrics logs/run1 --tensorboard runs/comm --follow
    commtrace metrics logs/run1 --openmetrics 9400
    commtrace metrics logs/run1 --openmetrics -         # once, as text
    commtrace metrics --dashboard > commtrace.json      # for Grafana
    commtrace metrics logs/run1 --json                  # a JSON object per step

TensorBoard gets a value per training step, beside the loss if OUT is below the
same folder: duration of the step, computation, waiting, exposed and hidden
communication, the slowest rank and its delay, calls and payload by purpose.
Prometheus gets the present numbers: step, processes, times of the last step,
counters of calls and bytes by purpose, stuck seconds, and what ranks without
progress do.

--json prints the values of TensorBoard, a line per step: commtrace.live reads them
so, in a training, and closes the command's standard input at its end (--until-eof).

With --follow, or a port, the command ends with the run. It reads the log in a
process of its own: the training does nothing for it. Needs the extra `metrics`
(tensorboard, prometheus-client).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from commtrace.errors import CommtraceError, LogError, MissingLibraryError
from commtrace.formatting import format_plural
from commtrace.reading.allocator import share_freed_memory

from .exit_status import AS_EXPECTED
from .log_reading import add_duration, first_reading, pause_after, readings
from .option_types import add_serving, add_shared, port_number, positive_number

if TYPE_CHECKING:
    from commtrace.analyses.live.followed_run import FollowedRun, LiveRun

_NICE: Final = 10
"""Lower priority with which the command gives way to the training that started it."""
_WRITE_SECONDS: Final = 1.0
"""Time in which records reach the log: twice the interval in which they are written."""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_shared(parser, "directory")
    parser.add_argument("--tensorboard", metavar="OUT", type=Path, help="folder for an event file")
    parser.add_argument(
        "--openmetrics", metavar="PORT", type=_port, help="port to serve the metrics at, at any path; -: print them"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each measured step")
    parser.add_argument("--until-eof", action="store_true",
        help="follow the log, which may not exist yet, until a line or the end of standard input")  # fmt: skip
    add_serving(parser, "token that requests must carry (default: none)")
    add_duration(parser)
    parser.add_argument("--follow", action="store_true", help="go on until the run is over")
    parser.add_argument("--interval", metavar="SECONDS", type=positive_number, default=5.0,
        help="time between two readings (default: 5)")  # fmt: skip
    parser.add_argument("--dashboard", action=_PrintDashboard, nargs=0,
        help="print a dashboard of Grafana for the metrics of --openmetrics, and end")  # fmt: skip


class _PrintDashboard(argparse.Action):
    """An option that needs no log, as --help."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the dashboard."""
        from commtrace.analyses.live.dashboard import dashboard

        print(json.dumps(dashboard(), indent=2))
        parser.exit()


def _port(text: str) -> int:
    """Parse a port; 0 stands for "-"."""
    return 0 if text == "-" else port_number(text)


def run(arguments: argparse.Namespace) -> int:
    """Write the metrics once, or until the run is over."""
    share_freed_memory()  # before libraries start threads
    from commtrace.analyses.live.followed_run import TOTALS, FollowedRun
    from commtrace.analyses.volume_by_purpose import BY_STEP

    if arguments.tensorboard is None and arguments.openmetrics is None and not arguments.json:
        raise CommtraceError("give --tensorboard OUT, --openmetrics PORT, or --json")
    if arguments.until_eof and not arguments.json:
        raise CommtraceError("--until-eof: give --json")
    followed, last = FollowedRun(arguments.directory, (*TOTALS, BY_STEP)), None
    with contextlib.ExitStack() as at_end:
        targets: list[Callable[[LiveRun | None], object]] = []
        if arguments.tensorboard is not None:
            targets.append(at_end.enter_context(_tensorboard(arguments.tensorboard)))
        if arguments.openmetrics is not None:
            targets.append(at_end.enter_context(_openmetrics(arguments)))
        if arguments.json:
            targets.append(_print_steps())
        for live in _until_eof(followed, arguments.interval) if arguments.until_eof else _readings(followed, arguments):
            for write in targets:
                write(live)
            last = live or last
    if last is not None and arguments.tensorboard is not None and not arguments.until_eof:
        print(f"{arguments.tensorboard}: {format_plural(len(last.tables['step_times']), 'step')} of run {last.run.id}")
    return AS_EXPECTED


def _readings(followed: FollowedRun, arguments: argparse.Namespace) -> Iterator[LiveRun | None]:
    """Yield one reading, or readings until the run is over; None where the log could not be read."""
    first = first_reading(followed, arguments.interval, arguments.wait)
    if not (arguments.follow or arguments.openmetrics):
        yield first
        return
    for live, problem in readings(followed, first, arguments.interval, arguments.linger):
        yield None if problem else live


def _until_eof(followed: FollowedRun, interval: float) -> Iterator[LiveRun]:
    """Yield readings until a line or the end of standard input, or the end of the parent process.

    The last one is made when all records until then have reached the log.
    """
    os.nice(_NICE)
    parent, pause = os.getppid(), 0.0
    while True:
        ended = bool(select.select([sys.stdin], [], [], pause)[0]) or os.getppid() != parent
        if ended:
            time.sleep(_WRITE_SECONDS)
        with contextlib.suppress(LogError, OSError):  # the log is not there yet, or was removed
            live = followed.read()
            yield live
            pause = pause_after(live.took_s, interval)
        if ended:
            break
        pause = max(interval, pause)


def _print_steps() -> Callable[[LiveRun | None], None]:
    """Return a function that prints the values of new steps."""
    from commtrace.analyses.live.metrics import step_values

    written = -1

    def write(live: LiveRun | None) -> None:
        nonlocal written
        if live is None:
            return
        for step, values in groupby(step_values(live, written), key=lambda value: value.step):
            print(json.dumps({"step": step, **{value.name: float(value.value) for value in values}}), flush=True)
            written = step

    return write


@contextlib.contextmanager
def _tensorboard(folder: Path) -> Iterator[Callable[[LiveRun | None], None]]:
    """Give a function that writes the values of new steps to an event file."""
    from commtrace.analyses.live.metrics import step_values

    try:
        from tensorboard.summary import Writer
    except ImportError:
        raise MissingLibraryError.of_extra("--tensorboard", "tensorboard", "metrics") from None
    writer, written = Writer(str(folder)), -1

    def write(live: LiveRun | None) -> None:
        nonlocal written
        if live is None:
            return
        for name, step, value in step_values(live, written):
            writer.add_scalar(f"commtrace/{name}".replace(" ", "_"), value, step)
            written = step
        writer.flush()

    try:
        yield write
    finally:
        writer.close()


@contextlib.contextmanager
def _openmetrics(arguments: argparse.Namespace) -> Iterator[Callable[[LiveRun | None], None]]:
    """Give a function that sets what a server answers, or prints it. Of a log that cannot be read, it is nothing."""
    from commtrace.analyses.live.metrics import metric_families

    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app
        from prometheus_client.openmetrics.exposition import generate_latest
    except ImportError:
        raise MissingLibraryError.of_extra("--openmetrics", "prometheus-client", "metrics") from None
    families: list[Any] = []

    class Present:
        """The metrics of the last reading."""

        def collect(self) -> Iterator[Any]:
            return iter(families)

    registry = CollectorRegistry()
    registry.register(Present())

    def show(live: LiveRun | None) -> None:
        nonlocal families
        families = [*metric_families(live)] if live else []
        if not arguments.openmetrics:
            print(generate_latest(registry).decode(), end="")

    if not arguments.openmetrics:
        yield show
        return
    from .http_server import serve

    app = make_wsgi_app(registry)
    with serve(app, arguments.openmetrics, arguments.address, arguments.token, requires_token=False):
        yield show
