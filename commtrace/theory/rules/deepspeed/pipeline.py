"""DeepSpeed's pipeline of GPT-NeoX's model, alone or with tensor and data parallelism: calls of a stage's ranks.

Among ranks with the same part of the model, the rules are those of `engine` and `zero12`, for the stage's parameters;
among tensor-parallel ranks those of `tensor_parallel`, for the stage's layers; among stages those of `pipeline_calls`.
A job row is of one stage, and so is the prediction. Assumptions are those of `tensor_parallel`. Evaluation is not
counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final, TypeAlias

from commtrace.theory.closed_forms import pipeline as pipeline_form
from commtrace.theory.expected_calls import ExpectedCall, Prediction, WaterfallBar, total_wire_bytes
from commtrace.theory.job import Job, refuse
from commtrace.theory.model_shapes import count_elements, gpt_neox_model, model_lists, neox_shape
from commtrace.theory.rules.megatron import sequence_parallel
from commtrace.theory.rules.megatron import tensor_parallel as tensor
from commtrace.theory.rules.registry import DEEPSPEED
from commtrace.theory.waterfall import cause_bars, level_bars

from . import engine, pipeline_calls, zero12
from .engine import NORM, OVERFLOW
from .pipeline_calls import ACTIVATIONS, BLOCK, EMBEDDING, ROLE, PipelineStage

FormAndBars: TypeAlias = tuple[WaterfallBar, list[WaterfallBar]]
"""A closed form, and the bars that lead from it to the calls."""

_OPTIMIZERS: Final = ("DeepSpeedZeroOptimizer", "BF16_Optimizer")


def predict(job: Job) -> Prediction:
    """Predict what a rank of one stage communicates. Raise NotPredictedError for settings without rules."""
    facts = dict(job.fact("pipeline"))
    layers = tuple(map(str, facts["layers"]))
    stage = PipelineStage(int(facts["stage"]), int(job.fact("pipeline_stages")), layers, facts)
    check(job, stage)
    model = Job(pipeline_calls.stage_as_model(job))
    data = _among_replicas(model)
    optimizer = (replace(call, role=pipeline_calls.model_role(job)) for call in tensor.optimizer_calls(model))
    own = (*pipeline_calls.step_calls(job, stage), *optimizer)
    step = (*tensor.alone_as_self(job, data.steps[0]), *own)
    forms, bars = _waterfalls(job, stage, data, own)
    equations = "2" + " + 4" * (stage.stages > 1) + " + 5" * (job.tensor > 1)
    label = f"{'3D: ' if equations == '2 + 4 + 5' else ''}equation{'s' * (len(equations) > 1)} {equations}"
    stages = f"pipeline of {stage.stages} stages" if stage.stages > 1 else "pipeline engine of one stage"
    tensor_parallel_part = f", tensor-parallel over {job.tensor}" if job.tensor > 1 else ""
    return Prediction(
        scheme=f"{data.scheme}, {stages}{tensor_parallel_part}",
        ranks=job.ranks,
        start=(*tensor.alone_as_self(job, data.start), *pipeline_calls.start_calls(job, stage)),
        steps=((*pipeline_calls.metadata(stage), *step), step),
        closed_form=WaterfallBar(label, sum((form.bytes for form in forms), Fraction(0))),
        bars=tuple(bars),
        skipped=tensor.skipped_calls(job, data, own),
        others=_group_sizes(job, stage),
        forms=tuple(forms),
    )


def _group_sizes(job: Job, stage: PipelineStage) -> dict[str, int]:
    return {ROLE: stage.stages, tensor.ROLE: job.tensor, "model": stage.stages * job.tensor, "self": 1}


def check(job: Job, stage: PipelineStage) -> None:
    """Raise NotPredictedError for stages that have no rules yet."""
    job.require_architecture("a pipeline")
    known = {EMBEDDING, BLOCK, "NormPipe", "ParallelLinearPipe", "_pre_transformer_block", "_post_transformer_block"}
    facts, optimizer, first_type = stage.facts, job.fact("optimizer"), job.parameters[0].dtype
    sizes = job.model("model_parallel_size", 1), job.tensor
    accumulates_otherwise = job.row.get("grad_accum_dtype", first_type) != first_type
    refuse(
        (not facts["attention_mask"], "stages of a model that is not GPT-NeoX's (GPT2ModelPipe) have no rules yet"),
        (stage.stages > 1 and job.tensor > 1 and job.model("sequence_parallel", False),
         "a pipeline of several stages with sequence_parallel has no rules yet"),
        (facts["dynamic_shape"], "a pipeline with shapes that change has no rules yet"),
        (facts["bool_tensors"], "a pipeline with bool tensors has no rules yet"),
        (not known.issuperset(stage.layers),
         f"layers of other kinds than GPT-NeoX's: {sorted({*stage.layers} - known)}"),
        (stage.last != ("_post_transformer_block" in stage.layers),
         "stages that are cut behind the last transformer layer cannot pass anything on"),
        (sizes[0] != sizes[1], f"the model is cut for {sizes[0]} ranks and the grid for {sizes[1]}"),
        (job.tensor > 1 and facts["grad_partitioned"] != facts["pipe_partitioned"],
         f"DeepSpeed {DEEPSPEED[1]} cannot send activations partitioned and their gradients not, or vice versa"),
        (optimizer not in _OPTIMIZERS and job.fact("precision") != "fp32",
         f"the optimizer {optimizer} in a pipeline has no rules yet"),
        (optimizer == "DeepSpeedZeroOptimizer" and accumulates_otherwise,
         "ZeRO-1 in a pipeline whose gradients are summed in another type has no rules yet"),
    )  # fmt: skip


def _among_replicas(model: Job) -> Prediction:
    """Return the prediction for the stage's parameters, as if they were the whole model."""
    is_flat = int(model.fact("zero_stage")) > 0 or model.fact("optimizer") == "BF16_Optimizer"
    return zero12.predict(model) if is_flat else engine.predict(model)


