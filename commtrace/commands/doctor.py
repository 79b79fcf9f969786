"""Show which libraries can be traced, and test recording on two local ranks.

The command shows the installed libraries that have hooks, the versions that the
prediction rules were written against, and whether tracing is on (COMMTRACE).
Then a probe runs with PyTorch, and another with mpi4py, if they are installed:
two local ranks run every collective and send a message in each direction,
traced with the settings of this environment. The command prints which recorder
was used and which calls it does not observe. The exit status is 1 if a call of
a probe was not recorded correctly, and 2 if a probe failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from commtrace.errors import CommtraceError
from commtrace.formatting import wrap_text

from .exit_status import AS_EXPECTED, DIFFERENT, FAILED

if TYPE_CHECKING:
    from commtrace.run import Run

_PROBED: Final = ("torch", "mpi4py")
_LIBRARIES: Final = ("torch", "mpi4py", "deepspeed", "megatron-core", "transformers")


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: the command takes none."""


def run(arguments: argparse.Namespace) -> int:
    """Print the findings, and return the exit status."""
    for title, text in _environment():
        _print(title, text)
    results = [_probe(library) for library in _PROBED if importlib.util.find_spec(library) is not None]
    if not results:
        _print("probe", "neither torch nor mpi4py is installed: there is nothing to record")
    return max(results, default=AS_EXPECTED)


def _print(title: str, text: str) -> None:
    print(*wrap_text(text, 100, f"{title:15}"), sep="\n")


def _environment() -> Iterator[tuple[str, str]]:
    import platform

    import commtrace
    from commtrace.theory.rules.registry import DEEPSPEED, TORCH

    yield "commtrace", f"{commtrace.__version__}, Python {platform.python_version()}"
    directory = os.environ.get("COMMTRACE", "0")
    off = "off; set COMMTRACE=DIR, or use `commtrace run`"
    yield "tracing", off if directory in ("", "0") else f"on; COMMTRACE={directory}"
    rules = dict((TORCH, DEEPSPEED))
    for library in _LIBRARIES:
        try:
            version = metadata.version(library)
        except metadata.PackageNotFoundError:
            version = "not installed"
        yield library, version + (f" (prediction rules: {rules[library]})" if library in rules else "")


def _probe(library: str) -> int:
    """Probe a library, print the results, and return the exit status."""
    from commtrace.network.call_probe import EXPECTED, RANKS, run_probe
    from commtrace.run import open_run

    print(f"\nprobe of {library}, {RANKS} ranks on this machine")
    with tempfile.TemporaryDirectory() as directory:
        try:
            run_probe(Path(directory), library)
            if not any(Path(directory).iterdir()):
                raise CommtraceError("nothing was recorded; start programs with `commtrace run` in this environment")
            run = open_run(directory)
        except CommtraceError as error:
            _print("failed", str(error))
            return FAILED
        wrong = [*_differences(run)]
        facts, setup = run.processes[0].tables.process, run.processes[0].tables.setup or {}
    _print("recorder", facts["recorder"] + _why_slower((setup.get("slower_recorder") or {}).get(library)))
    _print("calls", "; ".join(wrong) or f"all {len(EXPECTED)} operations are recorded with their payloads")
    for text in facts["blind_spots"]:
        _print("not observed", text)
    return DIFFERENT if wrong else AS_EXPECTED


def _why_slower(reason: str | None) -> str:
    """Return why the Python recorder was used, as the end of a line; "" if the native one was."""
    from commtrace.hooks.native.libraries import REMEDY, missing_compiler

    if reason is None:
        return ""
    obstacle = f"; it cannot be built: {missing_compiler()}" if reason.endswith(REMEDY) and missing_compiler() else ""
    return f", which costs far more per call than the native one: {reason}{obstacle}"


def _differences(run: Run) -> Iterator[str]:
    from commtrace.network.call_probe import EXPECTED, RANKS

    events = run.events()
    for rank in range(RANKS):
        of_rank = events.loc[(events["rank"] == rank) & (events["op"] != "barrier")]
        recorded = Counter(zip(of_rank["op"].astype(str), of_rank["payload_bytes"].tolist(), strict=True))
        for (op, payload), count in sorted(((EXPECTED - recorded) + (recorded - EXPECTED)).items()):
            name = "missing" if (op, payload) in EXPECTED else "not expected"
            yield f"rank {rank}: {count} {op} of {payload:,} bytes {name}"
    yield from map(str, run.notes)
    if errors := int(run.table("coverage")["hook_errors"].fillna(0).sum()):
        yield f"{errors} hook errors, the first: {run.table('coverage')['first_error'].iloc[0]}"
