"""In which order gradients become ready, and into which partition they belong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from commtrace.theory.job import Job, ModelTensor

from .registry import DEEPSPEED, TORCH, WORKLOAD, rule


@rule(
    "torch/nn/parallel/distributed.py DistributedDataParallel._ddp_init_helper (its comment on reversed buckets)", TORCH
)
def gradient_order(parameters: Sequence[ModelTensor]) -> list[ModelTensor]:
    """Backward passes layers in the reverse of forward, which is taken for the order of registration.

    True to the byte where modules run in the order in which they were made. Within a module: `autograd_order`.
    """
    return autograd_order(list(reversed(parameters)))


@rule(
    "torch/csrc/autograd/engine.cpp Engine::evaluate_function; torch/csrc/autograd/functions/accumulate_grad.h", TORCH
)
def autograd_order(order: Sequence[ModelTensor]) -> list[ModelTensor]:
    """A module's own two parameters as autograd's engine hands out their gradients, when the bias came first.

    A gradient that a node gives to a parameter is accumulated before any other node runs, in the order of the
    node's inputs. Norms and convolutions have (input, weight, bias): the weight is first. A linear layer has (bias,
    input, transposed weight), and the transposition is a node of its own, behind the bias.
    """
    return _swapped(order, lambda weight, bias: not _linear(weight, bias))


def backward_order(job: Job, parameters: Sequence[ModelTensor]) -> list[ModelTensor]:
    """Of a job's model: `gradient_order`, with the exception that tensor parallelism makes."""
    return parallel_residual_order(job, gradient_order(parameters))


@rule("examples.gpt_neox.layers.Block", WORKLOAD)
def parallel_residual_order(job: Job, order: Sequence[ModelTensor]) -> list[ModelTensor]:
    """Where tensor-parallel attention and MLP are summed together (gpt_j_residual), both biases are added behind it.

    So the gradient of attention's comes with the MLP's.
    """
    if job.tensor == 1 or not job.model("gpt_j_residual", False):
        return list(order)
    held = {one.name: one for one in order if one.name.endswith(_ATTENTION)}
    result: list[ModelTensor] = []
    for one in order:
        if one.name not in held:
            result.append(one)
        if one.name.endswith(_MLP):
            result.append(held[one.name.removesuffix(_MLP) + _ATTENTION])
    return result


_ATTENTION: Final = "attention.dense.bias"
_MLP: Final = "mlp.dense_4h_to_h.bias"


@rule("deepspeed.runtime.zero.linear.LinearFunctionForZeroStage3.backward", DEEPSPEED)
def zero3_linear_order(parameters: Sequence[ModelTensor]) -> list[ModelTensor]:
    """Of `gradient_order`, where ZeRO-3 has put its own linear layers in place (memory_efficient_linear).

    Their backward returns the weight's gradient before the bias's.
    """
    return _swapped(parameters, _linear)


def _swapped(order: Sequence[ModelTensor], which: Callable[[ModelTensor, ModelTensor], bool]) -> list[ModelTensor]:
    """With the weight before the bias, where a module's bias is in front of its weight and `which` says so of both."""
    result = list(order)
    for at in range(len(result) - 1):
        bias, weight = result[at], result[at + 1]
        if _of_one_module(weight, bias) and which(weight, bias):
            result[at], result[at + 1] = weight, bias
    return result


def _of_one_module(weight: ModelTensor, bias: ModelTensor) -> bool:
    return weight.name.endswith("weight") and bias.name == weight.name.removesuffix("weight") + "bias"


def _linear(weight: ModelTensor, bias: ModelTensor) -> bool:
    return len(weight.shape) == 2 and bias.shape == weight.shape[:1]
