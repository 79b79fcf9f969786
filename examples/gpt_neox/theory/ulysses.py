"""Ulysses (arXiv 2309.14509) by DeepSpeed's DistributedAttention: calls among ranks that share sequences.

Queries, keys, values and outputs of a layer take one all_to_all each, forward and again backward. The losses of the
sequence parts are gathered. Without ZeRO, the optimizer's calls are among the ranks that share a sequence, because
DeepSpeed's own mpu (parallel_state_sp) returns them as the model-parallel group. Gradients are reduced among data- and
sequence-parallel ranks together, in fp32.

Assumed, as for tensor parallelism: every micro-batch has the configured size and length.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Final

from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import Job, NotPredictedError, element_size
from commtrace.theory.rules.deepspeed.engine import NORM
from commtrace.theory.rules.megatron import tensor_parallel as tensor
from commtrace.theory.rules.registry import DEEPSPEED, rule

from .closed_forms import ulysses_layer
from .recomputation import recomputed_passes

ROLE: Final = "sequence"
HEADS: Final = "exchange of attention heads and sequence parts"
LOSS: Final = "losses of the parts of the sequence"


def extend_prediction(job: Job, data: Prediction) -> Prediction:
    """Add calls among ranks that share sequences.

    Raise NotPredictedError if the job does not have the model's architecture, or also has a ring or experts.
    """
    job.require_architecture("Ulysses")
    if job.context > 1 or job.has_experts:
        raise NotPredictedError("Ulysses together with a ring or experts has no rules yet")
    own = (*exchanges(job), *losses(job), *optimizer_calls(job))
    role = norm_role(job)
    steps = (tuple(replace(call, role=role) if call.cause == NORM else call for call in step) for step in data.steps)
    data = replace(data, steps=tuple(steps))
    batch, length, hidden = tensor.batch_dimensions(job)
    layers, micro_batches = job.model.num_layers, job.micro_batches
    form = Fraction(layers * ulysses_layer(batch, length, hidden, job.sequence) * job.parameter_size)
    exact = total_wire_bytes(own, job.sequence, HEADS)
    levels = {
        "Ulysses: activations recomputed": exact / micro_batches,
        f"Ulysses: in each of {micro_batches} micro-batches": exact,
    }
    bars = [*level_bars(form, levels), *cause_bars(own, job.sequence, HEADS, prefix="Ulysses: ")]
    closed_form = WaterfallBar("Ulysses: 8 L b s h (n-1)/n^2", form)
    scheme = f"{data.scheme}, sequence-parallel over {job.sequence} (Ulysses)"
    others = {ROLE: job.sequence, "self": 1, "world": job.row.world_size}
    return tensor.combine_predictions(job, data, own, closed_form, bars, scheme, others)


def optimizer_calls(job: Job) -> list[ExpectedCall]:
    """Return the calls of the optimizer among ranks that share a sequence: none under ZeRO."""
    if job.row.zero_stage > 0 or not reduces_through_mpu(job):
        return []
    return [replace(call, role=ROLE) for call in (*tensor.fallback_overflow(job), *tensor.fallback_norm(job))]


@rule(
    "deepspeed.sequence.layer.DistributedAttention.forward; deepspeed.sequence.layer._SeqAllToAll.backward", DEEPSPEED
)
def exchanges(job: Job) -> list[ExpectedCall]:
    """Return the all_to_alls of queries, keys, values and outputs: b (s/n) h elements each, forward and backward."""
    batch, length, hidden = tensor.batch_dimensions(job)
    part = batch * (length // job.sequence) * hidden * job.parameter_size
    calls = 4 * job.model.num_layers * (2 + recomputed_passes(job))
    return [ExpectedCall("all_to_all", part, HEADS, calls, role=ROLE).times(job.micro_batches)]


@rule("deepspeed.sequence.cross_entropy.vocab_sequence_parallel_cross_entropy", DEEPSPEED)
def losses(job: Job) -> list[ExpectedCall]:
    """Return the all_gather of the losses: an fp32 number for each token of the sequences; backward sends nothing."""
    batch, length, _ = tensor.batch_dimensions(job)
    size = batch * length * element_size("float32")
    return [ExpectedCall("all_gather", size, LOSS, job.micro_batches, role=ROLE)]


@rule("deepspeed.utils.groups._get_sequence_data_parallel_group", DEEPSPEED)
def reduces_through_mpu(job: Job) -> bool:
    """Return whether all ranks reduce together: with an mpu, but not with a mesh (mesh_param)."""
    return job.ranks == job.row.data_parallel_size * job.sequence


@rule("deepspeed.utils.groups._get_data_parallel_group (None of parallel_state_sp)", DEEPSPEED)
def norm_role(job: Job) -> str:
    """Return the dimension of the norm: without ZeRO its group is None, torch's default group of all ranks."""
    return "world" if job.row.zero_stage == 0 and reduces_through_mpu(job) else "data"
