"""Exit statuses of all commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from commtrace.analyses.compare.verdict import Verdict

AS_EXPECTED: Final = 0
"""The command did what it was asked to do, also for a partial log. In a comparison: nothing differs."""
DIFFERENT: Final = 1
"""A call differs."""
FAILED: Final = 2
"""The command failed: a log cannot be read, for example. argparse has the same status for wrong arguments."""
NOT_COMPARED: Final = 3
"""Nothing differs, but some calls could not be compared."""
STUCK: Final = 4
"""The job hangs, or a rank died while others were waiting for it."""
PROGRAM_FAILED: Final = 5
"""A process of the program ended by an exception, a signal, or a status other than 0."""
INTERRUPTED: Final = 130
"""The user interrupted the command: 128 and the number of SIGINT, as shells have it."""
PIPE_CLOSED: Final = 141
"""The reader of the output, such as `head`, ended before the command: 128 and the number of SIGPIPE, as in shells."""


def status_of(verdict: Verdict) -> int:
    """Return the exit status of a command that compares a run with expected calls."""
    return DIFFERENT if not verdict.equal else NOT_COMPARED if verdict.not_compared else AS_EXPECTED
