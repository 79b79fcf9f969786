"""DeepSpeed's pipeline of GPT-NeoX's model, alone or with tensor and data parallelism: calls of a stage's ranks.

Stages pass on the hidden states and the attention mask, and get gradients of the former back. Among ranks with the same
part of the model, the rules are those of `engine` and `zero12`, for the stage's parameters; among tensor-parallel ranks
those of `tensor_parallel`, for the stage's layers. A job row is of one stage, and so is the prediction.

Assumptions, which no job row contains: every micro-batch has the configured size and length. Evaluation is not
counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final, TypeAlias

from commtrace.theory.closed_forms import pipeline as pipeline_form
from commtrace.theory.expected_calls import ExpectedCall, Prediction, WaterfallBar, total_wire_bytes
from commtrace.theory.job import Job, element_size, refuse
from commtrace.theory.model_shapes import count_elements, gpt_neox_model, model_lists, neox_shape
from commtrace.theory.rules.megatron import sequence_parallel
from commtrace.theory.rules.megatron import tensor_parallel as tensor
from commtrace.theory.rules.registry import DEEPSPEED, GPT_NEOX, rule
from commtrace.theory.waterfall import cause_bars, level_bars

from . import engine, zero12
from .engine import NORM, OVERFLOW

FormAndBars: TypeAlias = tuple[WaterfallBar, list[WaterfallBar]]
"""A closed form, and the bars that lead from it to the calls."""

ROLE: Final = "pipeline"
ACTIVATIONS: Final = "activations and their gradients"
MASK: Final = "the attention mask, as 16-bit numbers"
PARTS: Final = "metadata of partitioned activations"
METADATA: Final = "metadata of the first activations"
GATHERED: Final = "activations gathered from partitions"
TIED: Final = "gradients of tied weights"
LOSS: Final = "the loss, broadcast to all stages"

BLOCK: Final = "ParallelTransformerLayerPipe"
EMBEDDING: Final = "EmbeddingPipe"

_META_NUMBERS: Final = 256  # TENSOR_META_SIZE
_OPTIMIZERS: Final = ("DeepSpeedZeroOptimizer", "BF16_Optimizer")
_ENGINE: Final = "deepspeed.runtime.pipe.engine.PipelineEngine."


@dataclass(frozen=True)
class PipelineStage:
    """A stage of a pipeline: its number, the number of stages, its layers' names, and its `pipeline` facts."""

    number: int
    stages: int
    layers: tuple[str, ...]
    facts: dict[str, Any]

    @property
    def first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether the stage has the head and the loss."""
        return self.number == self.stages - 1

    @property
    def blocks(self) -> int:
        """Number of transformer layers."""
        return self.layers.count(BLOCK)

    @property
    def neighbours(self) -> int:
        """Number of neighbouring stages."""
        return (not self.first) + (not self.last)


def predict(job: Job) -> Prediction:
    """Predict what a rank of one stage communicates. Raise NotPredictedError for settings without rules."""
    facts = dict(job.fact("pipeline"))
    layers = tuple(map(str, facts["layers"]))
    stage = PipelineStage(int(facts["stage"]), int(job.fact("pipeline_stages")), layers, facts)
    check(job, stage)
    model = Job(stage_as_model(job))
    data = _among_replicas(model)
    optimizer = (replace(call, role=model_role(job)) for call in tensor.optimizer_calls(model))
    own = (*_tensor_calls(job, stage), *optimizer)
    boundary = _neighbour_calls(stage, forward=activations(job, stage), backward=gradients(job, stage))
    passed = (call.times(job.micro_batches) for call in boundary)
    always = (*passed, *tied_gradients(job), *loss_calls(job, stage), *own)
    start = (*tensor.alone_as_self(job, data.start), *tied_broadcasts(job), *parameter_counts(job))
    step = (*tensor.alone_as_self(job, data.steps[0]), *always)
    forms, bars = _waterfalls(job, stage, data, always)
    equations = "2" + " + 4" * (stage.stages > 1) + " + 5" * (job.tensor > 1)
    label = f"{'3D: ' if equations == '2 + 4 + 5' else ''}equation{'s' * (len(equations) > 1)} {equations}"
    stages = f"pipeline of {stage.stages} stages" if stage.stages > 1 else "pipeline engine of one stage"
    tensor_parallel_part = f", tensor-parallel over {job.tensor}" if job.tensor > 1 else ""
    return Prediction(
        scheme=f"{data.scheme}, {stages}{tensor_parallel_part}",
        ranks=job.ranks,
        start=(*start, *communicator_setup(stage)),
        steps=((*metadata(stage), *step), step),
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


# --- among the ranks of one stage that hold the same parameters -----------------------------------------------------


def _among_replicas(model: Job) -> Prediction:
    """Return the prediction for the stage's parameters, as if they were the whole model."""
    is_flat = int(model.fact("zero_stage")) > 0 or model.fact("optimizer") == "BF16_Optimizer"
    return zero12.predict(model) if is_flat else engine.predict(model)


