"""DeepSpeed's pipeline of GPT-NeoX's model, alone or with tensor and data parallelism: what the ranks of a stage send.

Stages pass on the hidden states and the attention mask, and get gradients of the former back. What ranks with the same
part of the model do among each other are `zero` and `zero12`, on the stage's own parameters; what tensor-parallel ranks
do is `tensor`'s, for the stage's own layers. A job row is of one stage, and so is the prediction.

Assumed, as the job cannot say it: every micro-batch has the configured size and length; evaluation is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

from commtrace.theory.closed_forms import all_reduce, data_parallel, tensor_parallel
from commtrace.theory.closed_forms import pipeline as pipeline_form
from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    drop_repeated_steps,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import Job, NotPredictedError, element_size
from commtrace.theory.rules.gradient_buckets import buckets_exceeding_limit
from commtrace.theory.rules.megatron import tensor_parallel as tensor
from commtrace.theory.rules.registry import DEEPSPEED, GPT_NEOX, rule

from . import engine as zero
from . import zero12
from .engine import GRADIENTS, NORM, OVERFLOW, communication_type, parameter_size

ROLE: Final = "pipeline"
ACTIVATIONS: Final = "activations and their gradients"
MASK: Final = "the attention mask, as 16-bit numbers"
PARTS: Final = "how a part of the activations fits into the whole"
METADATA: Final = "what the first activations look like"
GATHERED: Final = "parts of activations put together again"
TIED: Final = "gradients of tied weights"
LOSS: Final = "the loss, told to all stages"

BLOCK: Final = "ParallelTransformerLayerPipe"
EMBEDDING: Final = "EmbeddingPipe"
HEADS: Final = ("ParallelLinearPipe", EMBEDDING)

_META_NUMBERS: Final = 256  # TENSOR_META_SIZE
_FALLBACK_ELEMENTS: Final = 500_000_000  # MEMORY_OPT_ALLREDUCE_SIZE
_OPTIMIZERS: Final = ("DeepSpeedZeroOptimizer", "BF16_Optimizer")


@dataclass(frozen=True)
class PipelineStage:
    """Where a rank stands in the pipeline, and what is there."""

    number: int
    stages: int
    layers: tuple[str, ...]
    facts: dict[str, Any]

    @property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether it has the head and the loss."""
        return self.number == self.stages - 1

    @property
    def blocks(self) -> int:
        """Transformer layers."""
        return self.layers.count(BLOCK)

    @property
    def neighbours(self) -> int:
        """Boundaries with other stages."""
        return (not self.first) + (not self.last)


def stage_of(job: Job) -> PipelineStage:
    """The stage of a job row."""
    facts = dict(job.fact("pipeline"))
    return PipelineStage(int(facts["stage"]), int(job.fact("pipeline_stages")), tuple(map(str, facts["layers"])), facts)


def predict(job: Job) -> Prediction:
    """What a rank of one stage communicates. Raises NotPredictedError for settings without rules."""
    stage = stage_of(job)
    check(job, stage)
    data = _among_replicas(job)
    own = (*_of_tensor(job, stage), *_of_model(job))
    start = (*_of_replicas(job, data.start), *tied_broadcasts(job), *parameter_counts(job), *communicator_setup(stage))
    always = (*boundary_calls(job, stage), *tied_gradients(job), *loss_calls(job, stage), *own)
    step = (*_of_replicas(job, data.steps[0]), *always)
    forms, bars = _sum(job, stage, data, always)
    label = "3D: equations 2 + 4 + 5" if job.tensor > 1 else "equations 2 + 4"
    norms = tuple(one for one in _of_model(job) if one.cause == NORM)
    skipped = tuple(
        (*_of_replicas(job, messages), *(norms if any(one.cause == NORM for one in messages) else ()))
        for messages in data.skipped
    )
    shared = f", tensor-parallel over {job.tensor}" if job.tensor > 1 else ""
    return Prediction(
        f"{data.scheme}, pipeline of {stage.stages} stages{shared}",
        job.ranks,
        start,
        drop_repeated_steps([(*metadata(stage), *step), step]),
        WaterfallBar(label, sum((form.bytes for form in forms), Fraction(0))),
        tuple(bars),
        skipped,
        {ROLE: stage.stages, tensor.ROLE: job.tensor, "model": stage.stages * job.tensor, "self": 1},
        tuple(forms),
    )


