"""commtrace: what a distributed training program communicated, and why.

Nothing in the program changes; an environment variable switches recording on:

    COMMTRACE=logs/run1 torchrun --nproc-per-node 2 train.py
    commtrace report logs/run1

or, in Python and Jupyter:

    import commtrace
    run = commtrace.open("logs/run1")
    run.events()                        # a pandas DataFrame, one row per call
    run.table("volume_by_operation")    # any table of the report

A program may mark what commtrace cannot know by itself: `commtrace.step()` where a training step begins,
`with commtrace.phase("forward"):` around a part of it. Both cost nothing while tracing is off.
"""

from __future__ import annotations

import os

# In a checkout, `hooks/` and `analyses/` lie beside this folder and not in it; installed, they are sub-packages.
if not os.path.isdir(os.path.join(__path__[0], "hooks")):
    __path__.append(os.path.dirname(__path__[0]))

from commtrace.api import open, phase, start, step, stop
from commtrace.errors import CommtraceError

__version__ = "0.1.0"
__all__ = ["CommtraceError", "open", "phase", "start", "step", "stop"]
