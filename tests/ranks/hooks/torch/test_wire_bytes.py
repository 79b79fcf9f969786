"""`wire_bytes` compared with the bytes that the kernel counted, in a network namespace without other traffic.

Headers, acknowledgements and the barriers around a measurement add at most 5%. Fewer bytes than `wire_bytes` are
impossible, because it is the least that any algorithm must send.
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

# Bytes that gloo sends for each byte that must be sent. Its reduce_scatter is an all_reduce of the whole input, of
# which each rank keeps its share: it sends 2(n-1)/n of the input instead of (n-1)/n.
GLOO = {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 2, "broadcast": 1, "all_to_all": 1, "send": 1}


class Measured(NamedTuple):
    """Calls of one operation on all ranks, and the bytes that the kernel sent during them, as each rank read them."""

    calls: list[Call]
    sent: list[int]


# Prefix of a command that runs with a loopback interface as its only network.
OWN_NETWORK = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


@functools.cache
def obstacle() -> str:
    """Return why no network namespace can be made here; "" if one can."""
    if missing := [name for name in ("unshare", "ip") if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)}"
    tried = subprocess.run([*OWN_NETWORK, "true"], capture_output=True, text=True, timeout=20, check=False)
    return "" if tried.returncode == 0 else f"no network namespace: {tried.stderr.strip()}"


@functools.cache
def measured(ranks: int, recorder: str) -> dict[str, Measured]:
    """Return the measured calls and bytes by operation."""
    runs = ran("wire", recorder, ranks=ranks, before=OWN_NETWORK)
    return {
        name: Measured(
            [call for run in runs for call in run.log.between(*run.told[name][:2])],
            [run.told[name][2] for run in runs],
        )
        for name in GLOO
    }


@pytest.mark.long
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
@pytest.mark.parametrize("name", GLOO)
def test_the_kernel_sent_what_the_log_says(name: str, ranks: int, recorder: str) -> None:
    if obstacle():
        pytest.skip(obstacle())
    calls, sent = measured(ranks, recorder)[name]
    # Each operation was called four times; only one rank sends a message.
    assert len([call for call in calls if call.op == name]) == 4 * (1 if name == "send" else ranks)
    expected = GLOO[name] * sum(wire_bytes(call.op, call.payload, call.local, len(call.ranks)) for call in calls)
    assert expected >= 8 << 20
    for sent_bytes in sent:
        assert expected <= sent_bytes <= expected * (1 + OVERHEAD)
