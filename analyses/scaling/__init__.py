"""Runs of one program on more and more ranks: what a training step takes, where its time goes, how far that would go.

steps       times and volumes of each rank's training steps, from the log
tables      one row a run, one row a rank: speedup, efficiency, tokens a second, compute, communication, waiting
fits        Amdahl's law, and latency and bandwidth, through what was measured, with their errors
words       what stops the scaling, in sentences
"""

from __future__ import annotations

from .scaling_tables import scaling

__all__ = ["scaling"]
