"""Calls of a rank of a pipeline stage: with its neighbours, among all stages, and within its layers.

Stages send the hidden states and the attention mask forward, and the gradients of the hidden states backward.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from commtrace.job_row import JobRow, StageRow, TiedRow
from commtrace.theory.expected_calls import ExpectedCall
from commtrace.theory.job import Job, element_size
from commtrace.theory.rules.megatron import sequence_parallel, tensor_parallel
from commtrace.theory.rules.registry import DEEPSPEED, GPT_NEOX, rule

ROLE: Final = "pipeline"
ACTIVATIONS: Final = "activations and their gradients"
MASK: Final = "the attention mask, as 16-bit numbers"
PARTITION_METADATA: Final = "metadata of partitioned activations"
METADATA: Final = "metadata of the first activations"
PARTITIONED_ACTIVATIONS: Final = "activations gathered from partitions"
TIED: Final = "gradients of tied weights"
LOSS: Final = "the loss, broadcast to all stages"

BLOCK: Final = "ParallelTransformerLayerPipe"
EMBEDDING: Final = "EmbeddingPipe"

_META_NUMBERS: Final = 256  # TENSOR_META_SIZE
_ENGINE: Final = "deepspeed.runtime.pipe.engine.PipelineEngine."


@dataclass(frozen=True)
class PipelineStage:
    """A stage of a pipeline, as the job row has it, and the number of stages."""

    row: StageRow
    stages: int

    @property
    def first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.row.stage == 0

    @property
    def last(self) -> bool:
        """Whether the stage has the head and the loss."""
        return self.row.stage == self.stages - 1

    @property
    def blocks(self) -> int:
        """Number of transformer layers."""
        return self.row.layers.count(BLOCK)

    @property
    def neighbours(self) -> int:
        """Number of neighbouring stages."""
        return (not self.first) + (not self.last)


@rule("deepspeed.runtime.engine.DeepSpeedEngine._configure_zero_optimizer (overlap_comm in a pipeline)", DEEPSPEED)
def overlap_comm() -> bool:
    """Return False: in a pipeline, gradients are reduced after backward, whatever the configuration says."""
    return False


def stage_as_model(job: Job) -> JobRow:
    """Return the row of a job whose model is this stage: to ZeRO, the pipeline is model parallelism."""
    row, zero = copy(job.row), copy(job.row.zero)
    zero.overlap_comm = overlap_comm()
    row.pipeline_stages, row.tensor_parallel_size, row.zero = 1, job.tensor * job.row.pipeline_stages, zero
    return row


def start_calls(job: Job, stage: PipelineStage) -> list[ExpectedCall]:
    """Return the calls before the first step."""
    return [*tied_broadcasts(job), *parameter_counts(job), *communicator_setup(stage)]


def step_calls(job: Job, stage: PipelineStage) -> list[ExpectedCall]:
    """Return the calls of every step, except the optimizer's."""
    messages = _neighbour_calls(stage, forward=activation_messages(job, stage), backward=gradient_messages(job, stage))
    all_messages = [call.times(job.micro_batches) for call in messages]
    return [*all_messages, *tied_gradients(job), *loss_calls(job, stage), *_tensor_calls(job, stage)]


# --- among stages ---------------------------------------------------------------------------------------------------


@rule(_ENGINE + "__init__ (Initialize pipeline communicators)", DEEPSPEED)
def communicator_setup(stage: PipelineStage) -> list[ExpectedCall]:
    """Return the calls that set up communicators: each stage sends a loss of zero to the next."""
    return _neighbour_calls(stage, forward=[(4, "pipeline communicators are set up")])


@rule(_ENGINE + "__init__ (params_tensor)", DEEPSPEED)
def parameter_counts(job: Job) -> list[ExpectedCall]:
    """Return the all_reduce of two 64-bit numbers: all parameters, and those that no other stage has."""
    return [ExpectedCall("all_reduce", 16, "parameters are counted", role=model_role(job))]


