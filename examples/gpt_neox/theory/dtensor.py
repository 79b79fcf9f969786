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
from dataclasses import dataclass, replace
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

ROLE: Final = "tensor"
ACTIVATIONS: Final = "activations of tensor-parallel layers"
LOGITS: Final = "logits, gathered on every rank"
NORMS: Final = "gradients of norms along the sequence"
START: Final = "parameters, from the first of the ranks that share a model"

_LAYER: Final = re.compile(r"(?:.*\.)?(?:block_)?(\d+)(?=\.)")


@dataclass(frozen=True)
class ModuleStyle:
    """Style of a module of the plan."""

    module: str  # dotted name of the module
    kind: str  # class of the style ("ColwiseParallel")
    inputs: str  # placement in which the input arrives ("Shard(1)")
    outputs: str  # placement in which the output leaves
    embedding: bool  # whether the module is an embedding
    weight: tuple[int, ...]  # shape of the weight before sharding; empty without one
    bias: tuple[int, ...]  # shape of the bias before sharding; empty without one
    sent: bool  # whether its parameters come from the first rank
    wrapped: bool  # whether a module around it prepares its input, which arrives as a DTensor

    @property
    def layer(self) -> int | None:
        """Number of the layer that the module is in, if any."""
        match = _LAYER.match(self.module)
        return int(match.group(1)) if match else None


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
    plan = styles(job)
    own = (*activation_calls(job, plan), *norm_gradients(job, plan), *clipping(job, plan))
    form = WaterfallBar(FORM, form_bytes(job))
    label = f"{data.closed_form.label} + {form.label}" if data.closed_form.label else form.label
    sequence = " along the sequence" if any(style.kind == "SequenceParallel" for style in plan) else ""
    return replace(
        data,
        scheme=f"{data.scheme}, tensor-parallel{sequence} over {job.tensor}",
        start=(*data.start, *sent_parameters(job, plan)),
        steps=tuple((*norms_by_mesh(job, plan, step), *own) for step in data.steps),
        closed_form=WaterfallBar(label, data.closed_form.bytes + form.bytes),
        bars=(*data.bars, *_bars(job, own)),
        others={ROLE: job.tensor},
    )


def styles(job: Job) -> list[ModuleStyle]:
    """Return the plan, in the order of the model's modules."""
    prepared = [row.module for row in job.row.tensor_plan if row.style == "PrepareModuleInput"]
    return [_style(row, prepared) for row in job.row.tensor_plan]


def _style(row: StyleRow, prepared: Sequence[str]) -> ModuleStyle:
    style = ModuleStyle(
        row.module,
        row.style,
        "".join(row.inputs[:1]),
        "".join(row.outputs[:1]),
        row.embedding,
        tuple(row.weight or ()),
        tuple(row.bias or ()),
        row.sent,
        any(row.module.startswith(f"{name}.") for name in prepared),
    )
    if style.kind == "PrepareModuleInput" and (row.desired != ["Replicate"] or row.local):
        raise NotPredictedError(f"PrepareModuleInput of {style.module} to {row.desired} has no rules yet")
    if style.kind == "ColwiseParallel" and style.embedding:
        raise NotPredictedError(f"ColwiseParallel of an embedding ({style.module}) has no rules yet")
    return style


def activation_type(job: Job) -> str:
    """Return the dtype of parameters in computation."""
    return job.row.units[0].dtypes[0] if job.row.has(JobRow.units) else job.parameters[0].dtype


def activation_calls(job: Job, plan: Sequence[ModuleStyle]) -> list[ExpectedCall]:
    """Return the calls of a step that move activations."""
    calls = (call for style in plan for direction in module_calls(job, style) for call in direction)
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
def sent_parameters(job: Job, plan: Sequence[ModuleStyle]) -> list[ExpectedCall]:
    """Return the scatters of sharded parameters at start-up, and the broadcasts of row-parallel biases."""
    calls = []
    for style in plan:
        if style.sent and style.kind in ("ColwiseParallel", "RowwiseParallel"):
            calls.append(ExpectedCall("scatter", prod(style.weight) * job.parameter_size, START, role=ROLE))
            if style.bias:
                op = "scatter" if style.kind == "ColwiseParallel" else "broadcast"
                calls.append(ExpectedCall(op, prod(style.bias) * job.parameter_size, START, role=ROLE))
    return calls


@rule(_STYLE + "ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput (_prepare_input_fn, "
      "_prepare_output_fn)", TORCH)  # fmt: skip
