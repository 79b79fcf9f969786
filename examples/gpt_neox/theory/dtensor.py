"""Tensor parallelism by DTensors (`parallelize_module`), alone or with FSDP2: calls of each style of a plan.

A style determines how a module's parameters, input and output are sharded over the ranks that share a model, and so the
data that moves in forward and, in the reverse direction, in backward. Payloads are activations: micro-batch by sequence
by the module's width, in the dtype of the parameters.

Assumptions that no job row contains: every micro-batch has the size and length that the model declares (`neox_args`);
each module of the plan runs once in it, with an input of micro-batch by sequence by width that needs a gradient (an
embedding's needs none); modules of the model's layers are recomputed, and dropout is set, as the model declares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Final, NamedTuple

from commtrace.job_row import JobRow, StyleRow
from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import Job, NotPredictedError, element_size
from commtrace.theory.rules.megatron.tensor_parallel import FORM, activation_elements, form_bytes
from commtrace.theory.rules.registry import TORCH, WORKLOAD, rule
from commtrace.theory.rules.torch.fsdp import NORM
from commtrace.theory.rules.torch.parallel_styles import moved_by

ROLE: Final = "tensor"
ACTIVATIONS: Final = "activations of tensor-parallel layers"
LOGITS: Final = "logits, gathered on every rank"
NORMS: Final = "gradients of norms along the sequence"
START: Final = "parameters, from the first of the ranks that share a model"

_LAYER: Final = re.compile(r"(?:.*\.)?(?:block_)?(\d+)(?=\.)")


class ModuleCalls(NamedTuple):
    """Calls of a module in one micro-batch."""

    forward: tuple[ExpectedCall, ...] = ()
    backward: tuple[ExpectedCall, ...] = ()


def predict(job: Job) -> Prediction:
    """Predict the calls of a rank of a job with tensor parallelism alone. Raises NotPredictedError."""
    return extend_prediction(job, Prediction("DTensor", job.ranks, (), ((),), WaterfallBar("", Fraction(0)), ()))


def extend_prediction(job: Job, data: Prediction) -> Prediction:
    """Add calls among ranks that share a model to FSDP's prediction.

    Raises:
        NotPredictedError: If the job does not have the model's architecture, or has a plan without rules.
    """
    job.require_architecture("tensor parallelism by DTensors")
    plan = job.row.tensor_plan
    own = (*activation_calls(job, plan), *norm_gradients(job, plan), *clipping(job, plan))
    form = WaterfallBar(FORM, form_bytes(job))
    label = f"{data.closed_form.label} + {form.label}" if data.closed_form.label else form.label
    sequence = " along the sequence" if any(style.style == "SequenceParallel" for style in plan) else ""
    return replace(
        data,
        scheme=f"{data.scheme}, tensor-parallel{sequence} over {job.tensor}",
        start=(*data.start, *sent_parameters(job, plan)),
        steps=tuple((*norms_by_mesh(job, plan, step), *own) for step in data.steps),
        closed_form=WaterfallBar(label, data.closed_form.bytes + form.bytes),
        bars=(*data.bars, *_bars(job, own)),
        others={ROLE: job.tensor},
    )


def activation_type(job: Job) -> str:
    """Return the dtype of parameters in computation."""
    return job.row.units[0].dtypes[0] if job.row.has(JobRow.units) else job.parameters[0].dtype


def activation_calls(job: Job, plan: Sequence[StyleRow]) -> list[ExpectedCall]:
    """Return the calls of a step that move activations."""
    calls = (call for style in plan for direction in module_calls(job, style, plan) for call in direction)
    return [call.times(job.micro_batches) for call in (*calls, *recomputed(job, plan))]


def _bars(job: Job, own: Sequence[ExpectedCall]) -> list[WaterfallBar]:
    form, steps = form_bytes(job), job.micro_batches
    moved = total_wire_bytes(own, job.tensor, ACTIVATIONS)
    typed = form * element_size(activation_type(job)) / job.parameter_size
    levels = {
        f"tensor parallelism: activations travel as {activation_type(job)}": typed,
        "tensor parallelism: what the plan moves": moved / steps,
        f"tensor parallelism: in each of {steps} micro-batches": moved,
    }
    others = cause_bars(own, job.tensor, ACTIVATIONS, prefix="tensor parallelism: ")
    return [*level_bars(form, levels), *others]


_STYLE: Final = "torch.distributed.tensor.parallel.style."


@rule(_STYLE + "ColwiseParallel, RowwiseParallel (partition); torch.distributed.tensor.distribute_tensor", TORCH)
def sent_parameters(job: Job, plan: Sequence[StyleRow]) -> list[ExpectedCall]:
    """Return the scatters of sharded parameters at start-up, and the broadcasts of row-parallel biases."""
    calls = []
    for style in plan:
        if style.sent and style.weight and style.style in ("ColwiseParallel", "RowwiseParallel"):
            calls.append(ExpectedCall("scatter", prod(style.weight) * job.parameter_size, START, role=ROLE))
            if style.bias:
                op = "scatter" if style.style == "ColwiseParallel" else "broadcast"
                calls.append(ExpectedCall(op, prod(style.bias) * job.parameter_size, START, role=ROLE))
    return calls


def module_calls(job: Job, style: StyleRow, plan: Sequence[StyleRow]) -> ModuleCalls:
    """Return the calls that redistribute a module's input and output to the placements of its style."""
    forward: list[ExpectedCall] = []
    backward: list[ExpectedCall] = []
    for moved in moved_by(style, plan):
        payload = tokens(job) * moved.width * element_size(activation_type(job))
        cause = LOGITS if moved.activation == "column-parallel output" else ACTIVATIONS
        for op, calls in ((moved.forward, forward), (moved.backward, backward)):
            if op:
                calls.append(ExpectedCall(op, payload, cause, role=ROLE))
    return ModuleCalls(tuple(forward), tuple(backward))