def check(job: Job, stage: PipelineStage) -> None:
    """Raise NotPredictedError for what has no rules yet."""
    if stage.stages < 2:
        raise NotPredictedError("a pipeline of one stage has no rules yet")
    if "model" not in job.row or not stage.facts["attention_mask"]:
        raise NotPredictedError("the stages of a model that is not GPT-NeoX's (GPT2ModelPipe) have no rules yet")
    for name, words in (("dynamic_shape", "shapes that change"), ("bool_tensors", "bool tensors")):
        if stage.facts[name]:
            raise NotPredictedError(f"a pipeline with {words} has no rules yet")
    known = {EMBEDDING, BLOCK, "NormPipe", "ParallelLinearPipe", "_pre_transformer_block", "_post_transformer_block"}
    if not known.issuperset(stage.layers):
        raise NotPredictedError(f"layers of other kinds than GPT-NeoX's: {sorted({*stage.layers} - known)}")
    if stage.last != ("_post_transformer_block" in stage.layers):
        raise NotPredictedError("stages that are cut behind the last transformer layer cannot pass anything on")
    if job.model("model_parallel_size", 1) != job.tensor:
        raise NotPredictedError(
            f"the model is cut for {job.model('model_parallel_size', 1)} ranks and the grid for {job.tensor}"
        )
    if job.tensor > 1 and stage.facts["grad_partitioned"] != stage.facts["pipe_partitioned"]:
        raise NotPredictedError(
            "DeepSpeed 0.19.8 cannot send activations in parts and their gradients whole, or vice versa"
        )
    accumulates = job.row.get("grad_accum_dtype", job.parameters[0].dtype)
    if job.fact("optimizer") not in _OPTIMIZERS and job.fact("precision") != "fp32":
        raise NotPredictedError(f"the optimizer {job.fact('optimizer')} in a pipeline has no rules yet")
    if job.fact("optimizer") == "DeepSpeedZeroOptimizer" and accumulates != job.parameters[0].dtype:
        raise NotPredictedError("ZeRO-1 in a pipeline whose gradients are summed in another type has no rules yet")


# --- among the ranks of one stage that hold the same parameters -----------------------------------------------------


def _among_replicas(job: Job) -> Prediction:
    """Of the stage's own parameters, as if they were all."""
    alone = Job(stage_as_model(job))
    if job.fact("optimizer") == "BF16_Optimizer":
        return _bf16(alone)
    return zero.predict(alone) if int(job.fact("zero_stage")) == 0 else zero12.predict(alone)


@rule("deepspeed.runtime.engine.DeepSpeedEngine._configure_zero_optimizer (overlap_comm in a pipeline)", DEEPSPEED)
def overlap_comm() -> bool:
    """Whatever the configuration says, gradients are reduced when all of them are there."""
    return False


def stage_as_model(job: Job) -> dict[str, Any]:
    """The row of a job whose whole model is this stage: to ZeRO the pipeline is model parallelism."""
    stages = int(job.fact("pipeline_stages"))
    settings = {**job.fact("zero"), "overlap_comm": overlap_comm()}
    return {**job.row, "pipeline_stages": 1, "tensor_parallel_size": job.tensor * stages, "zero": settings}


def _bf16(job: Job) -> Prediction:
    """Under BF16_Optimizer: bf16 without ZeRO, or with ZeRO-1 and gradients summed in fp32."""
    zero.check(job)
    elements = sum(parameter.elements for parameter in job.parameters)
    half = data_parallel(elements, job.ranks) * parameter_size(job) / 2
    reduced, gathered = bf16_gradients(job), zero12.parameter_gathers(job)
    levels = zero.gradient_levels(job, zero.scatter_volume(job))
    levels["all_reduce in place of reduce_scatter"] = total_wire_bytes(reduced, job.ranks)
    bars = [
        *level_bars(half, levels),
        *level_bars(half, {"padding of the parameters to equal parts": total_wire_bytes(gathered, job.ranks)}),
    ]
    name = f"ZeRO-{int(job.fact('zero_stage'))} (BF16_Optimizer)"
    form = WaterfallBar("equation 2: 2 P (d-1)/d", 2 * half)
    start = tuple(zero.broadcast_model(job))
    return Prediction(name, job.ranks, start, ((*reduced, *gathered),), form, tuple(bars), (tuple(gathered),))


