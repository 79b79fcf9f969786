"""Write the numbers of a run for TensorBoard or Prometheus.

    commtrace metrics logs/run1 --tensorboard runs/comm
    commtrace metrics logs/run1 --tensorboard runs/comm --follow
    commtrace metrics logs/run1 --openmetrics 9400
    commtrace metrics logs/run1 --openmetrics -         # once, as text
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

from .exit_status import AS_EXPECTED
from .option_types import add_shared, positive_number

if TYPE_CHECKING:
    from commtrace.analyses.live.followed_run import FollowedRun, LiveRun

LOOPBACK = "127.0.0.1"
_NICE: Final = 10
"""Lower priority with which the command gives way to the training that started it."""
_WRITE_SECONDS: Final = 1.0
"""Time in which records reach the log: twice the interval in which they are written."""
_NEEDS = "needs {}; pip install 'commtrace[metrics]'"


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_shared(parser, "directory")
    parser.add_argument("--tensorboard", metavar="OUT", type=Path, help="folder for an event file")
    parser.add_argument("--openmetrics", metavar="PORT", type=_port, help="port to serve the metrics at; -: print them")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each measured step")
    parser.add_argument("--until-eof", action="store_true",
        help="follow the log, which may not exist yet, until a line or the end of standard input")  # fmt: skip
    parser.add_argument("--address", metavar="ADDRESS", default=LOOPBACK,
        help=f"address to serve them at (default: {LOOPBACK}, which other hosts cannot reach)")  # fmt: skip
    parser.add_argument("--follow", action="store_true", help="go on until the run is over")
    parser.add_argument("--interval", metavar="SECONDS", type=positive_number, default=5.0,
        help="time between two readings (default: 5)")  # fmt: skip


def _port(text: str) -> int:
    """Parse a port; 0 stands for "-"."""
    if text == "-":
        return 0
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a port from 1 to 65535 nor -")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Write the metrics once, or until the run is over."""
    from commtrace.analyses.live.followed_run import FollowedRun
    from commtrace.analyses.volume_by_purpose import BY_STEP

    if arguments.tensorboard is None and arguments.openmetrics is None and not arguments.json:
        raise CommtraceError("give --tensorboard OUT, --openmetrics PORT, or --json")
    if arguments.until_eof and not arguments.json:
        raise CommtraceError("--until-eof: give --json")
    followed = FollowedRun(arguments.directory, [BY_STEP])
    with contextlib.ExitStack() as at_end:
        targets: list[Callable[[LiveRun], object]] = []
        if arguments.tensorboard is not None:
            targets.append(at_end.enter_context(_tensorboard(arguments.tensorboard)))
        if arguments.openmetrics is not None:
            targets.append(at_end.enter_context(_openmetrics(arguments.openmetrics, arguments.address)))
        if arguments.json:
            targets.append(_print_steps())
        for live in _until_eof(followed, arguments.interval) if arguments.until_eof else _readings(followed, arguments):
            for write in targets:
                write(live)
    if arguments.tensorboard is not None and not arguments.until_eof:
        print(f"{arguments.tensorboard}: {format_plural(len(live.tables['step_times']), 'step')} of run {live.run.id}")
    return AS_EXPECTED


def _readings(followed: FollowedRun, arguments: argparse.Namespace) -> Iterator[LiveRun]:
    """Yield one reading, or readings until the run is over."""
    while True:
        live = followed.read()
        yield live
        if live.is_over or not (arguments.follow or arguments.openmetrics):
            break
        time.sleep(max(arguments.interval, 4 * live.took_s))


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
            pause = max(interval, 4 * live.took_s)
        if ended:
            break
        pause = max(interval, pause)


def _print_steps() -> Callable[[LiveRun], None]:
    """Return a function that prints the values of new steps."""
    from commtrace.analyses.live.metrics import step_values

    written = -1

    def write(live: LiveRun) -> None:
        nonlocal written
        for step, values in groupby(step_values(live, written), key=lambda value: value.step):
            print(json.dumps({"step": step, **{value.name: float(value.value) for value in values}}), flush=True)
            written = step

    return write


@contextlib.contextmanager
def _tensorboard(folder: Path) -> Iterator[Callable[[LiveRun], None]]:
    """Give a function that writes the values of new steps to an event file."""
    from commtrace.analyses.live.metrics import step_values

    try:
        from tensorboard.summary import Writer
    except ImportError:
        raise MissingLibraryError(f"--tensorboard: {_NEEDS.format('tensorboard')}") from None
    writer, written = Writer(str(folder)), -1

    def write(live: LiveRun) -> None:
        nonlocal written
        for name, step, value in step_values(live, written):
            writer.add_scalar(f"commtrace/{name}".replace(" ", "_"), value, step)
            written = step
        writer.flush()

    try:
        yield write
    finally:
        writer.close()


@contextlib.contextmanager
def _openmetrics(port: int, address: str) -> Iterator[Callable[[LiveRun], None]]:
    """Give a function that sets what a server answers, or prints it."""
    from commtrace.analyses.live.metrics import metric_families

    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.openmetrics.exposition import generate_latest
    except ImportError:
        raise MissingLibraryError(f"--openmetrics: {_NEEDS.format('prometheus-client')}") from None
    registry = CollectorRegistry()
    families: list[Any] = []

    class Present:
        """The metrics of the last reading."""

        def collect(self) -> Iterator[Any]:
            return iter(families)

    registry.register(Present())
    server = None

    def show(live: LiveRun) -> None:
        nonlocal families, server
        families = [*metric_families(live)]
        if not port:
            print(generate_latest(registry).decode(), end="")
        elif server is None:
            try:
                server, _ = start_http_server(port, address, registry)
            except OSError as error:
                raise CommtraceError(f"--openmetrics {port}: {address} port {port}: {error.strerror}") from None

    try:
        yield show
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()
