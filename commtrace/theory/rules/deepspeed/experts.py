"""DeepSpeed's engine with a mixture of experts: what it communicates of parameters and gradients besides other engines.

Gradients of experts are reduced among the ranks that have the same ones (`Job.copies`), by the rules of each ZeRO
stage. Their norms, and the overflow check without ZeRO, have calls of their own. Tokens are in no job.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from commtrace.theory.expected_calls import ExpectedCall, Prediction
from commtrace.theory.job import Job, refuse
from commtrace.theory.rules.registry import DEEPSPEED, rule

from .engine import NORM, OVERFLOW

ROLE: Final = "expert"


def check(job: Job) -> None:
    """Raise NotPredictedError for settings that have no rules yet."""
    settings = job.row.zero if job.row.zero_stage else None
    is_refused = settings is not None and not (settings.contiguous_gradients and settings.reduce_scatter)
    refuse((is_refused, "experts with reduce_scatter or contiguous_gradients off have no rules yet"))


def extend_parameters(job: Job, data: Prediction) -> Prediction:
    """Add the norms and the overflow check to a prediction, which then lacks the tokens, and bars of the waterfall.

    Raise NotPredictedError for settings without rules.
    """
    check(job)
    own = (*overflow_check(job), *expert_norms(job))
    scheme = f"{data.scheme}, experts over {job.expert_parallel_size} ranks"
    return replace(data, scheme=scheme, steps=tuple((*step, *own) for step in data.steps))


@rule("deepspeed.runtime.utils.CheckOverflow.has_overflow (with experts)", DEEPSPEED)
def overflow_check(job: Job) -> list[ExpectedCall]:
    """Return the all_reduce of the overflow check without ZeRO: one byte, in 16-bit precision only."""
    if job.row.zero_stage or job.row.precision == "fp32":
        return []
    return [ExpectedCall("all_reduce", 1, OVERFLOW, role=ROLE).among(job.expert_parallel_size)]


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer._average_expert_grad_norms", DEEPSPEED)
def expert_norms(job: Job) -> list[ExpectedCall]:
    """Return the all_reduces that average the norm of each expert group among the ranks that have the group."""
    if not job.row.zero_stage or not job.row.zero.compute_grad_norm:
        return []
    groups = [group for group in job.groups if job.parameters[group[0]].expert]
    return [ExpectedCall("all_reduce", 4, NORM).among(job.copies(job.parameters[group[0]])) for group in groups]
