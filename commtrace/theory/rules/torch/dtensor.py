"""Tensor parallelism by DTensors (`parallelize_module`), alone or beneath FSDP2: what each style of a plan sends.

A style says how a module's parameters, input and output lie on the ranks that share a model; what has to move follows,
forward and, the other way round, backward. Sizes are of activations: micro-batch by sequence by the module's width, in
the type of the parameters.

Assumed, as the job cannot say it: every micro-batch has the size and length that the model says (`neox_args`); each
module of the plan runs once in it, with an input of micro-batch by sequence by width that needs a gradient (an
embedding's needs none); what the model says is recomputed are the modules of its layers, and dropout is what it says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any, Final

from commtrace.theory.closed_forms import tensor_parallel
from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import Job, NotPredictedError, element_size
from commtrace.theory.rules.deepspeed.engine import parameter_size
from commtrace.theory.rules.registry import TORCH, WORKLOAD, rule

ROLE: Final = "tensor"
ACTIVATIONS: Final = "activations of tensor-parallel layers"
LOGITS: Final = "logits, whole on every rank"
NORMS: Final = "gradients of norms along the sequence"
NORM: Final = "norm of the gradients"
START: Final = "parameters, from the first of the ranks that share a model"

_LAYER: Final = re.compile(r"(?:.*\.)?(?:block_)?(\d+)(?=\.)")


@dataclass(frozen=True)
class ModuleStyle:
    """A module of the plan."""

    module: str
    kind: str
    """Its class: ColwiseParallel, say."""
    inputs: str
    outputs: str
    embedding: bool
    weight: tuple[int, ...]
    bias: tuple[int, ...]
    sent: bool
    """Its parameters come from the first rank."""
    wrapped: bool
    """It gets its input as a DTensor, from a module around it that has prepared it."""

    @property
    def layer(self) -> int | None:
        """Number of the layer that it is in."""
        found = _LAYER.match(self.module)
        return int(found.group(1)) if found else None


@dataclass(frozen=True)
class ModuleCalls:
    """What a module sends in one micro-batch."""

    forward: tuple[ExpectedCall, ...] = ()
    backward: tuple[ExpectedCall, ...] = ()


def predict(job: Job) -> Prediction:
    """What a rank of a model that is tensor-parallel alone communicates. Raises NotPredictedError."""
    alone = Prediction("DTensor", job.ranks, (), ((),), WaterfallBar("", Fraction(0)), ())
    return extend_prediction(job, alone)


def extend_prediction(job: Job, data: Prediction) -> Prediction:
    """With what FSDP does beside it. Raises NotPredictedError where the model's architecture is not told."""
    if "model" not in job.row:
        raise NotPredictedError(
            "a tensor-parallel model that does not say its architecture (neox_args) has no rules yet"
        )
    plan = styles(job)
    own = (*activation_calls(job, plan), *norm_gradients(job, plan), *clipping(job, plan))
    form, bars = _bars(job, own)
    label = f"{data.closed_form.label} + {form.label}" if data.closed_form.label else form.label
    sequence = " along the sequence" if any(style.kind == "SequenceParallel" for style in plan) else ""
    return replace(
        data,
        scheme=f"{data.scheme}, tensor-parallel{sequence} over {job.tensor}",
        start=(*data.start, *sent_parameters(job, plan)),
        steps=tuple((*step, *own) for step in data.steps),
        closed_form=WaterfallBar(label, data.closed_form.bytes + form.bytes),
        bars=(*data.bars, *bars),
        others={ROLE: job.tensor},
    )


def styles(job: Job) -> list[ModuleStyle]:
    """The plan, in the order of the model's modules."""
    rows: list[Mapping[str, Any]] = list(job.fact("tensor_plan"))
    prepared = [str(row["module"]) for row in rows if row["style"] == "PrepareModuleInput"]
    return [_style(row, prepared) for row in rows]


def _style(row: Mapping[str, Any], prepared: Sequence[str]) -> ModuleStyle:
    one = ModuleStyle(
        str(row["module"]),
        str(row["style"]),
        _first(row["inputs"]),
        _first(row["outputs"]),
        bool(row["embedding"]),
        tuple(row["weight"] or ()),
        tuple(row["bias"] or ()),
        bool(row["sent"]),
        any(str(row["module"]).startswith(f"{name}.") for name in prepared),
    )
    if one.kind == "PrepareModuleInput" and (row["desired"] != ["Replicate"] or row["local"]):
        raise NotPredictedError(f"PrepareModuleInput of {one.module} to {row['desired']} has no rules yet")
    if one.kind == "ColwiseParallel" and one.embedding:
        raise NotPredictedError(f"ColwiseParallel of an embedding ({one.module}) has no rules yet")
    return one


