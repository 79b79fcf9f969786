"""Free TCP ports for the programs of tests."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections import deque
from typing import Final

_reserved: Final[deque[socket.socket]] = deque(maxlen=100)


def free_port() -> int:
    """Return a TCP port that no process listens on, below those that the kernel assigns to connections.

    A program may take seconds before it listens. Until then the port is bound here, so that no other test gets it;
    stores set SO_REUSEADDR, and can therefore bind it, too.
    """
    while True:
        probe = socket.socket()
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", secrets.randbelow(22_000) + 10_000))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _reserved.append(probe)
            return int(probe.getsockname()[1])