@rule("deepspeed.runtime.engine.DeepSpeedEngine._configure_zero_optimizer (overlap_comm in a pipeline)", DEEPSPEED)
def stage_as_model(job: Job) -> dict[str, Any]:
    """To ZeRO the pipeline is model parallelism; returned is the row of a job whose model is this stage.

    Gradients are reduced when all of them are there, whatever the configuration says.
    """
    stages = int(job.fact("pipeline_stages"))
    settings = {**job.fact("zero"), "overlap_comm": False}
    return {**job.row, "pipeline_stages": 1, "tensor_parallel_size": job.tensor * stages, "zero": settings}


# --- among stages ---------------------------------------------------------------------------------------------------


@rule(_ENGINE + "__init__ (Initialize pipeline communicators)", DEEPSPEED)
def communicator_setup(stage: PipelineStage) -> list[ExpectedCall]:
    """Each stage sends the next one a loss of zero."""
    return _neighbour_calls(stage, forward=[(4, "pipeline communicators are set up")])


@rule(_ENGINE + "__init__ (params_tensor)", DEEPSPEED)
def parameter_counts(job: Job) -> list[ExpectedCall]:
    """Parameters are counted in two 64-bit numbers: all, and those that no other stage has."""
    return [ExpectedCall("all_reduce", 16, "parameters are counted", role=model_role(job))]


@rule("deepspeed.runtime.pipe.topology.PipelineParallelGrid.__init__ (ds_model_proc_group)", DEEPSPEED)
def model_role(job: Job) -> str:
    """The group of all ranks that hold one copy of the model is that of the stages, of tensor parallelism, or both."""
    has_stages, has_tensor = int(job.fact("pipeline_stages")) > 1, job.tensor > 1
    both = "model" if has_tensor else ROLE
    return both if has_stages else tensor.ROLE if has_tensor else "self"


@rule("deepspeed.runtime.pipe.module.PipelineModule._synchronize_tied_weights", DEEPSPEED)
def tied_broadcasts(job: Job) -> list[ExpectedCall]:
    """Tied weights are broadcast in the type in which the model was made, before the engine casts it."""
    return [
        _among_tied(job, tied, ExpectedCall("broadcast", element_size(str(tied["first_dtype"])), "first tied weights"))
        for tied in job.fact("pipeline", "tied")
    ]


@rule(_ENGINE + "_exec_reduce_tied_grads", DEEPSPEED)
def tied_gradients(job: Job) -> list[ExpectedCall]:
    """Gradients of tied weights are all_reduced once a step, in the type in which gradients are kept."""
    kept = job.fact("grad_accum_dtype") if job.fact("optimizer") == "BF16_Optimizer" else job.parameters[0].dtype
    call = ExpectedCall("all_reduce", element_size(str(kept)), TIED)
    return [_among_tied(job, tied, call) for tied in job.fact("pipeline", "tied")]


def _among_tied(job: Job, tied: dict[str, Any], call: ExpectedCall) -> ExpectedCall:
    """Return a call whose payload is of one element, for all elements, among the stages that have the weight."""
    elements = next(parameter.elements for parameter in job.parameters if parameter.name == tied["parameter"])
    return replace(call, payload=call.payload * elements, role=ROLE).among(int(tied["ranks"]))


@rule(_ENGINE + "_send_tensor_meta, _recv_tensor_meta", DEEPSPEED)
def metadata(stage: PipelineStage) -> list[ExpectedCall]:
    """Before the first activations, a fixed number of 32-bit numbers describes them."""
    return _neighbour_calls(stage, forward=[(4 * _META_NUMBERS, METADATA)])


MessageSizes = list[tuple[int, str]]
"""Payload in bytes and cause of messages in one direction."""


def _neighbour_calls(
    stage: PipelineStage, *, forward: MessageSizes, backward: MessageSizes | None = None
) -> list[ExpectedCall]:
    """Return sends and receives of a stage: forward to the next and from the previous one, backward the reverse."""
    directions = (
        ("send", not stage.last, forward),
        ("recv", not stage.first, forward),
        ("send", not stage.first, backward or []),
        ("recv", not stage.last, backward or []),
    )
    return [
        ExpectedCall(op, payload, cause, role=ROLE)
        for op, has_neighbour, messages in directions
        if has_neighbour
        for payload, cause in messages
    ]


@rule(_ENGINE + "_exec_send_activations, _exec_recv_activations", DEEPSPEED)
def activations(job: Job, stage: PipelineStage) -> MessageSizes:
    """Hidden states travel as their gradients do; then the mask, which has none."""
    return [*gradients(job, stage), (mask_bytes(job), MASK)]