def _first(layouts: Sequence[str]) -> str:
    return str(layouts[0]) if layouts else ""


def micro_batches(job: Job) -> int:
    """Of one step."""
    return int(job.model("gradient_accumulation_steps"))


def activation_type(job: Job) -> str:
    """That of parameters as they are computed with."""
    units = job.row.get("units")
    return str(units[0]["dtypes"][0]) if units else job.parameters[0].dtype


def _bytes(job: Job, width: int) -> int:
    """Of the activations of a micro-batch."""
    batch, length = int(job.model("train_micro_batch_size_per_gpu")), int(job.model("seq_length"))
    return batch * length * width * element_size(activation_type(job))


def activation_calls(job: Job, plan: Sequence[ModuleStyle]) -> Iterator[ExpectedCall]:
    """Of all micro-batches of a step."""
    for style in plan:
        found = module_calls(job, style)
        yield from (one.times(micro_batches(job)) for one in (*found.forward, *found.backward))
    yield from (one.times(micro_batches(job)) for one in recomputed(job, plan))


def _bars(job: Job, own: Sequence[ExpectedCall]) -> tuple[WaterfallBar, list[WaterfallBar]]:
    batch, length, hidden, layers = (
        int(job.model(name)) for name in ("train_micro_batch_size_per_gpu", "seq_length", "hidden_size", "num_layers")
    )
    size = parameter_size(job)
    form = tensor_parallel(batch, length, hidden, layers, job.tensor) * size
    sent = total_wire_bytes((one for one in own if one.cause == ACTIVATIONS), job.tensor)
    parts = micro_batches(job)
    whole = sent / parts
    levels = {
        f"tensor parallelism: activations travel as {activation_type(job)}": form
        * element_size(activation_type(job))
        / size,
        "tensor parallelism: what the plan moves": whole,
        f"tensor parallelism: in each of {parts} micro-batches": sent,
    }
    rest = [replace(one, cause=f"tensor parallelism: {one.cause}") for one in own if one.cause != ACTIVATIONS]
    bars = [*level_bars(form, levels), *cause_bars(rest, job.tensor)]
    return WaterfallBar("equation 5: (12 L + 2) b s h (t-1)/t", form), bars


# --- rules ----------------------------------------------------------------------------------------------------------

_STYLE: Final = "torch.distributed.tensor.parallel.style."


@rule(_STYLE + "ColwiseParallel, RowwiseParallel (partition); torch.distributed.tensor.distribute_tensor", TORCH)
def sent_parameters(job: Job, plan: Sequence[ModuleStyle]) -> list[ExpectedCall]:
    """At start-up: what is cut is scattered, a row-parallel module's bias broadcast; a norm's parameters stay."""
    found = []
    for style in plan:
        if style.sent and style.kind in ("ColwiseParallel", "RowwiseParallel"):
            found.append(ExpectedCall("scatter", prod(style.weight) * parameter_size(job), START, role=ROLE))
            if style.bias:
                op = "scatter" if style.kind == "ColwiseParallel" else "broadcast"
                found.append(ExpectedCall(op, prod(style.bias) * parameter_size(job), START, role=ROLE))
    return found


@rule(_STYLE + "ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput (_prepare_input_fn, "
      "_prepare_output_fn)", TORCH)  # fmt: skip
def module_calls(job: Job, style: ModuleStyle) -> ModuleCalls:
    """What has to move between how an input comes and how a module needs it, and likewise of its output."""
    if style.kind == "SequenceParallel":
        return ModuleCalls()
    if style.kind == "PrepareModuleInput":
        return _gathered_input(job, style.inputs, int(job.model("hidden_size")))
    if style.kind == "ColwiseParallel":
        before = ModuleCalls() if style.wrapped else _gathered_input(job, style.inputs, style.weight[1])
        after = _gathered_output(job, style.outputs, style.weight[0])
        return ModuleCalls((*before.forward, *after.forward), (*before.backward, *after.backward))
    if style.kind == "RowwiseParallel":
        return _summed_output(job, style.outputs, style.weight[1] if style.embedding else style.weight[0])
    raise NotPredictedError(f"the style {style.kind} has no rules yet")


def _gathered_input(job: Job, layout: str, width: int) -> ModuleCalls:
    """Whole where it is needed; backward the ranks' gradients are summed."""
    if layout == "Replicate":
        return ModuleCalls(backward=(_moved(job, "all_reduce", width),))
    if layout == "Shard(1)":
        return ModuleCalls((_moved(job, "all_gather", width),), (_moved(job, "reduce_scatter", width),))
    raise NotPredictedError(f"an input that lies as {layout} has no rules yet")