@rule("deepspeed.runtime.bf16_optimizer.BF16_Optimizer.get_grads_for_reduction; "
      "deepspeed.runtime.pipe.engine.PipelineEngine._bf16_reduce_grads", DEEPSPEED)  # fmt: skip
def bf16_gradients(job: Job) -> list[ExpectedCall]:
    """The flat gradients of each group of the optimizer, padding included, in the type of communication."""
    flats = [zero12.flat_group(job, group).part * job.ranks for group in job.groups]
    size = element_size(communication_type(job))
    return [
        ExpectedCall("all_reduce", held * size, GRADIENTS)
        for held in buckets_exceeding_limit(flats, _FALLBACK_ELEMENTS)
    ]


def _of_replicas(job: Job, messages: Iterable[ExpectedCall]) -> list[ExpectedCall]:
    """In a group with one member the calls are made, and nothing leaves the rank."""
    return [one if job.ranks > 1 else replace(one, role="self") for one in messages]


# --- among stages ---------------------------------------------------------------------------------------------------


@rule("deepspeed.runtime.pipe.engine.PipelineEngine.__init__ (Initialize pipeline communicators)", DEEPSPEED)
def communicator_setup(stage: PipelineStage) -> list[ExpectedCall]:
    """A loss of nothing, to each next stage."""
    return _both_ways(stage, forward=[(4, "pipeline communicators are set up")], backward=[])


@rule("deepspeed.runtime.pipe.engine.PipelineEngine.__init__ (params_tensor)", DEEPSPEED)
def parameter_counts(job: Job) -> list[ExpectedCall]:
    """Two 64-bit numbers: parameters, and those that no other stage has."""
    return [ExpectedCall("all_reduce", 16, "parameters are counted", role=model_role(job))]


@rule("deepspeed.runtime.pipe.topology.PipelineParallelGrid.__init__ (ds_model_proc_group)", DEEPSPEED)
def model_role(job: Job) -> str:
    """All ranks that hold one copy of the model; without tensor parallelism those are the stages."""
    return "model" if job.tensor > 1 else ROLE


@rule("deepspeed.runtime.pipe.module.PipelineModule._synchronize_tied_weights", DEEPSPEED)
def tied_broadcasts(job: Job) -> list[ExpectedCall]:
    """In the type in which the model was made, before the engine casts it."""
    return [
        ExpectedCall(
            "broadcast",
            _parameter_elements(job, tied) * element_size(str(tied["first_dtype"])),
            "first tied weights",
            role=ROLE,
            ranks=int(tied["ranks"]),
        )
        for tied in job.fact("pipeline", "tied")
    ]


@rule("deepspeed.runtime.pipe.engine.PipelineEngine._exec_reduce_tied_grads", DEEPSPEED)
def tied_gradients(job: Job) -> list[ExpectedCall]:
    """Once a step, whole, in the type in which gradients are kept."""
    kept = job.fact("grad_accum_dtype") if job.fact("optimizer") == "BF16_Optimizer" else job.parameters[0].dtype
    size = element_size(str(kept))
    return [
        ExpectedCall("all_reduce", _parameter_elements(job, tied) * size, TIED, role=ROLE, ranks=int(tied["ranks"]))
        for tied in job.fact("pipeline", "tied")
    ]


def _parameter_elements(job: Job, tied: dict[str, Any]) -> int:
    return next(one.elements for one in job.parameters if one.name == tied["parameter"])


@rule("deepspeed.runtime.pipe.engine.PipelineEngine._send_tensor_meta, _recv_tensor_meta", DEEPSPEED)
def metadata(stage: PipelineStage) -> list[ExpectedCall]:
    """Before the first activations goes what they look like: a fixed number of 32-bit numbers."""
    return _both_ways(stage, forward=[(4 * _META_NUMBERS, METADATA)], backward=[])


