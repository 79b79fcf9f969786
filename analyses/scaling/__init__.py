"""Runs of one program on increasing numbers of ranks: step times, where the time goes, and what limits the scaling.

step_times        times and volumes of each rank's training steps, from the log
scaling_tables    a row per run and rank: speedup, efficiency, tokens per second, computation, communication, waiting
scaling_specs     descriptions of the tables
fits              Amdahl's law, latency and bandwidth fitted to the measured times, with their errors
setup_differences settings in which the runs differ, apart from their size
findings          what limits the scaling, in sentences
"""

from __future__ import annotations

from .scaling_tables import scaling

__all__ = ["scaling"]