def _gathered_output(job: Job, layout: str, width: int) -> ModuleCalls:
    if layout == "Shard(-1)":
        return ModuleCalls()
    if layout == "Replicate":
        return ModuleCalls((replace(_moved(job, "all_gather", width), cause=LOGITS),))
    raise NotPredictedError(f"a column-parallel output that lies as {layout} has no rules yet")


def _summed_output(job: Job, layout: str, width: int) -> ModuleCalls:
    if layout == "Replicate":
        return ModuleCalls((_moved(job, "all_reduce", width),))
    if layout == "Shard(1)":
        return ModuleCalls((_moved(job, "reduce_scatter", width),), (_moved(job, "all_gather", width),))
    raise NotPredictedError(f"a row-parallel output that lies as {layout} has no rules yet")


def _moved(job: Job, op: str, width: int) -> ExpectedCall:
    return ExpectedCall(op, _bytes(job, width), ACTIVATIONS, role=ROLE)


@rule("torch.utils.checkpoint.CheckpointFunction; "
      "torch.utils.checkpoint._checkpoint_without_reentrant_generator (early stop, DTensors)", TORCH)  # fmt: skip
def recomputed(job: Job, plan: Sequence[ModuleStyle]) -> list[ExpectedCall]:
    """The second forward pass of layers; without reentrant autograd it ends before a stretch's last sum."""
    if not job.model("checkpoint_activations", False):
        return []
    layers: dict[int, list[ExpectedCall]] = {}
    for style in plan:
        if style.layer is not None:
            layers.setdefault(style.layer, []).extend(module_calls(job, style).forward)
    early = not job.model("checkpoint_reentrant", True) and not float(job.model("hidden_dropout", 0.0))
    each, count = int(job.model("checkpoint_num_layers", 1)), len(layers)
    last = {min(at + each, count) - 1 for at in range(0, count, each)} if early else set()
    return [one for at, layer in sorted(layers.items()) for one in (layer[:-1] if at in last else layer)]


@rule("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._get_grad_inner_tensor; "
      "torch.optim.adam._single_tensor_adam (of DTensors); torch.nn.utils.get_total_norm (of DTensors)",
      TORCH)  # fmt: skip
def norm_gradients(job: Job, plan: Sequence[ModuleStyle]) -> list[ExpectedCall]:
    """Of parameters that see a part of the sequence, each rank has a summand of the gradient.

    FSDP sums it before it reduces it. Without FSDP it stays a summand, and is summed in passing wherever it is read:
    three times for each parameter by Adam (single-tensor), and once by what clips.
    """
    norms = [style for style in plan if style.kind == "SequenceParallel"]
    parameters = [prod(shape) for style in norms for shape in (style.weight, style.bias) if shape]
    if not parameters:
        return []
    if "units" in job.row:
        size, times = _summand(job)
    else:
        if job.fact("foreach") is not False or job.fact("optimizer") not in ("Adam", "AdamW"):
            raise NotPredictedError(
                "sequence parallelism with another optimizer than Adam, foreach=False, has no rules yet"
            )
        size, times = parameter_size(job), 3 + clips(job)
    return [ExpectedCall("all_reduce", elements * size, NORMS, times, role=ROLE) for elements in parameters]


def _summand(job: Job) -> tuple[int, int]:
    """Bytes of an element, and times a step. Gradients that wait for a later micro-batch wait in the reduce type."""
    each = job.fact("reduce_grads")
    wide = job.fact("units")[0]["reduce_dtype"]
    waits = wide is not None and not each and micro_batches(job) > 1
    return element_size(str(wide) if waits else activation_type(job)), micro_batches(job) if each else 1


def clips(job: Job) -> bool:
    """Whether the program clips gradients."""
    return float(job.model("gradient_clipping", 0.0)) > 0


def num_sharded_parameters(job: Job, plan: Sequence[ModuleStyle]) -> int:
    """Parameters that are DTensors of the ranks that share a model."""
    named = {style.module for style in plan}
    return sum(1 for one in job.trainable if one.name.rpartition(".")[0] in named)


@rule("examples.gpt_neox.dtensor_parallel.clip_gradients", WORKLOAD)
def clipping(job: Job, plan: Sequence[ModuleStyle]) -> list[ExpectedCall]:
    """The norms of what is cut, a number for each parameter, in one call."""
    if not clips(job):
        return []
    return [ExpectedCall("all_reduce", num_sharded_parameters(job, plan) * parameter_size(job), NORM, role=ROLE)]