def boundary_calls(job: Job, stage: PipelineStage) -> list[ExpectedCall]:
    """What a stage and its neighbours send to each other in one step."""
    messages = _both_ways(stage, forward=activations(job, stage), backward=gradients(job, stage))
    return [one.times(job.micro_batches) for one in messages]


MessageSizes = list[tuple[int, str]]
"""Bytes and what they are for."""


def _both_ways(stage: PipelineStage, *, forward: MessageSizes, backward: MessageSizes) -> list[ExpectedCall]:
    """A stage sends forward unless it is the last, and gets as much from the one before; backward the other way."""
    ways = [("send", not stage.last, forward), ("recv", not stage.first, forward)]
    ways += [("send", not stage.first, backward), ("recv", not stage.last, backward)]
    return [ExpectedCall(op, size, cause, role=ROLE) for op, has, what in ways if has for size, cause in what]


@rule("deepspeed.runtime.pipe.engine.PipelineEngine._exec_send_activations, _exec_recv_activations", DEEPSPEED)
def activations(job: Job, stage: PipelineStage) -> MessageSizes:
    """Hidden states, whole or with what says how this rank's part fits in; then the mask."""
    return [*_hidden(job, sends_partitions(job, stage)), (mask_bytes(job), MASK)]


@rule("deepspeed.runtime.pipe.engine.PipelineEngine._exec_send_grads, _exec_recv_grads", DEEPSPEED)
def gradients(job: Job, stage: PipelineStage) -> MessageSizes:
    """The same of the gradients; the mask has none."""
    return _hidden(job, sends_partitions(job, stage))


