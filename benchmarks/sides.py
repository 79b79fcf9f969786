"""What can be switched on and off around communication: commtrace and other tools.

Each is a context manager, and raises an error if it recorded nothing, because a tool that is not on costs nothing.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import commtrace
from commtrace.hooks import purposes
from commtrace.hooks.marked_sources import MarkedSources
from commtrace.hooks.native import libraries
from commtrace.hooks.torch import hook as torch_hook
from commtrace.run import Run

Switch = Callable[[], AbstractContextManager[object]]

bare: Switch = nullcontext


def commtrace_sides(*, read: Callable[[str, Run, Path], None] | None = None) -> dict[str, Switch]:
    """Return each available recorder, with and without call sites. `read` gets its name, the run and the directory."""
    switches: dict[str, Switch] = {}
    for recorder in recorders():
        for sites, preposition in ((True, "with"), (False, "without")):
            name = f"commtrace, {recorder}, {preposition} call sites"
            switches[name] = partial(traced, recorder, sites=sites, read=None if read is None else partial(read, name))
    return switches


def summary_sides() -> dict[str, Switch]:
    """Return each available recorder with COMMTRACE_MODE=summary."""
    return {f"commtrace, {name}, summary": partial(traced, name, mode="summary") for name in recorders()}


def recorders() -> list[str]:
    """Return the available recorders."""
    return ["python", "native"] if libraries.TORCH.available() else ["python"]


def without_purposes() -> None:
    """Let hooks mark no calls with their purposes, from the next start on."""

    def unmarked(*_: object, **__: object) -> Callable[[Any], Any]:
        return lambda original: original

    purposes.marking = purposes.marking_each = purposes.marking_by = unmarked
    purposes.Marked = lambda *_: nullcontext()  # type: ignore[assignment, misc]
    MarkedSources.install = lambda _: None  # type: ignore[assignment, method-assign]


@contextmanager
def traced(
    recorder: str, *, sites: bool = True, read: Callable[[Run, Path], None] | None = None, **settings: object
) -> Iterator[None]:
    """Trace into a log that is removed afterwards. Raise AssertionError if this recorder did not record."""
    set_environment(recorder=recorder, sites=int(sites), **settings)
    with tempfile.TemporaryDirectory() as directory:
        commtrace.start(directory)
        try:
            yield
        finally:
            commtrace.stop()
            torch_hook.remove_kernels()
        run = commtrace.open(directory)
        check(run, recorder)
        if read is not None:
            read(run, Path(directory))


def set_environment(**settings: object) -> None:
    """Set these settings of commtrace, and unset all others."""
    for name in [name for name in os.environ if name.startswith("COMMTRACE_")]:
        del os.environ[name]
    os.environ.update({f"COMMTRACE_{name.upper()}": str(value) for name, value in settings.items()})


def check(run: Run, recorder: str) -> None:
    """Assert that this recorder recorded every call."""
    (process,) = run.processes
    stats = process.tables.stats or {}
    assert process.tables.process.get("recorder") == recorder, process.tables.process
    assert int(str(stats["calls"])) > 0, stats
    assert not stats["dropped"], stats
    assert not stats["hook_errors"], stats["first_error"]


@contextmanager
def comm_debug_mode() -> Iterator[None]:
    """Count collectives with torch's CommDebugMode."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:
        yield
    assert mode.get_total_counts() > 0


@contextmanager
def profiler() -> Iterator[None]:
    """Record CPU activities with torch.profiler, without a schedule."""
    import torch.profiler as torch_profiler

    with torch_profiler.profile(activities=[torch_profiler.ProfilerActivity.CPU]) as profile:
        yield
    results: Any = profile.profiler
    assert any("c10d::" in event.name() for event in results.kineto_results.events())


def torch_sides() -> dict[str, Switch]:
    """Return torch's own tools."""
    return {"CommDebugMode": comm_debug_mode, "torch.profiler": profiler}


def deepspeed_comm() -> Any:
    """Return DeepSpeed's communication module, initialized on torch's group; None if DeepSpeed is not installed."""
    if find_spec("deepspeed") is None:
        return None
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise the logger synchronizes a GPU that is not used here
    from deepspeed import comm
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    with redirect_stdout(io.StringIO()):  # it prints what it builds
        comm.init_distributed("gloo", verbose=False)
    return comm


@contextmanager
def comms_logger() -> Iterator[None]:
    """Log every call with DeepSpeed's comms logger, without printing.

    Its timers are emptied afterwards, so that each use is like the start of a run: at each new time, the logger adds up
    all earlier ones, so each call costs more than the one before.
    """
    from deepspeed import comm

    comm.configure(enabled=True, prof_all=True, verbose=False, debug=False)
    try:
        yield
    finally:
        comm.configure(enabled=False)
    assert comm.comm.comms_logger.has_data()
    comm.comm.comms_logger.reset_data()
    comm.comm.timers.timers.clear()