# --- from the closed forms to a step --------------------------------------------------------------------------------


def _waterfalls(
    job: Job, stage: PipelineStage, data: Prediction, own: Sequence[ExpectedCall]
) -> tuple[list[WaterfallBar], list[WaterfallBar]]:
    """Return the closed forms of the paper by role, and what leads from them to this rank's steady step."""
    parts: list[FormAndBars] = [(data.closed_form, list(data.bars))]  # of one stage, which has the whole model
    if stage.stages > 1:
        form = WaterfallBar(
            data.closed_form.label, 2 * engine.ring_bytes(job, model_parameters(job), job.parameter_size)
        )
        stage_only = WaterfallBar("a rank has its stage's part of the parameters", data.closed_form.bytes - form.bytes)
        parts = [(form, [stage_only, *data.bars]), _pipeline_part(job, stage, own)]
    if job.tensor > 1:
        parts.append(_tensor_part(job, stage, own))
    bars = [bar for _, part_bars in parts for bar in part_bars]
    for role in sorted({call.role for call in own}):
        # Several groups make norms and overflow checks: these bars name theirs.
        calls = [
            replace(call, cause=f"{call.cause}, over the whole model") if call.cause in (NORM, OVERFLOW) else call
            for call in own
            if call.role == role
        ]
        ranks = _group_sizes(job, stage).get(role, job.ranks)
        bars += [replace(bar, role=role) for bar in cause_bars(calls, ranks, ACTIVATIONS, tensor.ACTIVATIONS)]
    return [form for form, _ in parts], bars


def model_parameters(job: Job) -> int:
    """Return the parameters of all stages and tensor-parallel ranks."""
    return count_elements(model_lists(gpt_neox_model(neox_shape(job.fact("model"))), "float32").parameters)


def _pipeline_part(job: Job, stage: PipelineStage, own: Sequence[ExpectedCall]) -> FormAndBars:
    batch, length, hidden = tensor.batch_dimensions(job)
    form = Fraction(pipeline_form(batch, length, hidden, stage.stages) * job.parameter_size)
    of_this_stage = Fraction(stage.neighbours * pipeline_calls.hidden_bytes(job))
    levels = {
        "pipeline: equation 4 is of all stages together": of_this_stage,
        f"pipeline: in each of {job.micro_batches} micro-batches": of_this_stage * job.micro_batches,
        "pipeline: each tensor-parallel rank sends its part": total_wire_bytes(own, 1, ACTIVATIONS),
    }
    bars = [replace(bar, role=ROLE) for bar in level_bars(form, levels)]
    return WaterfallBar("equation 4: 2 b s h (p-1)", form, ROLE), bars


def _tensor_part(job: Job, stage: PipelineStage, own: Sequence[ExpectedCall]) -> FormAndBars:
    form = tensor.form_bytes(job, stage.stages)
    kept = tensor.forward_sums(job, stage.blocks) + tensor.backward_sums(stage.blocks)
    recomputed = kept + pipeline_calls.recomputed_sums(job, stage)
    sums = {
        "this stage's layers, two sums forward and two backward": 4 * stage.blocks,
        "attention and MLP side by side, summed once": kept,
        "activations recomputed": recomputed,
        "the embedding, or the gradient of the head's input": recomputed + tensor.edge_sums(stage.first, stage.last),
    }
    is_shared = job.model("sequence_parallel", False)
    steps = sequence_parallel.activation_bars(job, own) if is_shared else tensor.activation_bars(job, own, form, sums)
    bars = [replace(bar, role=tensor.ROLE) for bar in steps]
    return WaterfallBar("equation 5 with L/p layers: (12 L/p + 2) b s h (t-1)/t", form, tensor.ROLE), bars
