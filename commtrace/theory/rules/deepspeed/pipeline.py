"""DeepSpeed's pipeline of GPT-NeoX's model, alone or with tensor and data parallelism: calls of a stage's ranks.

Calls of the data-parallel group follow the rules of `engine` and `zero12`, for the stage's parameters; those of the
tensor-parallel group follow `tensor_parallel`, for the stage's layers; those among stages follow `pipeline_calls`. A
job row describes one stage, and so does the prediction. Assumptions are those of `tensor_parallel`. Evaluation is not
predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final, TypeAlias

from commtrace.job_row import JobRow
from commtrace.theory.closed_forms import pipeline as pipeline_form
from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import Job, refuse
from commtrace.theory.model_shapes import gpt_neox_model, model_lists, neox_shape
from commtrace.theory.rules.megatron import sequence_parallel, tensor_parallel
from commtrace.theory.rules.registry import DEEPSPEED

from . import engine, pipeline_calls, zero12
from .engine import NORM, OVERFLOW
from .pipeline_calls import ACTIVATIONS, BLOCK, EMBEDDING, ROLE, PipelineStage

FormAndBars: TypeAlias = tuple[WaterfallBar, list[WaterfallBar]]
"""A closed form, and the bars that lead from it to the calls."""

_OPTIMIZERS: Final = ("DeepSpeedZeroOptimizer", "BF16_Optimizer")


def predict(job: Job) -> Prediction:
    """Predict what a rank of one stage communicates. Raise NotPredictedError for settings without rules."""
    stage = PipelineStage(job.row.pipeline, job.row.pipeline_stages)
    check(job, stage)
    model = Job(pipeline_calls.stage_as_model(job))
    prediction = _data_parallel_prediction(model)
    optimizer = (replace(call, role=pipeline_calls.model_role(job)) for call in tensor_parallel.optimizer_calls(model))
    stage_calls = (*pipeline_calls.step_calls(job, stage), *optimizer)
    step = (*tensor_parallel.with_self_role(job, prediction.steps[0]), *stage_calls)
    forms, bars = _waterfalls(job, stage, prediction, stage_calls)
    equations = "2" + " + 4" * (stage.stages > 1) + " + 5" * (job.tensor > 1)
    label = f"{'3D: ' if equations == '2 + 4 + 5' else ''}equation{'s' * (len(equations) > 1)} {equations}"
    stages = f"pipeline of {stage.stages} stages" if stage.stages > 1 else "pipeline engine of one stage"
    tensor_scheme = f", tensor-parallel over {job.tensor}" if job.tensor > 1 else ""
    return Prediction(
        scheme=f"{prediction.scheme}, {stages}{tensor_scheme}",
        ranks=job.ranks,
        start=(*tensor_parallel.with_self_role(job, prediction.start), *pipeline_calls.start_calls(job, stage)),
        steps=((*pipeline_calls.metadata(stage), *step), step),
        closed_form=WaterfallBar(label, sum((form.bytes for form in forms), Fraction(0))),
        bars=tuple(bars),
        skipped=tensor_parallel.skipped_calls(job, prediction, stage_calls),
        others=_group_sizes(job, stage),
        forms=tuple(forms),
    )


def _group_sizes(job: Job, stage: PipelineStage) -> dict[str, int]:
    return {ROLE: stage.stages, tensor_parallel.ROLE: job.tensor, "model": stage.stages * job.tensor, "self": 1}


def check(job: Job, stage: PipelineStage) -> None:
    """Raise NotPredictedError for stages that have no rules yet."""
    job.require_architecture("a pipeline")
    known = {EMBEDDING, BLOCK, "NormPipe", "ParallelLinearPipe", "_pre_transformer_block", "_post_transformer_block"}
    row, optimizer, first_type = stage.row, job.row.optimizer, job.parameters[0].dtype
    sizes = job.model.model_parallel_size, job.tensor
    accumulates_otherwise = job.row.get(JobRow.grad_accum_dtype, first_type) != first_type
    refuse(
        (not row.attention_mask, "stages of a model that is not GPT-NeoX's (GPT2ModelPipe) have no rules yet"),
        (stage.stages > 1 and job.tensor > 1 and job.model.sequence_parallel,
         "a pipeline of several stages with sequence_parallel has no rules yet"),
        (row.dynamic_shape, "a pipeline with shapes that change has no rules yet"),
        (row.bool_tensors, "a pipeline with bool tensors has no rules yet"),
        (not known.issuperset(row.layers),
         f"layers other than GPT-NeoX's have no rules yet: {sorted({*row.layers} - known)}"),
        (stage.last != ("_post_transformer_block" in row.layers),
         "a pipeline that is split after the last transformer layer cannot send its activations"),
        (sizes[0] != sizes[1], f"the model has {sizes[0]} tensor-parallel ranks, but the grid has {sizes[1]}"),
        (job.tensor > 1 and row.grad_partitioned != row.pipe_partitioned,
         f"DeepSpeed {DEEPSPEED[1]} cannot send partitioned activations but whole gradients, or vice versa"),
        (optimizer not in _OPTIMIZERS and job.row.precision != "fp32",
         f"the optimizer {optimizer} in a pipeline has no rules yet"),
        (optimizer == "DeepSpeedZeroOptimizer" and accumulates_otherwise,
         "ZeRO-1 in a pipeline with gradients accumulated in another dtype has no rules yet"),
    )  # fmt: skip


def _data_parallel_prediction(model: Job) -> Prediction:
    """Return the prediction for the stage's parameters, as if they were the whole model."""
    is_flat = model.row.zero_stage > 0 or model.row.optimizer == "BF16_Optimizer"
    return zero12.predict(model) if is_flat else engine.predict(model)


