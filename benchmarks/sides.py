"""What can be switched on around communication, and off again: commtrace, and the tools beside it.

Each is a context manager, and says so by an error where it has seen nothing: a tool that is not on costs nothing.
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
from commtrace.hooks.native import libraries
from commtrace.hooks.torch import hook as torch_hook
from commtrace.run import Run

Switch = Callable[[], AbstractContextManager[object]]

bare: Switch = nullcontext


def commtrace_sides(*, read: Callable[[str, Run, Path], None] | None = None) -> dict[str, Switch]:
    """Each recorder that there is, with and without call sites. `read` is given its name, log and folder."""
    made: dict[str, Switch] = {}
    for recorder in recorders():
        for sites, words in ((True, "with"), (False, "without")):
            name = f"commtrace, {recorder}, {words} call sites"
            made[name] = partial(traced, recorder, sites=sites, read=None if read is None else partial(read, name))
    return made


def summary_sides() -> dict[str, Switch]:
    """Each recorder with COMMTRACE_MODE=summary, which costs a call nothing else."""
    return {f"commtrace, {name}, summary": partial(traced, name, mode="summary") for name in recorders()}


def recorders() -> list[str]:
    """The recorders that there are: `commtrace build` makes the native one."""
    return ["python", "native"] if libraries.TORCH.path().exists() else ["python"]


@contextmanager
def traced(
    recorder: str, *, sites: bool = True, read: Callable[[Run, Path], None] | None = None, **settings: object
) -> Iterator[None]:
    """commtrace, into a log that is removed afterwards. Raises AssertionError where this recorder did not record."""
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
    """These settings of commtrace, and no others."""
    for name in [name for name in os.environ if name.startswith("COMMTRACE_")]:
        del os.environ[name]
    os.environ.update({f"COMMTRACE_{name.upper()}": str(value) for name, value in settings.items()})


def check(run: Run, recorder: str) -> None:
    """Every call was recorded, by this recorder."""
    (process,) = run.processes
    stats = process.tables.stats or {}
    assert process.tables.process.get("recorder") == recorder, process.tables.process
    assert int(str(stats["calls"])) > 0, stats
    assert not stats["dropped"], stats
    assert not stats["hook_errors"], stats["first_error"]


@contextmanager
def comm_debug_mode() -> Iterator[None]:
    """torch's counter of collectives."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:
        yield
    assert mode.get_total_counts() > 0


@contextmanager
def profiler() -> Iterator[None]:
    """torch's profiler, of the processor's activities, as it is used without a schedule."""
    import torch.profiler as torch_profiler

    with torch_profiler.profile(activities=[torch_profiler.ProfilerActivity.CPU]) as profile:
        yield
    results: Any = profile.profiler
    assert any("c10d::" in event.name() for event in results.kineto_results.events())


def torch_sides() -> dict[str, Switch]:
    """What torch brings along."""
    return {"CommDebugMode": comm_debug_mode, "torch.profiler": profiler}


def deepspeed_comm() -> Any:
    """DeepSpeed's module of communication calls, upon the group that torch has; None where it is not installed."""
    if find_spec("deepspeed") is None:
        return None
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # the logger would synchronise a GPU that has no part in this
    from deepspeed import comm
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    with redirect_stdout(io.StringIO()):  # it prints what it has built
        comm.init_distributed("gloo", verbose=False)
    return comm


@contextmanager
def comms_logger() -> Iterator[None]:
    """DeepSpeed's comms logger: every call, nothing printed.

    With empty timers, as at the start of a run: the logger adds up all the times that it has taken whenever it takes
    another one, so that each call costs more than the one before.
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
