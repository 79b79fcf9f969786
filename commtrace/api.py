"""The functions of `import commtrace`. Training processes import this module: it imports pandas only when needed."""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing takes a millisecond or two in every process
if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    import pandas as pd

    from commtrace.run import Run


def start(directory: str | os.PathLike[str] = "commtrace-logs") -> None:
    """Start recording in this process, as COMMTRACE=directory in the environment does from its beginning.

    Args:
        directory: Where the log goes. It is created with the first communication call.

    Raises:
        CommtraceError: Tracing is on already, or a COMMTRACE_* variable has an invalid value.
    """
    from commtrace import startup

    startup.start(directory)


def stop() -> None:
    """Write all records, close the log and remove every hook. Does nothing while tracing is off."""
    from commtrace import startup

    startup.stop()


def step() -> None:
    """Mark the beginning of a training step. From the first call on, only these calls count steps."""
    from commtrace.progress import progress

    progress.step_begins()


def phase(name: str) -> AbstractContextManager[None]:
    """Mark the calls in a `with` block as a phase of the training step.

    Args:
        name: "init", "forward", "backward", "optimizer" or "other".

    Raises:
        CommtraceError: There is no such phase.
    """
    from commtrace.progress import progress

    return progress.named_phase(name)


def open(directory: str | os.PathLike[str], *, recover: bool = True) -> Run:
    """Open the newest run in a log directory.

    A killed process leaves its last records in the shared memory of its host. Opening its run on that host first
    recovers them: it writes them to the log and removes them from /dev/shm.

    Args:
        directory: What COMMTRACE named, or the directory of one run in it.
        recover: Whether to recover such records. False: open the log as it is, and write nothing.

    Returns:
        The run, with `events()`, `table(name)` and `figure(name)`.

    Raises:
        LogError: The directory holds no run that can be read.
    """
    from commtrace.run import open_run

    return open_run(directory, recover=recover)


def compare(runs: Mapping[str, Run]) -> dict[str, pd.DataFrame]:
    """Compare runs side by side.

    Args:
        runs: Runs by the names that the tables show.

    Returns:
        The tables of `commtrace report DIR DIR ... --json` by name.
    """
    from commtrace.analyses.comparison import compare as compare_runs

    return compare_runs(runs)


def scaling(runs: Mapping[str, Run]) -> dict[str, pd.DataFrame]:
    """Compare runs of one program on different numbers of ranks.

    Args:
        runs: Runs by the names that the tables show.

    Returns:
        The tables of `commtrace scaling DIR DIR ... --json` by name.

    Raises:
        CommtraceError: The runs cannot be compared.
    """
    from commtrace.analyses.scaling import scaling as scaling_tables

    return scaling_tables(runs)