def module_calls(job: Job, style: ModuleStyle) -> ModuleCalls:
    """Return the calls that redistribute a module's input and output to the placements of its style."""
    if style.kind == "SequenceParallel":
        return ModuleCalls()
    if style.kind == "PrepareModuleInput":
        return _moved(job, "input", style.inputs, job.model.hidden_size)
    if style.kind == "ColwiseParallel":
        before = ModuleCalls() if style.wrapped else _moved(job, "input", style.inputs, style.weight[1])
        after = _moved(job, "column-parallel output", style.outputs, style.weight[0])
        return ModuleCalls((*before.forward, *after.forward), (*before.backward, *after.backward))
    if style.kind == "RowwiseParallel":
        width = style.weight[1] if style.embedding else style.weight[0]
        return _moved(job, "row-parallel output", style.outputs, width)
    raise NotPredictedError(f"the style {style.kind} has no rules yet")


_MOVES: Final = {
    ("input", "Replicate"): (None, "all_reduce"),  # backward sums the ranks' gradients
    ("input", "Shard(1)"): ("all_gather", "reduce_scatter"),
    ("column-parallel output", "Shard(-1)"): (None, None),
    ("column-parallel output", "Replicate"): ("all_gather", None),
    ("row-parallel output", "Replicate"): ("all_reduce", None),
    ("row-parallel output", "Shard(1)"): ("reduce_scatter", "all_gather"),
}
"""Operations, forward and backward, that move activations from or to a placement."""


def _moved(job: Job, activation: str, placement: str, width: int) -> ModuleCalls:
    """Return the calls that move activations of `width` elements per token."""
    if (activation, placement) not in _MOVES:
        raise NotPredictedError(f"a {activation} placed as {placement} has no rules yet")
    tokens = activation_elements(job) // job.model.hidden_size
    payload = tokens * width * element_size(activation_type(job))
    cause = LOGITS if activation == "column-parallel output" else ACTIVATIONS
    return ModuleCalls(*(
        (ExpectedCall(op, payload, cause, role=ROLE),) if op else () for op in _MOVES[activation, placement]
    ))  # fmt: skip


@rule("torch.utils.checkpoint.CheckpointFunction; "
      "torch.utils.checkpoint._checkpoint_without_reentrant_generator (early stop, DTensors)", TORCH)  # fmt: skip
def recomputed(job: Job, plan: Sequence[ModuleStyle]) -> list[ExpectedCall]:
    """Return the calls that recomputation repeats; without reentrant autograd it stops before a layer's last sum."""
    if not job.model.checkpoint_activations:
        return []
    layers: dict[int, list[ExpectedCall]] = {}
    for style in plan:
        if style.layer is not None:
            layers.setdefault(style.layer, []).extend(module_calls(job, style).forward)
    early = not job.model.checkpoint_reentrant and not job.model.hidden_dropout
    interval, count = job.model.checkpoint_num_layers, len(layers)
    ends = {min(first + interval, count) - 1 for first in range(0, count, interval)} if early else set()
    return [call for number, calls in sorted(layers.items()) for call in (calls[:-1] if number in ends else calls)]


@rule("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._get_grad_inner_tensor; "
      "torch.optim.adam._single_tensor_adam (of DTensors); torch.nn.utils.get_total_norm (of DTensors)",
      TORCH)  # fmt: skip
def norm_gradients(job: Job, plan: Sequence[ModuleStyle]) -> list[ExpectedCall]:
    """Return the all_reduces of norm gradients under sequence parallelism, which are partial on each rank.

    FSDP sums them before it reduces them. Without FSDP they stay partial, and are summed whenever they are read: three
    times for each parameter by Adam (single-tensor), and once by clipping.
    """
    norms = [style for style in plan if style.kind == "SequenceParallel"]
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


def num_sharded_parameters(job: Job, plan: Sequence[ModuleStyle]) -> int:
    """Return the number of trained parameters that are DTensors among the ranks that share a model."""
    modules = {style.module for style in plan}
    return sum(1 for parameter in job.trainable if parameter.name.rpartition(".")[0] in modules)


@rule("torch.nn.utils.clip_grad_norm_ (of DTensors on two meshes)", TORCH)
def norms_by_mesh(job: Job, plan: Sequence[ModuleStyle], step: Iterable[ExpectedCall]) -> list[ExpectedCall]:
    """Return the step with FSDP's clipping split into two calls: for tensor-parallel parameters, and for the others."""
    sharded = num_sharded_parameters(job, plan)
    sizes = [count * job.parameter_size for count in (sharded, len(job.trainable) - sharded) if count]
    return [
        part
        for call in step
        for part in ([replace(call, payload=size) for size in sizes] if call.cause == NORM else [call])
    ]


@rule("examples.gpt_neox.dtensor_parallel.clip_gradients", WORKLOAD)
def clipping(job: Job, plan: Sequence[ModuleStyle]) -> list[ExpectedCall]:
    """Return the all_reduce of clipping: the norms of sharded parameters, one number each."""
    if not job.clips_gradients:
        return []
    return [ExpectedCall("all_reduce", num_sharded_parameters(job, plan) * job.parameter_size, NORM, role=ROLE)]
