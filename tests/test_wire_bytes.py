"""`wire_bytes` against the bytes that the kernel counted, in a network namespace where nobody else talks.

What a packet carries beside its data (headers, acknowledgements) and the barriers around a measurement add at most 5%;
fewer bytes than `wire_bytes` says are impossible, because it says what any algorithm must send.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import processes
import pytest
from hook_programs.runs import FOLDER, Call, logs

from commtrace.volume import wire_bytes

pytest.importorskip("torch")

OVERHEAD = 0.05

# What gloo sends for one byte that must be sent. Its reduce_scatter is an all_reduce of the whole input, of which each
# rank keeps its share: 2(n-1)/n of it where (n-1)/n would do.
GLOO = {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 2, "broadcast": 1, "all_to_all": 1, "send": 1}

_folders: list[tempfile.TemporaryDirectory[str]] = []


class Measured(NamedTuple):
    """One operation: the calls of all ranks, and what the kernel sent meanwhile, as the ranks read it."""

    calls: list[Call]
    sent: list[int]


def in_a_network_of_its_own(command: str) -> list[str]:
    """The same command without any other network than a loopback interface."""
    return ["unshare", "--net", "sh", "-c", f"ip link set lo up && exec {command}"]


@functools.cache
def obstacle() -> str:
    """Why there can be no network namespace here; "" where there can."""
    if missing := [name for name in ("unshare", "ip") if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)}"
    tried = subprocess.run(in_a_network_of_its_own("true"), capture_output=True, text=True, timeout=20, check=False)
    return "" if tried.returncode == 0 else f"no network namespace: {tried.stderr.strip()}"


@functools.cache
def measured(ranks: int) -> dict[str, Measured]:
    """By operation."""
    _folders.append(tempfile.TemporaryDirectory())
    folder = Path(_folders[-1].name)
    command = f"{sys.executable} {FOLDER / 'launch.py'} {ranks} {FOLDER / 'wire.py'} {folder}"
    result = processes.run(in_a_network_of_its_own(command), limit=100, COMMTRACE=folder / "log")
    assert result.status == 0, result.err[-6000:]
    told = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    both = list(zip(told, logs(folder / "log"), strict=True))
    return {
        name: Measured(
            [call for each, log in both for call in log.between(*each[name][:2])], [each[name][2] for each in told]
        )
        for name in GLOO
    }


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", GLOO)
def test_the_kernel_sent_what_the_log_says(name: str, ranks: int) -> None:
    if obstacle():
        pytest.skip(obstacle())
    calls, sent = measured(ranks)[name]
    # Four times each; a message has two ends, which are recorded both.
    assert len([call for call in calls if call.op == name]) == 4 * (1 if name == "send" else ranks)
    expected = GLOO[name] * sum(wire_bytes(call.op, call.payload, call.local, len(call.ranks)) for call in calls)
    assert expected >= 8 << 20
    for each in sent:
        assert expected <= each <= expected * (1 + OVERHEAD)