def _hidden(job: Job, parts: bool) -> MessageSizes:
    whole = hidden_bytes(job)
    return [(layout_bytes(job), PARTS), (whole // job.tensor, ACTIVATIONS)] if parts else [(whole, ACTIVATIONS)]


@rule("deepspeed.runtime.pipe.engine.PipelineEngine.__init__ (is_pipe_partitioned)", DEEPSPEED)
def sends_partitions(job: Job, stage: PipelineStage) -> bool:
    """Each of the tensor-parallel ranks, which all have the same, sends its part of it."""
    return job.tensor > 1 and bool(stage.facts["pipe_partitioned"])


@rule("megatron.model.gpt2_model.GPT2ModelPipe.init_specs (what passes between the layers)", GPT_NEOX)
def hidden_bytes(job: Job) -> int:
    """B s h numbers of the parameters' type."""
    return tensor.activation_elements(job) * parameter_size(job)


@rule("deepspeed.runtime.pipe.engine.PipelineEngine._exec_send_activations (has_attention_mask)", DEEPSPEED)
def mask_bytes(job: Job) -> int:
    """S by s bools for all sequences, sent as 16-bit numbers in every precision."""
    return 2 * int(job.model("seq_length")) ** 2


@rule("deepspeed.runtime.utils.PartitionedTensor.to_meta", DEEPSPEED)
def layout_bytes(job: Job) -> int:
    """64-bit numbers: three dimensions and how many, parts and which this is, where each begins and the last ends."""
    return 8 * (1 + 3 + 2 + job.tensor + 1)


@rule("deepspeed.runtime.pipe.engine.PipelineEngine._aggregate_total_loss", DEEPSPEED)
def loss_calls(job: Job, stage: PipelineStage) -> list[ExpectedCall]:
    """The last stages average; then two 32-bit numbers, of these micro-batches and of all, go to the other stages."""
    averaged = [ExpectedCall("all_reduce", 4, "the loss, averaged")] if stage.last and job.ranks > 1 else []
    return [*averaged, ExpectedCall("broadcast", 8, LOSS, role=ROLE)]


# --- among all ranks that hold one copy of the model ----------------------------------------------------------------


def _of_model(job: Job) -> list[ExpectedCall]:
    """What the optimizer compares, in a step."""
    alone = Job(stage_as_model(job))
    messages = bf16_norm(job) if job.fact("optimizer") == "BF16_Optimizer" else tensor.optimizer_calls(alone)
    return [replace(one, role=model_role(job)) for one in messages]


@rule("deepspeed.runtime.bf16_optimizer.BF16_Optimizer.step; deepspeed.runtime.utils.get_global_norm_of_tensors",
      DEEPSPEED)  # fmt: skip
def bf16_norm(job: Job) -> list[ExpectedCall]:
    """A 32-bit number, whether gradients are clipped or not."""
    return [ExpectedCall("all_reduce", 4, NORM)]


# --- among tensor-parallel ranks ------------------------------------------------------------------------------------


def _of_tensor(job: Job, stage: PipelineStage) -> list[ExpectedCall]:
    """What passes within the stage's layers in a step, and what its neighbours sent in parts."""
    if job.tensor == 1:
        return []
    sums = forward_sums(job, stage) + backward_sums(stage) + recomputed_sums(job, stage) + edge_sums(stage)
    messages = [
        ExpectedCall("all_reduce", tensor.activation_bytes(job), tensor.ACTIVATIONS, sums, role=tensor.ROLE),
        *(tensor.loss_sums(job) if stage.last else ()),
        *partition_gathers(job, stage),
    ]
    return [one.times(job.micro_batches) for one in messages]


@rule("megatron.mpu.layers.RowParallelLinear.forward (of a stage's layers)", GPT_NEOX)
def forward_sums(job: Job, stage: PipelineStage) -> int:
    """Behind attention and MLP of each layer; once behind both where they are side by side."""
    return stage.blocks * (1 if job.model("gpt_j_residual", False) else 2)


@rule("megatron.mpu.layers.ColumnParallelLinear.forward (copy_to_model_parallel_region of a stage's layers)", GPT_NEOX)
def backward_sums(stage: PipelineStage) -> int:
    """Gradients in front of attention and MLP of each layer."""
    return stage.blocks * 2


@rule("megatron.mpu.layers.VocabParallelEmbedding.forward; megatron.model.transformer.ParallelLinear (in stages)",
      GPT_NEOX)  # fmt: skip
def edge_sums(stage: PipelineStage) -> int:
    """The first stage has the embedding, the last one the gradient of the head's input."""
    return int(stage.first) + int(stage.last)


@rule("deepspeed.runtime.pipe.module.PipelineModule.forward, _is_checkpointable", DEEPSPEED)
def recomputed_sums(job: Job, stage: PipelineStage) -> int:
    """Those of the stretches that are recomputed, which hold transformer layers and nothing else.

    Stretches are counted from the stage's first layer. DeepSpeed's own non-reentrant recomputation does not stop early.
    """
    interval = int(stage.facts["activation_checkpoint_interval"])
    if not interval:
        return 0
    stretches = [stage.layers[at : at + interval] for at in range(0, len(stage.layers), interval)]
    again = sum(len(one) for one in stretches if set(one) == {BLOCK})
    return forward_sums(job, stage) // max(1, stage.blocks) * again


@rule("deepspeed.runtime.pipe.engine.PipelineEngine._exec_forward_pass, _exec_backward_pass; "
      "deepspeed.runtime.utils.PartitionedTensor.full", DEEPSPEED)  # fmt: skip
def partition_gathers(job: Job, stage: PipelineStage) -> list[ExpectedCall]:
    """Activations and gradients that came in are put together; so is, for backward, the stage's own output."""
    calls = (stage.neighbours + (not stage.last)) * sends_partitions(job, stage)
    return [ExpectedCall("all_gather", hidden_bytes(job), GATHERED, calls, role=tensor.ROLE)] if calls else []


# --- from the formulas to a step ------------------------------------------------------------------------------------


def _sum(
    job: Job, stage: PipelineStage, data: Prediction, always: Iterable[ExpectedCall]
) -> tuple[list[WaterfallBar], list[WaterfallBar]]:
    """The closed forms of the paper by role, and what leads from them to this rank's steady step."""
    own = list(always)
    size = parameter_size(job)
    parts = [_data_part(job, data, size), _pipeline_part(job, stage, own, size)]
    if job.tensor > 1:
        parts.append(_tensor_part(job, stage, own, size))
    forms = [form for form, _ in parts]
    bars = [bar for _, some in parts for bar in some]
    known = (ACTIVATIONS, tensor.ACTIVATIONS)
    for role in sorted({one.role for one in own}):
        rest = [_named(one) for one in own if one.role == role and one.cause not in known]
        ranks = {ROLE: stage.stages, tensor.ROLE: job.tensor, "model": stage.stages * job.tensor}.get(role, job.ranks)
        bars += [replace(bar, role=role) for bar in cause_bars(rest, ranks)]
    return forms, bars


def _named(message: ExpectedCall) -> ExpectedCall:
    """A norm of whose ranks says little by itself."""
    several = message.cause in (NORM, OVERFLOW)
    return replace(message, cause=f"{message.cause}, over the whole model") if several else message


def _data_part(job: Job, data: Prediction, size: int) -> tuple[WaterfallBar, list[WaterfallBar]]:
    form = data_parallel(model_parameters(job), job.ranks) * size
    less = WaterfallBar("a rank has its stage's part of the parameters", data.closed_form.bytes - form)
    return WaterfallBar("equation 2: 2 P (d-1)/d", form), [less, *data.bars]


def model_parameters(job: Job) -> int:
    """Of all stages and tensor-parallel ranks together, as GPT-NeoX counts them: 2Vh + L(12h^2 + 13h) + 2h."""
    vocabulary, hidden, layers = (int(job.model(name)) for name in ("padded_vocab_size", "hidden_size", "num_layers"))
    matrices = 2 if job.model("no_weight_tying", False) else 1
    return matrices * vocabulary * hidden + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden


def _pipeline_part(
    job: Job, stage: PipelineStage, own: Iterable[ExpectedCall], size: int
) -> tuple[WaterfallBar, list[WaterfallBar]]:
    batch, length, hidden = tensor.batch_dimensions(job)
    form = Fraction(pipeline_form(batch, length, hidden, stage.stages) * size)
    one = Fraction(stage.neighbours * hidden_bytes(job))
    levels = {
        "pipeline: equation 4 is of all stages together": one,
        f"pipeline: in each of {job.micro_batches} micro-batches": one * job.micro_batches,
        "pipeline: each tensor-parallel rank sends its part": total_wire_bytes(
            (message for message in own if message.cause == ACTIVATIONS), 1
        ),
    }
    bars = [replace(bar, role=ROLE) for bar in level_bars(form, levels)]
    return WaterfallBar("equation 4: 2 b s h (p-1)", form, ROLE), bars


def _tensor_part(
    job: Job, stage: PipelineStage, own: Iterable[ExpectedCall], size: int
) -> tuple[WaterfallBar, list[WaterfallBar]]:
    batch, length, hidden = tensor.batch_dimensions(job)
    layers = Fraction(int(job.model("num_layers")), stage.stages)
    form = tensor_parallel(batch, length, hidden, layers, job.tensor) * size

    def volume(sums: int) -> Fraction:
        return sums * all_reduce(tensor.activation_elements(job), job.tensor) * size

    summed = forward_sums(job, stage) + backward_sums(stage)
    again = summed + recomputed_sums(job, stage)
    every = again + edge_sums(stage)
    levels = {
        "tensor parallelism: this stage's layers, two sums forward and two backward": volume(4 * stage.blocks),
        "tensor parallelism: attention and MLP side by side, summed once": volume(summed),
        "tensor parallelism: activations recomputed": volume(again),
        "tensor parallelism: the embedding, or the gradient of the head's input": volume(every),
        f"tensor parallelism: in each of {job.micro_batches} micro-batches": job.micro_batches * volume(every),
        "tensor parallelism: sums travel in fp32": total_wire_bytes(
            (message for message in own if message.cause == tensor.ACTIVATIONS), job.tensor
        ),
    }
    bars = [replace(bar, role=tensor.ROLE) for bar in level_bars(form, levels)]
    return WaterfallBar("equation 5 with L/p layers: (12 L/p + 2) b s h (t-1)/t", form, tensor.ROLE), bars
