"""Program that isolates itself and then becomes a rank: `python -I -S -c BOOT ORDER COMMAND ...` (`policy`).

It imports little, because every rank starts with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from . import private_layer, system_calls, write_denial


def main() -> None:
    """Isolate this process as the order says, and replace it with the command."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    try:
        if order["writes"] == "private":
            private_layer.enter(order["layer"], order["shm_layer"], order["hidden"], order["shared"], order["used"])
        elif order["writes"] == "refuse":
            write_denial.deny_writes(order["shared"])
        # After the above, because a change of credentials resets it.
        system_calls.end_with_parent(signal.SIGKILL)
    except OSError as error:
        sys.exit(f"commtrace: the rank cannot be isolated: {error.filename}: {error.strerror}")
    if os.getppid() == order["parent"]:  # else it has ended already
        os.execv(sys.argv[2], sys.argv[2:])