@rule("deepspeed.runtime.pipe.topology.PipelineParallelGrid.__init__ (ds_model_proc_group)", DEEPSPEED)
def model_role(job: Job) -> str:
    """Return the role of the group of ranks that hold one copy of the model: stages, tensor parallelism, or both."""
    has_stages, has_tensor = job.row.pipeline_stages > 1, job.tensor > 1
    if has_stages:
        return "model" if has_tensor else ROLE
    return tensor_parallel.ROLE if has_tensor else "self"


@rule("deepspeed.runtime.pipe.module.PipelineModule._synchronize_tied_weights", DEEPSPEED)
def tied_broadcasts(job: Job) -> list[ExpectedCall]:
    """Return the broadcasts of tied weights, in the dtype that the model has before the engine casts it."""
    return [
        _among_tied(job, tied, ExpectedCall("broadcast", element_size(tied.first_dtype), "first tied weights"))
        for tied in job.row.pipeline.tied
    ]


@rule(_ENGINE + "_exec_reduce_tied_grads", DEEPSPEED)
def tied_gradients(job: Job) -> list[ExpectedCall]:
    """Return the all_reduces of gradients of tied weights, once per step, in the dtype in which gradients are kept."""
    kept = job.row.grad_accum_dtype if job.row.optimizer == "BF16_Optimizer" else job.parameters[0].dtype
    call = ExpectedCall("all_reduce", element_size(kept), TIED)
    return [_among_tied(job, tied, call) for tied in job.row.pipeline.tied]


def _among_tied(job: Job, tied: TiedRow, call: ExpectedCall) -> ExpectedCall:
    """Return a call for one element scaled to a tied weight, among the stages that have the weight."""
    elements = next(parameter.elements for parameter in job.parameters if parameter.name == tied.parameter)
    return replace(call, payload=call.payload * elements, role=ROLE).among(tied.ranks)


@rule(_ENGINE + "_send_tensor_meta, _recv_tensor_meta", DEEPSPEED)
def metadata(stage: PipelineStage) -> list[ExpectedCall]:
    """Return the messages that describe the first activations, in a fixed number of 32-bit numbers."""
    return _neighbour_calls(stage, forward=[(4 * _META_NUMBERS, METADATA)])


MessageSizes: TypeAlias = list[tuple[int, str]]
"""Payload in bytes and cause of each message in one direction."""


def _neighbour_calls(
    stage: PipelineStage, *, forward: MessageSizes, backward: MessageSizes | None = None
) -> list[ExpectedCall]:
    """Return the sends and receives of a stage: forward to the next and from the previous one, backward the reverse."""
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
def activation_messages(job: Job, stage: PipelineStage) -> MessageSizes:
    """Return the messages of activations: hidden states, sent like their gradients, then the attention mask."""
    return [*gradient_messages(job, stage), (mask_bytes(job), MASK)]


