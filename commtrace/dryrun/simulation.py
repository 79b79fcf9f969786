"""Simulation of a rank in this process. `commtrace.startup` calls `install` when the program has imported torch.

The first process that imports torch is the rank. Processes that it starts are not: data loaders run as usual, but
communication in such a process is an error.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

from torch.distributed import distributed_c10d

from commtrace.errors import CommtraceError
from commtrace.patching import Patches
from commtrace.rank_ranges import format_rank_list
from commtrace.recording.session import session

from . import notices, simulated_cuda, torch_functions
from . import untouched_memory as memory
from .collectives import SimulatedCollectives
from .dispatch_mode import DryRunMode
from .fake_groups import SimulatedGroups
from .isolation import file_guard
from .isolation.policy import Writes
from .rank_messages import RankMessages
from .rank_processes import CUDA_REQUIRED
from .storage_set import StorageSet

VARIABLE: Final = "COMMTRACE_SIMULATED"
"""Environment variable, "PID:RUN:DEVICE:WRITES:FOLDER": the rank's process (0: none yet), the run, "cpu", "cuda" or
"any", what happens to files that it writes, and the folder of its messages."""


class SpawnedError(CommtraceError):
    """A process that a simulated rank started tries to communicate."""


class _Rank(NamedTuple):
    mode: DryRunMode
    collectives: SimulatedCollectives
    groups: SimulatedGroups


_rank: _Rank | None = None
_patches: Final = Patches()


def install() -> None:
    """Make this process the rank that RANK and WORLD_SIZE name. On errors, exit: the program must not run for real."""
    global _rank
    if _rank is not None or _patches:
        return
    pid, run, device, writes, folder = os.environ[VARIABLE].split(":", 4)
    _isolate(Writes(writes), folder)
    if pid not in ("0", str(os.getpid())):
        _refuse_groups()
        return
    try:
        os.environ[VARIABLE] = f"{os.getpid()}:{run}:{device}:{writes}:{folder}"
        _rank = _simulate(run, device, Writes(writes), Path(folder))
    except Exception as error:
        raise SystemExit(f"commtrace: this process cannot be simulated: {type(error).__name__}: {error}") from error
    os.register_at_fork(after_in_child=_in_child)
    atexit.register(_end)


def _isolate(writes: Writes, folder: str) -> None:
    """Explain refused writes and, in a private layer, rename directories that the kernel cannot."""
    if writes is not Writes.ALLOW:
        file_guard.install(writes, [folder, os.environ["COMMTRACE"], os.environ["COMMTRACE_SHM"]])
    if writes is Writes.PRIVATE:
        file_guard.install_renaming()


def uninstall() -> None:
    """Undo `install` in a process that is not a rank. A simulated rank remains one until it ends."""
    _patches.undo()


def _simulate(run: str, device: str, writes: Writes, folder: Path) -> _Rank:
    rank, world_size, devices_of_host = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    memory.configure_malloc()
    if not faulthandler.is_enabled():
        with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr is not a file
            faulthandler.enable()  # prints the stacks when `rank_processes` sends SIGABRT
    uncomputed = StorageSet()
    devices = simulated_cuda.install(devices_of_host) if device == "cuda" else None
    if device == "any":
        _watch_for_cuda(folder)
    simulated = _Rank(
        DryRunMode(uncomputed, devices),
        SimulatedCollectives(uncomputed, RankMessages(folder, rank)),
        SimulatedGroups(run, rank, world_size),
    )
    simulated.groups.install()
    simulated.collectives.install()
    torch_functions.install(uncomputed, save=writes is not Writes.ALLOW)
    simulated.mode.__enter__()  # type: ignore[no-untyped-call]
    return simulated


def _watch_for_cuda(folder: Path) -> None:
    """Create the file CUDA_REQUIRED if an exception that names CUDA, in its text or source line, ends the program."""

    def excepthook(kind: type[BaseException], error: BaseException, stack: TracebackType | None) -> None:
        lines = [str(error), *(frame.line or "" for frame in traceback.extract_tb(stack)[-1:])]
        if re.search("cuda|nccl|gpu|accelerator", " ".join(lines), re.IGNORECASE):
            (folder / CUDA_REQUIRED).touch()
        original(kind, error, stack)

    original, sys.excepthook = sys.excepthook, excepthook


def _end() -> None:
    """Add the notices, the groups of the job and what was computed to the log before it is closed."""
    if _rank is None or _rank.mode.forked:
        return
    recorder = session.recorder
    if recorder is not None:
        notices.record_notices()
        _rank.mode.flops.record()
        recorder.tables.add("topology", groups=[format_rank_list(ranks) for ranks in _rank.groups.ranks])


def _in_child() -> None:
    if _rank is not None:
        _rank.mode.forked = True
        _rank.groups.uninstall()
        _refuse_groups()


def _refuse_groups() -> None:
    """Make creating a process group an error in this process."""
    for name in ("rendezvous", "_new_process_group_helper"):
        _patches.wrap(distributed_c10d, name, _refusing)


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    def refused(*_: Any, **__: Any) -> None:
        raise SpawnedError(
            "a rank of a dry run started this process, which tries to communicate; a dry run starts each rank itself, "
            "as torchrun does: leave out launchers and multiprocessing.spawn"
        )

    return refused