@rule(_ENGINE + "_exec_send_grads, _exec_recv_grads", DEEPSPEED)
def gradients(job: Job, stage: PipelineStage) -> MessageSizes:
    """Gradients of the hidden states travel whole, or as this rank's part with its metadata."""
    payload = hidden_bytes(job)
    if not sends_partitions(job, stage):
        return [(payload, ACTIVATIONS)]
    return [(layout_bytes(job), PARTS), (payload // job.tensor, ACTIVATIONS)]


@rule(_ENGINE + "__init__ (is_pipe_partitioned)", DEEPSPEED)
def sends_partitions(job: Job, stage: PipelineStage) -> bool:
    """Tensor-parallel ranks, which all have the same activations, send a part each (pipe_partitioned)."""
    return job.tensor > 1 and bool(stage.facts["pipe_partitioned"])


@rule("megatron.model.gpt2_model.GPT2ModelPipe.init_specs (what passes between the layers)", GPT_NEOX)
def hidden_bytes(job: Job) -> int:
    """Between layers pass b s h numbers of the parameters' type; returned are their bytes."""
    return tensor.activation_elements(job) * job.parameter_size


@rule(_ENGINE + "_exec_send_activations (has_attention_mask)", DEEPSPEED)
def mask_bytes(job: Job) -> int:
    """The mask is s by s bools for all sequences, sent as 16-bit numbers in every precision; returned are its bytes."""
    return 2 * int(job.model("seq_length")) ** 2


@rule("deepspeed.runtime.utils.PartitionedTensor.to_meta", DEEPSPEED)
def layout_bytes(job: Job) -> int:
    """Metadata of a part are 64-bit numbers; returned are their bytes.

    Three dimensions and their number, the number of parts and which this is, the begin of each and the end of the last.
    """
    return 8 * (1 + 3 + 2 + job.tensor + 1)


@rule(_ENGINE + "_aggregate_total_loss", DEEPSPEED)
def loss_calls(job: Job, stage: PipelineStage) -> list[ExpectedCall]:
    """The last stages average the loss; two 32-bit numbers, of these micro-batches and of all, go to the others."""
    averaged = [ExpectedCall("all_reduce", 4, "the loss, averaged")] if stage.last and job.ranks > 1 else []
    return [*averaged, *([ExpectedCall("broadcast", 8, LOSS, role=ROLE)] if stage.stages > 1 else [])]


# --- among tensor-parallel ranks ------------------------------------------------------------------------------------


def _tensor_calls(job: Job, stage: PipelineStage) -> list[ExpectedCall]:
    """Return what passes within the stage's layers in a step, and what its neighbours sent in parts."""
    if job.tensor == 1:
        return []
    if job.model("sequence_parallel", False):
        return sequence_parallel.activation_calls(job)
    layer_sums = tensor.forward_sums(job, stage.blocks) + tensor.backward_sums(stage.blocks)
    sums = layer_sums + recomputed_sums(job, stage) + tensor.edge_sums(stage.first, stage.last)
    calls = [
        ExpectedCall("all_reduce", tensor.activation_bytes(job), tensor.ACTIVATIONS, sums, role=tensor.ROLE),
        *(tensor.loss_sums(job) if stage.last else ()),
        *tensor.segment_gathers(job, len(recomputed_segments(stage))),
        *partition_gathers(job, stage),
    ]
    return [call.times(job.micro_batches) for call in calls]


@rule("deepspeed.runtime.pipe.module.PipelineModule.forward, _is_checkpointable", DEEPSPEED)
def recomputed_sums(job: Job, stage: PipelineStage) -> int:
    """Segments of transformer layers only are recomputed, and repeat their sums.

    Segments are counted from the stage's first layer. DeepSpeed's own non-reentrant recomputation does not stop early.
    """
    return tensor.forward_sums(job, sum(recomputed_segments(stage)))


def recomputed_segments(stage: PipelineStage) -> list[int]:
    """Return the number of layers in each segment of the stage that is recomputed."""
    interval = int(stage.facts["activation_checkpoint_interval"])
    return tensor.layer_segments([layer == BLOCK for layer in stage.layers], interval) if interval else []


@rule(_ENGINE + "_exec_forward_pass, _exec_backward_pass; deepspeed.runtime.utils.PartitionedTensor.full", DEEPSPEED)
def partition_gathers(job: Job, stage: PipelineStage) -> list[ExpectedCall]:
    """Received activations and gradients are gathered from their parts; so is, for backward, the stage's own output."""
    calls = (stage.neighbours + (not stage.last)) * sends_partitions(job, stage)
    return [ExpectedCall("all_gather", hidden_bytes(job), GATHERED, calls, role=tensor.ROLE)] if calls else []


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
    of_this_stage = Fraction(stage.neighbours * hidden_bytes(job))
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
    recomputed = kept + recomputed_sums(job, stage)
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
