"""delayed.py [RANK PHASE MILLISECONDS STEPS]: a training with mpi4py whose computation is sleep, and one late rank.

PHASE: forward or backward. STEPS: "all", or step numbers such as "5,9".
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from mpi4py import MPI

import commtrace

STEPS = 14
SECONDS = {"forward": 0.02, "backward": 0.03}

RANK, PHASE, MILLISECONDS, AT = sys.argv[1:] or ("-1", "", "0", "all")
WORLD = MPI.COMM_WORLD
given, taken = np.ones(1000), np.zeros(1000)
norm: Any = np.zeros(1)

for step in range(STEPS):
    commtrace.step()
    for phase in SECONDS:
        with commtrace.phase(phase):
            for _ in range(2):
                time.sleep(SECONDS[phase])
                if WORLD.Get_rank() == int(RANK) and phase == PHASE and (AT == "all" or str(step) in AT.split(",")):
                    time.sleep(float(MILLISECONDS) / 1000)
                WORLD.Allreduce(given, taken)
    with commtrace.phase("optimizer"):
        WORLD.Bcast(norm, 0)
