"""Watch a run while it is recorded, and tell of hangs, failures and delays.

Each incident is told once: as a line of text, or with --json as a JSON object
in a line, with the ranks, the step and the rows of the tables that it follows
from. --run starts a command, with the object on its standard input; --webhook
posts the object. Neither delays the next reading, nor does the watch end if
they fail.

    commtrace watch logs/run1 --on hang,straggler:20% --run 'mail -s hang me'

Conditions:
  hang[:60s]       ranks are stuck in a call, as the report defines it, and, if
                   the rank that they wait for computes or writes to storage,
                   for so long; or a rank makes no progress outside of calls
                   for so long
  end              a process failed or died
  straggler[:20%]  a rank computes longer than the others by this share of a
                   step
  step[:2x]        a step takes this multiple of the median of the 50 steps
                   before it

The watch waits for a log that does not exist yet (--wait), and ends when the
run is over, or, if it failed, when no other has followed it (--linger). Exit
status: 0; 4 if the job hangs at the end of the watch; 5 if a process failed or
died; 2 if there was no log.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from commtrace.errors import CommtraceError, LogError
from commtrace.output_files import discard_stdout
from commtrace.reading.allocator import share_freed_memory

from .exit_status import AS_EXPECTED
from .log_reading import SLOW_SECONDS, LogReading, pause_after
from .option_types import add_shared, positive_number
from .top import status_of

if TYPE_CHECKING:
    from commtrace.analyses.live.followed_run import FollowedRun, LiveRun
    from commtrace.analyses.live.incidents import Condition

_DELIVERY_SECONDS: Final = 60
"""Time after which a command or a webhook counts as failed."""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_shared(parser, "directory")
    parser.add_argument("--on", metavar="CONDITION,...", type=_conditions, default="hang,end",
        help="what to tell (default: hang,end)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print each incident as a JSON object in a line")
    parser.add_argument("--run", metavar="COMMAND", dest="command", help="shell command that is started for each")
    parser.add_argument("--webhook", metavar="URL", type=_url, help="address to which each is posted as JSON")
    parser.add_argument("--interval", metavar="SECONDS", type=positive_number, default=2.0,
        help="time between two readings (default: 2)")  # fmt: skip
    parser.add_argument("--wait", metavar="SECONDS", type=positive_number, default=3600.0,
        help="time for which to wait for a log, also if it was removed (default: 3600)")  # fmt: skip
    parser.add_argument("--linger", metavar="SECONDS", type=positive_number, default=0.0,
        help="time for which to wait for a restart after a run that failed (default: 0)")  # fmt: skip


def _conditions(text: str) -> list[Condition]:
    """Parse conditions, separated by commas."""
    from commtrace.analyses.live.incidents import Condition

    try:
        return [Condition.parse(item) for item in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _url(text: str) -> str:
    """Return the address of a webhook."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not an address that begins with http:// or https://")
    return text


def run(arguments: argparse.Namespace) -> int:
    """Watch the run until it is over."""
    share_freed_memory()  # before libraries start threads
    from commtrace.analyses.live.followed_run import FollowedRun
    from commtrace.analyses.live.incidents import Watcher

    followed, watcher = FollowedRun(arguments.directory, totals=()), Watcher(arguments.on)
    deliveries: list[threading.Thread] = []
    live, problem, seen, ended = None, "", time.monotonic(), 0.0
    while True:
        try:
            live, problem = _read(followed, arguments.wait), ""
            seen = time.monotonic()
        except (LogError, OSError) as error:
            if str(error) != problem:
                problem = str(error)
                print(f"commtrace: waiting for a log: {problem}", file=sys.stderr, flush=True)
            if time.monotonic() - seen > arguments.wait:
                raise CommtraceError(f"no log within {arguments.wait:g} s (--wait): {problem}") from error
        else:
            for incident in watcher.new_incidents(live):
                document = json.dumps(incident.document(live))
                deliveries += (started := _deliver(document, arguments))
                _print(document if arguments.json else f"{incident.kind}: {incident.text}", is_delivered=bool(started))
            ended = (ended or time.monotonic()) if live.is_over else 0.0
            may_restart = bool(ended) and status_of(live) != AS_EXPECTED
            if ended and not (may_restart and time.monotonic() - ended < arguments.linger):
                break
        time.sleep(pause_after(live.took_s if live else 0.0, arguments.interval))
    for delivery in deliveries:
        delivery.join()
    if deliveries:
        try:
            sys.stdout.flush()
        except OSError:  # was told
            discard_stdout()
    return status_of(live)


def _read(followed: FollowedRun, wait: float) -> LiveRun:
    """Read the run; if that takes long, say so, and give up after `wait` seconds."""
    reading = LogReading(followed.read)
    if not reading.is_done(SLOW_SECONDS):
        print(f"commtrace: {reading.slowness}; waiting", file=sys.stderr, flush=True)
        if not reading.is_done(wait):
            raise CommtraceError(f"{reading.slowness}; gave up after {wait:g} s (--wait)")
    return reading.result()


def _print(text: str, *, is_delivered: bool) -> None:
    """Print an incident. An error, as of a full disk, ends the watch only if nothing else delivers it."""
    try:
        print(text, flush=True)  # what could not be written is tried again with the next one
    except OSError as error:
        if not is_delivered:
            raise
        print(f"commtrace: an incident was delivered, but not printed: {error}", file=sys.stderr, flush=True)


def _deliver(document: str, arguments: argparse.Namespace) -> list[threading.Thread]:
    """Start to deliver an incident to the command and the webhook."""
    targets: list[Callable[[], object]] = []
    if arguments.command is not None:
        targets.append(lambda: _start(arguments.command, document))
    if arguments.webhook is not None:
        targets.append(lambda: _post(arguments.webhook, document))
    threads = [threading.Thread(target=_reported, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    return threads


def _reported(deliver: Callable[[], object]) -> None:
    """Deliver, and print an error to stderr."""
    try:
        deliver()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        print(f"commtrace: an incident was not delivered: {error}", file=sys.stderr, flush=True)


def _start(command: str, document: str) -> None:
    subprocess.run(command, shell=True, input=document, text=True, check=True, timeout=_DELIVERY_SECONDS)


def _post(url: str, document: str) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, document.encode(), headers, method="POST")
    urllib.request.urlopen(request, timeout=_DELIVERY_SECONDS).close()
