"""What a process records of the ends of others on its host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commtrace.recording import peer_watch, ring
from commtrace.recording.peer_watch import PeerWatch
from commtrace.recording.table_lines import TableLines

PEER = """
import os, sys
from pathlib import Path
from commtrace.recording import ring
own = ring.make_ring(16, sys.argv[1], "peer", {"run": "run", "stem": "rank00001-1", "pid": os.getpid()})
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("found_alive", [True, False])
def test_a_peer_that_began_after_the_last_search(
    found_alive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a short run, a peer may begin and end between two searches."""
    monkeypatch.setattr(peer_watch, "FIRST_SEARCH_SECONDS", 1000.0)
    own_ring = ring.make_ring(16, str(tmp_path), "own", {"run": "run", "stem": "rank00000-2", "pid": os.getpid()})
    tables = TableLines()
    watch = PeerWatch(own_ring, str(tmp_path), "run", 0, tables)
    peer = subprocess.Popen([sys.executable, "-c", PEER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert peer.stdout is not None
    assert peer.stdout.readline() == b"ready\n"
    if found_alive:
        watch.check()
        assert ends(tables) == []
    peer.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT)
    watch.check()
    (end,) = ends(tables)
    assert (end["stem"], end["rank"], end["pid"]) == ("rank00001-1", 1, peer.pid)
    assert end["status"] == (signal.SIGKILL if found_alive else None)
    watch.stop()
    assert len(ends(tables)) == 1
    own_ring.remove()
    peer.communicate()


def ends(tables: TableLines) -> list[dict[str, Any]]:
    """Return the rows of the table `peer_ends`."""
    rows = [json.loads(line) for line in tables.lines]
    return [row for row in rows if row["table"] == "peer_ends"]
