"""Exit statuses of commands. 2 is argparse's, for wrong arguments."""

from __future__ import annotations

from typing import Final

EQUAL: Final = 0
DIFFERENT: Final = 1
"""A call differs. Also the status of every command that fails: a log cannot be read, for example."""
NOT_COMPARED: Final = 3
"""Nothing differs, but some calls could not be compared."""
STUCK: Final = 4
"""The job hangs."""