@rule(_ENGINE + "_exec_send_grads, _exec_recv_grads", DEEPSPEED)
def gradient_messages(job: Job, stage: PipelineStage) -> MessageSizes:
    """Return the messages of the hidden states' gradients: all of them, or this rank's shard and its metadata."""
    payload = hidden_bytes(job)
    if not sends_partitions(job, stage):
        return [(payload, ACTIVATIONS)]
    return [(layout_bytes(job), PARTITION_METADATA), (payload // job.tensor, ACTIVATIONS)]


@rule(_ENGINE + "__init__ (is_pipe_partitioned)", DEEPSPEED)
def sends_partitions(job: Job, stage: PipelineStage) -> bool:
    """Return whether tensor-parallel ranks, which have equal activations, send a shard each (pipe_partitioned)."""
    return job.tensor > 1 and stage.row.pipe_partitioned


@rule("megatron.model.gpt2_model.GPT2ModelPipe.init_specs (what passes between the layers)", GPT_NEOX)
def hidden_bytes(job: Job) -> int:
    """Return the bytes of the hidden states between layers: b s h elements of the parameters' dtype."""
    return tensor_parallel.activation_elements(job) * job.parameter_size


@rule(_ENGINE + "_exec_send_activations (has_attention_mask)", DEEPSPEED)
def mask_bytes(job: Job) -> int:
    """Return the bytes of the mask: s by s bools for all sequences, sent as 16-bit numbers in every precision."""
    return 2 * job.model.seq_length**2


@rule("deepspeed.runtime.utils.PartitionedTensor.to_meta", DEEPSPEED)
def layout_bytes(job: Job) -> int:
    """Return the bytes of a shard's metadata, which are 64-bit numbers.

    They are the number of dimensions and three dimensions, the number of shards and the index of this one, the start of
    each shard and the end of the last.
    """
    return 8 * (1 + 3 + 2 + job.tensor + 1)


@rule(_ENGINE + "_aggregate_total_loss", DEEPSPEED)
def loss_calls(job: Job, stage: PipelineStage) -> list[ExpectedCall]:
    """Return the last stage's all_reduce of the loss, and the broadcast of its own and the mean loss (32 bits each)."""
    averaged = [ExpectedCall("all_reduce", 4, "the loss, averaged")] if stage.last and job.ranks > 1 else []
    return [*averaged, *([ExpectedCall("broadcast", 8, LOSS, role=ROLE)] if stage.stages > 1 else [])]


# --- among tensor-parallel ranks ------------------------------------------------------------------------------------


def _tensor_calls(job: Job, stage: PipelineStage) -> list[ExpectedCall]:
    """Return the calls of the stage's tensor-parallel group in a step: of its layers, and of shards from neighbours."""
    if job.tensor == 1:
        return []
    if job.model.sequence_parallel:
        return sequence_parallel.activation_calls(job)
    count = tensor_parallel.forward_all_reduces(job, stage.blocks) + tensor_parallel.backward_all_reduces(stage.blocks)
    count += recomputed_all_reduces(job, stage) + tensor_parallel.edge_all_reduces(stage.first, stage.last)
    all_reduces = ExpectedCall("all_reduce", tensor_parallel.activation_bytes(job), tensor_parallel.ACTIVATIONS, count)
    calls = [
        replace(all_reduces, role=tensor_parallel.ROLE),
        *(tensor_parallel.loss_all_reduces(job) if stage.last else ()),
        *tensor_parallel.segment_all_gathers(job, len(recomputed_segments(stage))),
        *partition_all_gathers(job, stage),
    ]
    return [call.times(job.micro_batches) for call in calls]


@rule("deepspeed.runtime.pipe.module.PipelineModule.forward, _is_checkpointable", DEEPSPEED)
def recomputed_all_reduces(job: Job, stage: PipelineStage) -> int:
    """Return the number of all_reduces that recomputed segments repeat.

    Segments are counted from the stage's first layer, and recomputed if they consist of transformer layers only.
    DeepSpeed's own non-reentrant recomputation does not stop early.
    """
    return tensor_parallel.forward_all_reduces(job, sum(recomputed_segments(stage)))


def recomputed_segments(stage: PipelineStage) -> list[int]:
    """Return the number of layers in each segment of the stage that is recomputed."""
    interval = stage.row.activation_checkpoint_interval
    return tensor_parallel.layer_segments([layer == BLOCK for layer in stage.row.layers], interval) if interval else []


@rule(_ENGINE + "_exec_forward_pass, _exec_backward_pass; deepspeed.runtime.utils.PartitionedTensor.full", DEEPSPEED)
def partition_all_gathers(job: Job, stage: PipelineStage) -> list[ExpectedCall]:
    """Return the all_gathers of received activations and gradients and, for backward, of the stage's own output."""
    count = (stage.neighbours + (not stage.last)) * sends_partitions(job, stage)
    call = ExpectedCall("all_gather", hidden_bytes(job), PARTITIONED_ACTIVATIONS, count, role=tensor_parallel.ROLE)
    return [call] if count else []
