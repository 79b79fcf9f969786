"""Builds of a native library that are killed or run simultaneously."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import processes

from commtrace.hooks.native.libraries import MPI

BUILD = "from commtrace.hooks.native.libraries import MPI; MPI.build()"
COMPILER = """#!/bin/sh
# Counts compilations, and leaves a file where the compiler would.
echo >> "$0.calls"
sleep 0.2
for made; do :; done
echo > "$made"
"""


def test_killed_and_simultaneous_builds_leave_one_library(tmp_path: Path) -> None:
    compiler, cache = tmp_path / "compiler", tmp_path / "cache"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    environment = processes.environment(XDG_CACHE_HOME=cache, CXX=compiler)

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", BUILD], env=environment, start_new_session=True)

    def unfinished() -> set[Path]:
        return set(cache.glob("commtrace/*building-*"))

    left: set[Path] = set()
    for _ in range(3):
        with start() as killed:
            processes.wait_for(lambda: unfinished() - left)  # noqa: B023 - called before the next round
            killed.kill()
        left = unfinished()
        assert len(left) == 1  # each build removes what the previous one left
        processes.wait_for(lambda: not processes.members(killed.pid))
    calls = Path(f"{compiler}.calls")
    before = len(calls.read_text()) if calls.exists() else 0
    builds = [start() for _ in range(6)]
    assert [build.wait(60) for build in builds] == [0] * len(builds)

    [folder] = (cache / "commtrace").iterdir()
    assert [path.name for path in folder.iterdir()] == [f"{MPI.name}.so"]
    assert len(calls.read_text()) - before == len(MPI.sources) + 1  # one build: each source, then the link