def tokens(job: Job) -> int:
    """Return the tokens of a micro-batch."""
    return activation_elements(job) // job.model.hidden_size


@rule("torch.utils.checkpoint.CheckpointFunction; "
      "torch.utils.checkpoint._checkpoint_without_reentrant_generator (early stop, DTensors)", TORCH)  # fmt: skip
def recomputed(job: Job, plan: Sequence[StyleRow]) -> list[ExpectedCall]:
    """Return the calls that recomputation repeats; without reentrant autograd it stops before a layer's last sum."""
    if not job.model.checkpoint_activations:
        return []
    layers: dict[int, list[ExpectedCall]] = {}
    for style in plan:
        if match := _LAYER.match(style.module):
            layers.setdefault(int(match[1]), []).extend(module_calls(job, style, plan).forward)
    early = not job.model.checkpoint_reentrant and not job.model.hidden_dropout
    interval, count = job.model.checkpoint_num_layers, len(layers)
    ends = {min(first + interval, count) - 1 for first in range(0, count, interval)} if early else set()
    return [call for number, calls in sorted(layers.items()) for call in (calls[:-1] if number in ends else calls)]


@rule("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._get_grad_inner_tensor; "
      "torch.optim.adam._single_tensor_adam (of DTensors); torch.nn.utils.get_total_norm (of DTensors)",
      TORCH)  # fmt: skip
def norm_gradients(job: Job, plan: Sequence[StyleRow]) -> list[ExpectedCall]:
    """Return the all_reduces of norm gradients under sequence parallelism, which are partial on each rank.

    FSDP sums them before it reduces them. Without FSDP they stay partial, and are summed whenever they are read: three
    times for each parameter by Adam (single-tensor), and once by clipping.
    """
    norms = [style for style in plan if style.style == "SequenceParallel"]
    parameters = [prod(shape) for style in norms for shape in (style.weight, style.bias) if shape]
    if not parameters:
        return []
    if job.row.has(JobRow.units):
        size, times = _partial_gradients(job)
    else:
        if job.row.foreach is not False or job.row.optimizer not in ("Adam", "AdamW"):
            raise NotPredictedError(
                "sequence parallelism with another optimizer than Adam, foreach=False, has no rules yet"
            )
        size, times = job.parameter_size, 3 + job.clips_gradients
    return [ExpectedCall("all_reduce", elements * size, NORMS, times, role=ROLE) for elements in parameters]


def _partial_gradients(job: Job) -> tuple[int, int]:
    """Return the bytes of an element and the number of sums per step; accumulated gradients have the reduce dtype."""
    reduces_each = job.row.reduce_grads
    reduce_type = job.row.units[0].reduce_dtype
    accumulates = not reduces_each and job.micro_batches > 1
    size = element_size(reduce_type if reduce_type is not None and accumulates else activation_type(job))
    return size, job.micro_batches if reduces_each else 1


def num_sharded_parameters(job: Job, plan: Sequence[StyleRow]) -> int:
    """Return the number of trained parameters that are DTensors among the ranks that share a model."""
    modules = {style.module for style in plan}
    return sum(1 for parameter in job.trainable if parameter.name.rpartition(".")[0] in modules)


@rule("torch.nn.utils.clip_grad_norm_ (of DTensors on two meshes)", TORCH)
def norms_by_mesh(job: Job, plan: Sequence[StyleRow], step: Iterable[ExpectedCall]) -> list[ExpectedCall]:
    """Return the step with FSDP's clipping split into two calls: for tensor-parallel parameters, and for the others."""
    sharded = num_sharded_parameters(job, plan)
    sizes = [count * job.parameter_size for count in (sharded, len(job.trainable) - sharded) if count]
    return [
        part
        for call in step
        for part in ([replace(call, payload=size) for size in sizes] if call.cause == NORM else [call])
    ]


@rule("examples.gpt_neox.dtensor_parallel.clip_gradients", WORKLOAD)
def clipping(job: Job, plan: Sequence[StyleRow]) -> list[ExpectedCall]:
    """Return the all_reduce of clipping: the norms of sharded parameters, one number each."""
    if not job.clips_gradients:
        return []
    return [ExpectedCall("all_reduce", num_sharded_parameters(job, plan) * job.parameter_size, NORM, role=ROLE)]
