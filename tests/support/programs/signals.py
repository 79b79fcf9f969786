"""Calls interrupted by signals with handlers that communicate or raise: signals.py KIND."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

import torch
import torch.distributed as dist


class AlarmError(Exception):
    """Raised by the handler."""


handled = depth = 0
armed = False


def communicate(number: int, frame: FrameType | None) -> None:
    """Communicate, like a program that tells other ranks to stop."""
    global handled, depth
    if depth == 5:
        return  # if a call takes longer than the time between two signals, handlers would nest without end
    depth += 1
    dist.all_reduce(torch.ones(2))
    handled += 1
    depth -= 1


def raise_alarm(number: int, frame: FrameType | None) -> None:
    """Raise, like a program with a time limit on each call."""
    global handled, armed
    if armed:
        armed = False
        handled += 1
        raise AlarmError


dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
signal.signal(signal.SIGALRM, communicate if sys.argv[1] == "communicate" else raise_alarm)
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
