"""The functions of `import commtrace`. Nothing heavy is imported early: training processes import this."""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own costs every process that never communicates a millisecond or two
if TYPE_CHECKING:
    import os
    from contextlib import AbstractContextManager

    from commtrace.run import Run


def start(directory: str | os.PathLike[str] = "commtrace-logs") -> None:
    """Record from here on into `directory`, as `COMMTRACE=directory` in the environment does from the beginning.

    For notebooks and tests. Raises CommtraceError where tracing is on already, or where a COMMTRACE_* setting makes
    no sense.
    """
    from commtrace import startup

    startup.start(directory)


def stop() -> None:
    """Write out what is recorded, close the log, and take every hook out. Does nothing where tracing is off."""
    from commtrace import startup

    startup.stop()


def step() -> None:
    """A training step begins here. From the first call on, steps are counted by these calls alone."""
    from commtrace.progress import progress

    progress.step_begins()


def phase(name: str) -> AbstractContextManager[None]:
    """Calls within belong to this part of the step: "init", "forward", "backward", "optimizer" or "other".

    Raises CommtraceError for any other name.
    """
    from commtrace.progress import progress

    return progress.marked(name)


def open(directory: str | os.PathLike[str], *, recover: bool = True) -> Run:
    """Open the newest run in a log directory.

    A process that is killed leaves its last records in its host's shared memory. Opening its run on that host first
    recovers them: it writes them to the log and removes them from /dev/shm.

    Args:
        directory: What `COMMTRACE` named, or the directory of one run in it.
        recover: Whether to recover such records. False: open the log as it is, and write nothing.

    Returns:
        The run: `events()`, `table(name)`, `figure(name)`.

    Raises:
        CommtraceError: The directory holds no run that can be read.
    """
    from commtrace.run import open_run

    return open_run(directory, recover=recover)
