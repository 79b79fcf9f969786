"""Gradients in a backward pass: the order in which they become ready, and the buckets that frameworks put them into.

The sizes and limits of buckets are in the unit that the caller chooses, elements or bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from commtrace.theory.job import Job, ModelTensor

from .registry import DEEPSPEED, TORCH, WORKLOAD, rule

_ATTENTION: Final = "attention.dense.bias"
_MLP: Final = "mlp.dense_4h_to_h.bias"


@rule(
    "torch/nn/parallel/distributed.py DistributedDataParallel._ddp_init_helper (its comment on reversed buckets)", TORCH
)
def gradient_order(parameters: Sequence[ModelTensor]) -> list[ModelTensor]:
    """Return parameters in reverse registration order, with `autograd_order` within each module.

    This is the order of gradients if modules run in the order of their construction.
    """
    return autograd_order(list(reversed(parameters)))


@rule(
    "torch/csrc/autograd/engine.cpp Engine::evaluate_function; torch/csrc/autograd/functions/accumulate_grad.h", TORCH
)
def autograd_order(order: Sequence[ModelTensor]) -> list[ModelTensor]:
    """Return `order`, which has biases first, with the weight first in modules where autograd accumulates it first.

    A gradient that a node returns for a parameter is accumulated before any other node runs, in the order of the
    node's inputs. Norms and convolutions have (input, weight, bias): the weight is first. A linear layer has (bias,
    input, transposed weight), and the transposition is a node of its own, after the bias.
    """
    return _weight_first(order, lambda weight, bias: not _is_linear(weight, bias))


def backward_order(job: Job, parameters: Sequence[ModelTensor]) -> list[ModelTensor]:
    """Return `gradient_order` of a job's model, changed by `parallel_residual_order`."""
    return parallel_residual_order(job, gradient_order(parameters))


@rule("examples.gpt_neox.layers.Block", WORKLOAD)
def parallel_residual_order(job: Job, order: Sequence[ModelTensor]) -> list[ModelTensor]:
    """Return `order` with attention's bias after the MLP's, if one all_reduce sums both outputs (gpt_j_residual).

    Tensor-parallel layers then add both biases after that all_reduce, so that their gradients become ready together.
    GPT-NeoX adds them before it, each to its own output.
    """
    if job.tensor == 1 or job.is_gpt_neox or not job.model.gpt_j_residual:
        return list(order)
    attention = {parameter.name: parameter for parameter in order if parameter.name.endswith(_ATTENTION)}
    result: list[ModelTensor] = []
    for parameter in order:
        if parameter.name not in attention:
            result.append(parameter)
        if parameter.name.endswith(_MLP):
            result.append(attention[parameter.name.removesuffix(_MLP) + _ATTENTION])
    return result


@rule("deepspeed.runtime.zero.linear.LinearFunctionForZeroStage3.backward", DEEPSPEED)
def zero3_linear_order(order: Sequence[ModelTensor]) -> list[ModelTensor]:
    """Return `gradient_order` changed for ZeRO-3's own linear layers (memory_efficient_linear).

    Their backward pass returns the weight's gradient before the bias's.
    """
    return _weight_first(order, _is_linear)


def _weight_first(
    order: Sequence[ModelTensor], condition: Callable[[ModelTensor, ModelTensor], bool]
) -> list[ModelTensor]:
    """Return `order` with the weight before the bias in modules for which condition(weight, bias) is true."""
    result = list(order)
    for position in range(len(result) - 1):
        bias, weight = result[position], result[position + 1]
        in_same_module = weight.name.endswith("weight") and bias.name == weight.name.removesuffix("weight") + "bias"
        if in_same_module and condition(weight, bias):
            result[position], result[position + 1] = weight, bias
    return result


def _is_linear(weight: ModelTensor, bias: ModelTensor) -> bool:
    return len(weight.shape) == 2 and bias.shape == weight.shape[:1]


@rule("torch/csrc/distributed/c10d/reducer.cpp compute_bucket_assignment_by_size", TORCH)
def buckets_reaching_limit(sizes: Iterable[int], limits: Sequence[int]) -> list[list[int]]:
    """Return the sizes in each bucket, where a bucket is closed once it holds its limit or more.

    Args:
        sizes: Sizes of the gradients in order.
        limits: Limits of the first buckets; the last one applies to all later buckets.
    """
    buckets: list[list[int]] = []
    bucket: list[int] = []
    for size in sizes:
        bucket.append(size)
        if sum(bucket) >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(bucket)
            bucket = []
    return [*buckets, bucket] if bucket else buckets


def max_buckets_reaching_limit(total: int, limits: Sequence[int]) -> int:
    """Return the most buckets that `buckets_reaching_limit` makes in any order: all but the last reach their limit."""
    count, remaining = 1, total
    while remaining > limits[min(count - 1, len(limits) - 1)]:
        remaining -= limits[min(count - 1, len(limits) - 1)]
        count += 1
        if count > len(limits):
            return count + (remaining - 1) // limits[-1]
    return count


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.reduce_independent_p_g_buckets_and_remove_grads; "
      "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.reduce_independent_p_g_buckets_and_remove_grads",
      DEEPSPEED)  # fmt: skip
def buckets_within_limit(sizes: Iterable[int], limit: int) -> list[list[int]]:
    """Return the indices of the sizes in each bucket, where a bucket is closed before it would exceed the limit.

    A size above the limit has a bucket of its own.
    """
    buckets: list[list[int]] = []
    held = 0
    for position, size in enumerate(sizes):
        if not size:
            continue
        if not buckets or held + size > limit:
            buckets.append([])
            held = 0
        buckets[-1].append(position)
        held += size
    return buckets


def max_buckets_within_limit(total: int, limit: int, count: int) -> int:
    """Return the most buckets that `buckets_within_limit` makes of `count` sizes in any order.

    Any two neighbouring buckets together exceed the limit.
    """
    return min(count, 2 * (max(total - 1, 0) // limit) + 1)


@rule("deepspeed.runtime.engine.DeepSpeedEngine.allreduce_no_retain; "
      "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.allreduce_and_scatter, allreduce_no_retain",
      DEEPSPEED)  # fmt: skip
def buckets_exceeding_limit(sizes: Iterable[int], limit: int) -> list[int]:
    """Return the sum of each bucket, where a bucket is closed once it holds more than the limit."""
    sums: list[int] = []
    held = 0
    for size in sizes:
        held += size
        if held > limit:
            sums.append(held)
            held = 0
    return [*sums, held] if held else sums
