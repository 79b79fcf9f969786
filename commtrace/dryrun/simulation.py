"""Makes this process a simulated rank. `commtrace.startup` calls `install` when the program has imported torch.

The first process that does so is the rank. What it starts is not: a loader of data is left alone, and who communicates
there gets an error.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch.distributed import distributed_c10d

from commtrace.errors import CommtraceError
from commtrace.patching import Patches
from commtrace.recording.session import session

from . import notices
from . import torch_functions as requests
from . import untouched_memory as memory
from .collectives import SimulatedCollectives
from .dispatch_mode import DryRunMode
from .process_groups import GroupTopology, SimulatedGroups
from .rank_messages import RankMessages
from .uncomputed_storages import UncomputedStorages

VARIABLE: Final = "COMMTRACE_SIMULATED"
"""Of the environment: "PID:RUN:FOLDER", the process that has become the rank (0: none yet), the run, its mail."""


class SpawnedError(CommtraceError):
    """A process that a simulated rank has started wants to communicate."""


class _Rank(NamedTuple):
    mode: DryRunMode
    collectives: SimulatedCollectives
    groups: SimulatedGroups
    topology: GroupTopology


_rank: _Rank | None = None
_patches: Final = Patches()


def install() -> None:
    """Become the rank that RANK and WORLD_SIZE say. Ends the process where that cannot be: nothing may run for real."""
    global _rank
    if _rank is not None or _patches:
        return
    pid, run, folder = os.environ[VARIABLE].split(":", 2)
    if pid not in ("0", str(os.getpid())):
        _refuse()
        return
    try:
        os.environ[VARIABLE] = f"{os.getpid()}:{run}:{folder}"
        _rank = _simulate(run, Path(folder), os.environ)
    except Exception as error:
        raise SystemExit(f"commtrace: this process cannot be simulated: {type(error).__name__}: {error}") from error
    os.register_at_fork(after_in_child=_in_child)
    atexit.register(_end)


def uninstall() -> None:
    """As `startup` has hooks taken out; a simulated rank stays one to its end."""
    _patches.undo()


def _simulate(run: str, folder: Path, environ: Mapping[str, str]) -> _Rank:
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    memory.configure_malloc()
    if not faulthandler.is_enabled():
        with contextlib.suppress(AttributeError, OSError, ValueError):  # a stderr that is no file
            faulthandler.enable()  # where it was, when it is ended: `ranks`
    unknown, topology = UncomputedStorages(), GroupTopology()
    simulated = _Rank(
        DryRunMode(unknown),
        SimulatedCollectives(unknown, RankMessages(folder, rank)),
        SimulatedGroups(run, rank, world_size, topology),
        topology,
    )
    simulated.groups.install()
    simulated.collectives.install()
    requests.install(unknown)
    simulated.mode.__enter__()  # type: ignore[no-untyped-call]
    return simulated


def _end() -> None:
    """Before the log is closed: what was asked for in vain, and how the job is divided."""
    if _rank is None or _rank.mode.forked:
        return
    recorder = session.recorder
    if recorder is not None:
        notices.record_notices()
        recorder.tables.add("topology", groups=[[*ranks] for ranks in _rank.topology])


def _in_child() -> None:
    if _rank is not None:
        _rank.mode.forked = True
        _rank.groups.uninstall()
        _refuse()


def _refuse() -> None:
    """No process group is made in this process."""
    for name in ("rendezvous", "_new_process_group_helper"):
        _patches.wrap(distributed_c10d, name, _refusing)


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    def refused(*_: Any, **__: Any) -> None:
        raise SpawnedError(
            "a rank of a dry run has started this process, which wants to communicate; a dry run starts each rank "
            "itself, from a script that is one rank, as torchrun does: leave out launchers and multiprocessing.spawn"
        )

    return refused
