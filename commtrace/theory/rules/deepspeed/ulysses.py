"""Ulysses (arXiv 2309.14509) by DeepSpeed's DistributedAttention: what ranks that share sequences send.

An all_to_all for each of queries, keys, values and outputs of a layer, forward and again backward; the losses of the
parts are gathered; and without ZeRO the optimizer asks the ranks that share a sequence as if they shared a model,
because DeepSpeed's own unit (parallel_state_sp) names them so. Gradients are reduced among data- and sequence-parallel
ranks together, in fp32.

Assumed, as for tensor parallelism: every micro-batch has the configured size and length.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Final

from commtrace.theory.closed_forms import ulysses_layer
from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import Job, NotPredictedError, element_size
from commtrace.theory.rules.megatron import tensor_parallel as tensor
from commtrace.theory.rules.registry import DEEPSPEED, TORCH, rule

from .engine import NORM, parameter_size

ROLE: Final = "sequence"
HEADS: Final = "heads in place of parts of the sequence"
LOSS: Final = "losses of the parts of the sequence"


def applies(job: Job) -> bool:
    """Whether ranks share sequences as DeepSpeed knows it."""
    return job.sequence > 1


def extend_prediction(job: Job, data: Prediction) -> Prediction:
    """The prediction of a job, from what it does among all ranks that reduce gradients together.

    Raises NotPredictedError where the job does not have the model's architecture, or has one without rules.
    """
    if "model" not in job.row:
        raise NotPredictedError("Ulysses of a model that does not say its architecture (neox_args) has no rules yet")
    if job.context > 1 or job.row.get("moe"):
        raise NotPredictedError("Ulysses together with a ring or experts has no rules yet")
    own = (*exchanges(job), *losses(job), *scalars(job))
    form, bars = _bars(job, own)
    scheme = f"{data.scheme}, sequence-parallel over {job.sequence} (Ulysses)"
    others = {ROLE: job.sequence, "self": 1, "world": int(job.fact("world_size"))}
    return tensor.combine_predictions(job, _with_norm(job, data), own, form, bars, scheme, others)


def _with_norm(job: Job, data: Prediction) -> Prediction:
    role = norm_role(job)
    steps = (tuple(replace(one, role=role) if one.cause == NORM else one for one in step) for step in data.steps)
    return replace(data, steps=tuple(steps))


def scalars(job: Job) -> list[ExpectedCall]:
    """What the optimizer compares among ranks that share a sequence: nothing under ZeRO."""
    if int(job.fact("zero_stage")) > 0 or not reduces_through_mpu(job):
        return []
    found = [*tensor.fallback_overflow(job), *tensor.fallback_norm(job)]
    return [replace(one, role=ROLE) for one in found]


def _bars(job: Job, own: tuple[ExpectedCall, ...]) -> tuple[WaterfallBar, list[WaterfallBar]]:
    batch, length, hidden = tensor.batch_dimensions(job)
    layers, steps = int(job.model("num_layers")), tensor.micro_batches(job)
    form = layers * ulysses_layer(batch, length, hidden, job.sequence) * parameter_size(job)
    exact = total_wire_bytes((one for one in own if one.cause == HEADS), job.sequence)
    levels = {"Ulysses: activations recomputed": exact / steps, f"Ulysses: in each of {steps} micro-batches": exact}
    rest = [one for one in own if one.cause != HEADS]
    bars = [*level_bars(Fraction(form), levels), *cause_bars(rest, job.sequence, "Ulysses: ")]
    return WaterfallBar("Ulysses: 8 L b s h (n-1)/n^2", Fraction(form)), bars


# --- rules ----------------------------------------------------------------------------------------------------------


@rule(
    "deepspeed.sequence.layer.DistributedAttention.forward; deepspeed.sequence.layer._SeqAllToAll.backward", DEEPSPEED
)
def exchanges(job: Job) -> list[ExpectedCall]:
    """Of queries, keys, values, outputs: a rank's part of the sequence with all heads, b (s/n) h; as much backward."""
    batch, length, hidden = tensor.batch_dimensions(job)
    part = batch * (length // job.sequence) * hidden * parameter_size(job)
    calls = 4 * int(job.model("num_layers")) * (2 + recomputed_attention(job))
    return [ExpectedCall("all_to_all", part, HEADS, calls, role=ROLE).times(tensor.micro_batches(job))]


@rule("torch.utils.checkpoint.CheckpointFunction (attention); "
      "torch.utils.checkpoint._checkpoint_without_reentrant_generator (attention)", TORCH)  # fmt: skip
def recomputed_attention(job: Job) -> int:
    """Recomputation repeats a layer's attention, whichever way is taken: the MLP behind it is what backward needs."""
    return 1 if job.model("checkpoint_activations", False) else 0


@rule("deepspeed.sequence.cross_entropy.vocab_sequence_parallel_cross_entropy", DEEPSPEED)
def losses(job: Job) -> list[ExpectedCall]:
    """An fp32 number for each token of the whole sequences; backward each rank takes its own part."""
    batch, length, _ = tensor.batch_dimensions(job)
    size = batch * length * element_size("float32")
    return [ExpectedCall("all_gather", size, LOSS, tensor.micro_batches(job), role=ROLE)]


@rule("deepspeed.utils.groups._get_sequence_data_parallel_group", DEEPSPEED)
def reduces_through_mpu(job: Job) -> bool:
    """A unit (mpu) has all ranks reduce together; a mesh (mesh_param) those at the same place in the sequence."""
    return job.ranks == int(job.fact("data_parallel_size")) * job.sequence


@rule("deepspeed.utils.groups._get_data_parallel_group (None of parallel_state_sp)", DEEPSPEED)
def norm_role(job: Job) -> str:
    """Without ZeRO the norm is averaged in no group at all, which is torch's own, of everyone."""
    return "world" if int(job.fact("zero_stage")) == 0 and reduces_through_mpu(job) else "data"
