"""Calls that signals interrupt, with handlers that communicate, or that raise: signals.py KIND."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

import torch
import torch.distributed as dist


class AlarmError(Exception):
    """What the handler raises."""


handled = depth = 0
armed = False


def communicate(number: int, frame: FrameType | None) -> None:
    """As a program that tells the others that it was told to stop."""
    global handled, depth
    if depth == 5:
        return  # where a call takes longer than the time between two signals, handlers would nest without end
    depth += 1
    dist.all_reduce(torch.ones(2))
    handled += 1
    depth -= 1


def complain(number: int, frame: FrameType | None) -> None:
    """As a program with a time limit on each call."""
    global handled, armed
    if armed:
        armed = False
        handled += 1
        raise AlarmError


dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
signal.signal(signal.SIGALRM, communicate if sys.argv[1] == "communicate" else complain)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0013)
calls = caught = 0
deadline = time.monotonic() + 2
while time.monotonic() < deadline:
    try:
        armed = True
        dist.all_reduce(torch.ones(4))
        armed = False
        calls += 1
    except AlarmError:
        caught += 1
signal.setitimer(signal.ITIMER_REAL, 0)
print(calls, handled, caught, flush=True)
