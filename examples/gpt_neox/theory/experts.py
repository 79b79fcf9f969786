"""Mixtures of experts by DeepSpeed's MoE (arXiv 2201.05596): calls among ranks that have different experts.

Each layer with experts makes two all_to_alls, dispatch and combine, forward and again backward. Their size follows from
the experts' capacity where tokens beyond it are dropped. Otherwise it depends on the data, and bounds are predicted.
Gradients of experts are reduced among the ranks that have the same ones (`Job.copies`), by commtrace's
rules for DeepSpeed's engine.

Assumed, as for tensor parallelism: every micro-batch has the configured size and length.
"""

from __future__ import annotations

import struct
from math import ceil
from typing import Final

from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import Job, element_size
from commtrace.theory.rules.deepspeed.experts import ROLE, check, expert_norms, overflow_check
from commtrace.theory.rules.megatron import tensor_parallel as tensor
from commtrace.theory.rules.registry import DEEPSPEED, GPT_NEOX, rule

from .closed_forms import expert_layer
from .recomputation import recomputed_passes

TOKENS: Final = "tokens to their experts and back"
CAPACITY: Final = "capacity for the expert that most tokens chose"


def extend_prediction(job: Job, data: Prediction) -> Prediction:
    """Add calls among ranks that have different experts.

    Raise NotPredictedError if the job does not have the model's architecture, or experts as DeepSpeed makes them.
    """
    job.require_architecture("a mixture of experts")
    check(job)
    own = (*exchanges(job), *capacities(job), *overflow_check(job), *expert_norms(job))
    steps, ranks = job.micro_batches, job.expert_parallel_size
    hidden, chosen = job.model.hidden_size, job.model.moe_top_k
    form = expert_layers(job) * expert_layer(micro_batch_tokens(job), hidden, chosen, ranks) * job.parameter_size
    exact = total_wire_bytes(own, ranks, TOKENS) / steps
    label = "experts: capacity" if job.model.moe_token_dropping else "experts: capacity, at the most"
    levels = {
        label: exact * 4 / (4 + 2 * recomputed_passes(job)),
        "experts: activations recomputed": exact,
        f"experts: in each of {steps} micro-batches": exact * steps,
    }
    bars = [*level_bars(form, levels), *cause_bars(own, ranks, TOKENS, prefix="experts: ")]
    closed_form = WaterfallBar("experts: 4 k T h (E-1)/E a layer", form)
    scheme = f"{data.scheme}, {job.model.moe_num_experts} experts over {ranks}"
    return tensor.combine_predictions(job, data, own, closed_form, bars, scheme, {ROLE: ranks, "self": 1})


def micro_batch_tokens(job: Job) -> int:
    """Return the tokens of a rank's micro-batch."""
    batch, length, _ = tensor.batch_dimensions(job)
    return batch * length


def _single(value: float) -> float:
    """Round to a 32-bit float."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


@rule("megatron.model.transformer.ParallelTransformerLayer (moe_expert_interval)", GPT_NEOX)
def expert_layers(job: Job) -> int:
    """Return the number of layers with experts: every moe_expert_interval-th, from the first on."""
    return ceil(job.model.num_layers / job.model.moe_expert_interval)


@rule("deepspeed.moe.sharded_moe._capacity; deepspeed.moe.sharded_moe.top2gating; deepspeed.moe.sharded_moe.topkgating",
      DEEPSPEED)  # fmt: skip
def capacity(job: Job) -> int:
    """Return an expert's capacity: a share of a rank's tokens, in 32-bit floats, but at least moe_min_capacity."""
    factor = _single(job.model.moe_train_capacity_factor * job.model.moe_top_k)
    share = _single(_single(micro_batch_tokens(job) / job.model.moe_num_experts) * factor)
    return max(ceil(share), job.model.moe_min_capacity)


@rule(
    "deepspeed.moe.sharded_moe.top1gating (drop_tokens); deepspeed.moe.sharded_moe.topkgating (drop_tokens)", DEEPSPEED
)
def token_bounds(job: Job) -> tuple[int, int]:
    """Return the bounds of an expert's capacity without dropping: an even share of the tokens, and all tokens."""
    even = ceil(micro_batch_tokens(job) * job.model.moe_top_k / job.model.moe_num_experts)
    return even, micro_batch_tokens(job)


@rule("deepspeed.moe.sharded_moe.MOELayer.forward; deepspeed.moe.sharded_moe._AllToAll.backward", DEEPSPEED)
def exchanges(job: Job) -> list[ExpectedCall]:
    """Return the all_to_alls of a step: dispatch and combine, forward and backward, of every expert's capacity."""
    if job.expert_parallel_size == 1:
        return []
    token_bytes = job.model.moe_num_experts * job.model.hidden_size * job.parameter_size
    calls = (4 + 2 * recomputed_passes(job)) * expert_layers(job) * job.micro_batches
    if job.model.moe_token_dropping:
        return [ExpectedCall("all_to_all", capacity(job) * token_bytes, TOKENS, calls, role=ROLE)]
    least, most = token_bounds(job)
    return [ExpectedCall("all_to_all", most * token_bytes, TOKENS, calls, role=ROLE, min_payload=least * token_bytes)]


@rule("deepspeed.moe.sharded_moe.top1gating (all_reduce); deepspeed.moe.sharded_moe.top2gating (all_reduce)", DEEPSPEED)
def capacities(job: Job) -> list[ExpectedCall]:
    """Return the all_reduces of the capacity without dropping: one int64 in each forward pass of a layer."""
    if job.model.moe_token_dropping or job.expert_parallel_size == 1:
        return []
    calls = (1 + recomputed_passes(job)) * expert_layers(job) * job.micro_batches
    return [ExpectedCall("all_reduce", element_size("int64"), CAPACITY, calls, role=ROLE)]
