"""Calls that are repeated where activations are recomputed."""

from __future__ import annotations

from commtrace.theory.job import Job
from commtrace.theory.rules.registry import TORCH, rule


@rule("torch.utils.checkpoint.CheckpointFunction (calls before the last sum); "
      "torch.utils.checkpoint._checkpoint_without_reentrant_generator (calls before the last sum)",
      TORCH)  # fmt: skip
def recomputed_passes(job: Job) -> int:
    """Return how often recomputation, reentrant or not, repeats the calls of a layer before its last sum.

    These are the all_gathers of sequence parallelism, attention's all_to_alls, and the all_to_alls of experts.
    """
    return 1 if job.model.checkpoint_activations else 0
