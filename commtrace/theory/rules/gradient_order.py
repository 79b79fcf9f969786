"""Order in which gradients become ready in a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from commtrace.theory.job import Job, ModelTensor

from .registry import DEEPSPEED, TORCH, WORKLOAD, rule

_ATTENTION: Final = "attention.dense.bias"
_MLP: Final = "mlp.dense_4h_to_h.bias"


@rule(
    "torch/nn/parallel/distributed.py DistributedDataParallel._ddp_init_helper (its comment on reversed buckets)", TORCH
)
def gradient_order(parameters: Sequence[ModelTensor]) -> list[ModelTensor]:
    """Return parameters in the reverse of registration order, which stands for the order of the forward pass.

    Exact where modules run in the order in which they were made. Within a module: `autograd_order`.
    """
    return autograd_order(list(reversed(parameters)))


@rule(
    "torch/csrc/autograd/engine.cpp Engine::evaluate_function; torch/csrc/autograd/functions/accumulate_grad.h", TORCH
)
def autograd_order(order: Sequence[ModelTensor]) -> list[ModelTensor]:
    """Return an order with the bias first, with a module's own two parameters as autograd's engine delivers them.

    A gradient that a node gives to a parameter is accumulated before any other node runs, in the order of the
    node's inputs. Norms and convolutions have (input, weight, bias): the weight is first. A linear layer has (bias,
    input, transposed weight), and the transposition is a node of its own, behind the bias.
    """
    return _weight_first(order, lambda weight, bias: not _is_linear(weight, bias))


def backward_order(job: Job, parameters: Sequence[ModelTensor]) -> list[ModelTensor]:
    """Return `gradient_order` of a job's model, with the exception that tensor parallelism makes."""
    return parallel_residual_order(job, gradient_order(parameters))


@rule("examples.gpt_neox.layers.Block", WORKLOAD)
def parallel_residual_order(job: Job, order: Sequence[ModelTensor]) -> list[ModelTensor]:
    """Move the bias of attention behind that of the MLP, where one all_reduce sums both (gpt_j_residual).

    Tensor-parallel layers then add both biases after that sum, so that their gradients come together.
    """
    if job.tensor == 1 or not job.model("gpt_j_residual", False):
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
def zero3_linear_order(parameters: Sequence[ModelTensor]) -> list[ModelTensor]:
    """Return `gradient_order` where ZeRO-3 has replaced linear layers by its own (memory_efficient_linear).

    Their backward returns the weight's gradient before the bias's.
    """
    return _weight_first(parameters, _is_linear)


def _weight_first(
    order: Sequence[ModelTensor], condition: Callable[[ModelTensor, ModelTensor], bool]
) -> list[ModelTensor]:
    """Swap a module's bias and weight, where the bias is first and the condition holds for (weight, bias)."""
    result = list(order)
    for position in range(len(result) - 1):
        bias, weight = result[position], result[position + 1]
        are_of_one_module = weight.name.endswith("weight") and bias.name == weight.name.removesuffix("weight") + "bias"
        if are_of_one_module and condition(weight, bias):
            result[position], result[position + 1] = weight, bias
    return result


def _is_linear(weight: ModelTensor, bias: ModelTensor) -> bool:
    return len(weight.shape) == 2 and bias.shape == weight.shape[:1]