# --- from the closed forms to a step --------------------------------------------------------------------------------


def _waterfalls(
    job: Job, stage: PipelineStage, prediction: Prediction, stage_calls: Sequence[ExpectedCall]
) -> tuple[list[WaterfallBar], list[WaterfallBar]]:
    """Return the closed forms of the paper by role, and the bars from them to this rank's steady step."""
    data_form = prediction.closed_form  # for this stage's parameters, as if they were the whole model
    waterfalls: list[FormAndBars] = [(data_form, list(prediction.bars))]
    if stage.stages > 1:
        form = WaterfallBar(data_form.label, 2 * engine.ring_bytes(job, model_parameters(job), job.parameter_size))
        stage_only = WaterfallBar("a rank has its stage's part of the parameters", data_form.bytes - form.bytes)
        waterfalls = [(form, [stage_only, *prediction.bars]), _pipeline_waterfall(job, stage, stage_calls)]
    if job.tensor > 1:
        waterfalls.append(_tensor_waterfall(job, stage, stage_calls))
    bars = [bar for _, role_bars in waterfalls for bar in role_bars]
    for role in sorted({call.role for call in stage_calls}):
        # Several groups compute norms and check for overflow, so these bars name their group.
        calls = [
            replace(call, cause=f"{call.cause}, over the whole model") if call.cause in (NORM, OVERFLOW) else call
            for call in stage_calls
            if call.role == role
        ]
        ranks = _group_sizes(job, stage).get(role, job.ranks)
        bars += [replace(bar, role=role) for bar in cause_bars(calls, ranks, ACTIVATIONS, tensor_parallel.ACTIVATIONS)]
    return [form for form, _ in waterfalls], bars


def model_parameters(job: Job) -> int:
    """Return the number of parameters of all stages and tensor-parallel ranks."""
    return model_lists(gpt_neox_model(neox_shape(job.model)), "float32").elements


def _pipeline_waterfall(job: Job, stage: PipelineStage, stage_calls: Sequence[ExpectedCall]) -> FormAndBars:
    batch, length, hidden = tensor_parallel.batch_dimensions(job)
    form = Fraction(pipeline_form(batch, length, hidden, stage.stages) * job.parameter_size)
    stage_bytes = Fraction(stage.neighbours * pipeline_calls.hidden_bytes(job))
    levels = {
        "pipeline: equation 4 is of all stages together": stage_bytes,
        f"pipeline: in each of {job.micro_batches} micro-batches": stage_bytes * job.micro_batches,
        "pipeline: each tensor-parallel rank sends its part": total_wire_bytes(stage_calls, 1, ACTIVATIONS),
    }
    bars = [replace(bar, role=ROLE) for bar in level_bars(form, levels)]
    return WaterfallBar("equation 4: 2 b s h (p-1)", form, ROLE), bars


def _tensor_waterfall(job: Job, stage: PipelineStage, stage_calls: Sequence[ExpectedCall]) -> FormAndBars:
    form = tensor_parallel.form_bytes(job, stage.stages)
    without_recomputation = tensor_parallel.forward_all_reduces(job, stage.blocks)
    without_recomputation += tensor_parallel.backward_all_reduces(stage.blocks)
    recomputed = without_recomputation + pipeline_calls.recomputed_all_reduces(job, stage)
    edges = tensor_parallel.edge_all_reduces(stage.first, stage.last)
    counts = {
        "this stage's layers, two sums forward and two backward": 4 * stage.blocks,
        "attention and MLP side by side, summed once": without_recomputation,
        "activations recomputed": recomputed,
        "the embedding, or the gradient of the head's input": recomputed + edges,
    }
    if job.model.sequence_parallel:
        bars = sequence_parallel.activation_bars(job, stage_calls)
    else:
        bars = tensor_parallel.activation_bars(job, stage_calls, form, counts)
    bars = [replace(bar, role=tensor_parallel.ROLE) for bar in bars]
    return WaterfallBar("equation 5 with L/p layers: (12 L/p + 2) b s h (t-1)/t", form, tensor_parallel.ROLE), bars
