"""`wire_bytes` against the bytes that the kernel counted, in a network namespace where nobody else talks.

What a packet carries beside its data (headers, acknowledgements) and the barriers around a measurement add at most 5%;
fewer bytes than `wire_bytes` says are impossible, because it says what any algorithm must send.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from typing import NamedTuple

import pytest
from hook_programs.runs import Call, ran

from commtrace.volume import wire_bytes

pytest.importorskip("torch")

OVERHEAD = 0.05

# What gloo sends for one byte that must be sent. Its reduce_scatter is an all_reduce of the whole input, of which each
# rank keeps its share: 2(n-1)/n of it where (n-1)/n would do.
GLOO = {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 2, "broadcast": 1, "all_to_all": 1, "send": 1}


class Measured(NamedTuple):
    """One operation: the calls of all ranks, and what the kernel sent meanwhile, as the ranks read it."""

    calls: list[Call]
    sent: list[int]


# The command behind it runs without any other network than a loopback interface.
OWN_NETWORK = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


@functools.cache
def obstacle() -> str:
    """Why there can be no network namespace here; "" where there can."""
    if missing := [name for name in ("unshare", "ip") if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)}"
    tried = subprocess.run([*OWN_NETWORK, "true"], capture_output=True, text=True, timeout=20, check=False)
    return "" if tried.returncode == 0 else f"no network namespace: {tried.stderr.strip()}"


@functools.cache
def measured(ranks: int, recorder: str) -> dict[str, Measured]:
    """By operation."""
    found = ran("wire", recorder, ranks=ranks, before=OWN_NETWORK)
    return {
        name: Measured(
            [call for each in found for call in each.log.between(*each.told[name][:2])],
            [each.told[name][2] for each in found],
        )
        for name in GLOO
    }


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
@pytest.mark.parametrize("name", GLOO)
def test_the_kernel_sent_what_the_log_says(name: str, ranks: int, recorder: str) -> None:
    if obstacle():
        pytest.skip(obstacle())
    calls, sent = measured(ranks, recorder)[name]
    # Four times each; a message has two ends, which are recorded both.
    assert len([call for call in calls if call.op == name]) == 4 * (1 if name == "send" else ranks)
    expected = GLOO[name] * sum(wire_bytes(call.op, call.payload, call.local, len(call.ranks)) for call in calls)
    assert expected >= 8 << 20
    for each in sent:
        assert expected <= each <= expected * (1 + OVERHEAD)
