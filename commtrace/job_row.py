"""The row of the log's `job` table: everything that determines what a model's training communicates.

This is its only definition. Hooks build a `JobRow` when a model is set up, and so do configuration files
(`commtrace.theory.configs`); the log has it as JSON, and rules and reports read its attributes. A row has the
fields that its source provides. Parameters, modules and layers are referred to by their index in the list that the
row has of them.
"""

from __future__ import annotations

from math import prod

from .job_facts import Facts, fact


class TensorRow(Facts):
    """A parameter or a buffer."""

    name: str = fact("Dotted name.")
    shape: list[int] = fact("Full shape, also if the tensor is partitioned or sharded.")
    dtype: str = fact('Element type as torch names it ("float32").')
    trainable: bool = fact("Parameters: whether it gets a gradient.", absent=True)
    expert: bool = fact("Parameters: whether it belongs to an expert of this rank.", absent=False)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class ModuleRow(Facts):
    """A module that has a forward."""

    name: str = fact('Dotted name; "": the model itself.')
    parameters: list[int] = fact("Its own parameters.")


class ZeroSettings(Facts):
    """DeepSpeed's settings of ZeRO (`zero_optimization`), by DeepSpeed's names without the prefix "stage3_".

    A log has all of them; these are the ones that rules read.
    """

    contiguous_gradients: bool = fact("Whether gradients are copied to one buffer.")
    reduce_scatter: bool = fact("Whether gradients are reduced to their owners only.")
    reduce_bucket_size: int = fact("Elements of a bucket of gradients.")
    use_multi_rank_bucket_allreduce: bool = fact("Whether a bucket of several owners is reduced in one call.")
    overlap_comm: bool = fact("Whether gradients are reduced during backward.")
    round_robin_gradients: bool = fact("Whether parameters are distributed over the ranks in turn.")
    parameter_alignment: bool = fact("Whether parameters are aligned to 16 bytes.")
    compute_grad_norm: bool = fact("Whether the norm of gradients is computed.")
    prefetch_bucket_size: int = fact("Elements that are gathered ahead.")
    param_persistence_threshold: int = fact("Elements below which a parameter stays gathered.")
    model_persistence_threshold: int = fact("Elements of a partition of all parameters that stay gathered, at most.")
    max_live_parameters: int = fact("Elements that are gathered at a time, at most.")
    max_reuse_distance: int = fact("Elements within which a parameter is kept for its next use.")
    zero_hpz_partition_size: int = fact("Ranks of a secondary partition (hpZ); 1: there is none.")
    memory_efficient_linear: bool = fact("Whether ZeRO-3 replaces linear layers by its own.")
    allgather_sequential: bool = fact("Whether each parameter is gathered in a call of its own.")
    use_all_reduce_for_fetch_params: bool = fact("Whether parameters are gathered by all_reduce.")
    zero_quantized_weights: bool = fact("Whether parameters are gathered in 8 bits (qwZ).")
    zero_quantized_nontrainable_weights: bool = fact("The same for frozen parameters.")
    zero_quantized_gradients: bool = fact("Whether gradients are reduced in 4 bits (qgZ).")
    enable_sanity_checks: bool = fact("Whether ranks compare what they are about to do.")


class ModelSettings(Facts):
    """Architecture of a model that declares it as GPT-NeoX does (`neox_args`), by GPT-NeoX's names."""

    num_layers: int = fact("Transformer layers.")
    hidden_size: int = fact("Hidden size h.")
    num_attention_heads: int = fact("Attention heads.")
    seq_length: int = fact("Tokens of a sequence s.")
    padded_vocab_size: int = fact("Rows of the embedding, of all tensor-parallel ranks.")
    no_weight_tying: bool = fact("Whether the head has a matrix of its own.")
    gpt_j_residual: bool = fact("Whether attention and MLP are side by side, as in GPT-J.", absent=False)
    gpt_j_tied: bool = fact("Whether attention and MLP then share a norm.", absent=False)
    hidden_dropout: float = fact("Probability of dropout after attention and MLP.", absent=0.0)
    attention_dropout: float = fact("Probability of dropout within attention.")
    checkpoint_activations: bool = fact("Whether activations are recomputed in backward.", absent=False)
    checkpoint_num_layers: int = fact("Layers that are recomputed together.", absent=1)
    checkpoint_reentrant: bool = fact("Whether recomputation uses reentrant autograd.", absent=True)
    model_parallel_size: int = fact("Tensor-parallel ranks.")
    sequence_parallel: bool = fact("Whether activations are sharded along the sequence between layers.", absent=False)
    sequence_parallel_size: int = fact("Ranks that share sequences by Ulysses.")
    context_parallel_size: int = fact("Ranks that share sequences in a ring.", absent=1)
    moe_num_experts: int = fact("Experts of a layer; 1: no mixture.")
    moe_expert_interval: int = fact("Every n-th layer has experts, from the first on.")
    moe_expert_parallel_size: int = fact("Ranks that have different experts.")
    moe_top_k: int = fact("Experts of a token.")
    moe_train_capacity_factor: float = fact("Capacity of an expert, in even shares of the tokens.")
    moe_min_capacity: int = fact("Tokens of an expert's capacity, at least.")
    moe_token_dropping: bool = fact("Whether tokens beyond the capacity are dropped.")
    fp32_allreduce: bool = fact("Whether activations are summed in fp32.", absent=False)
    gradient_clipping: float = fact("Norm that gradients are clipped to; 0: they are not.", absent=0.0)
    precision: str = fact("Precision of the parameters.")
    train_micro_batch_size_per_gpu: int = fact("Sequences of a rank's micro-batch b.")
    gradient_accumulation_steps: int = fact("Micro-batches of a step.")
    norm: str = fact("Kind of the norms.", absent="layernorm")
    pos_emb: str = fact("Kind of the position embedding.")
    max_position_embeddings: int = fact("Learned positions.", absent=0)
    activation: str = fact("Activation function of the MLP.", absent="gelu")
    num_kv_heads: int | None = fact("Heads of keys and values; null: as many as attention heads.", absent=None)
    intermediate_size: int | None = fact("Width of the MLP; null: from expansion_factor.", absent=None)
    expansion_factor: float | None = fact("Width of the MLP in hidden sizes; null: 4.", absent=None)
    mlp_multiple_of: int = fact("The width of the MLP is rounded up to a multiple of it.", absent=1)
    use_bias_in_attn_linear: bool = fact("Whether the linear layers of attention have biases.", absent=True)
    use_bias_in_mlp: bool = fact("Whether the linear layers of the MLP have biases.", absent=True)
    is_pipe_parallel: bool = fact("Whether DeepSpeed's pipeline engine trains the model.")
    partition_activations: bool = fact("Whether inputs of recomputed layers are kept as shards.", absent=False)
    fp16_lm_cross_entropy: bool = fact("Whether the loss is computed in 16 bits.")
    train_impl: str = fact('Kind of the training ("normal", "dpo" ...).', absent="normal")
    train_iters: int = fact("Steps of the training.", absent=0)
    train_epochs: int = fact("Epochs of the training.")
    eval_interval: int = fact("Steps between evaluations; 0: none.", absent=0)
    eval_iters: int = fact("Steps of an evaluation.", absent=0)
    do_valid: bool | int = fact("Whether there is data to validate.", absent=True)
    do_test: bool | int = fact("Whether there is data to test.", absent=True)
    save: str | bool = fact("Directory of checkpoints.", absent=False)
    checkpoint_factor: float = fact("Steps between checkpoints, or their growth; 0: none.", absent=0)
    checkpoint_scale: str = fact('How steps between checkpoints grow ("linear", "log").', absent="linear")
    exit_interval: int = fact("Steps after which the training ends.")
    program: str | None = fact('"NeoXArgs": GPT-NeoX\'s own program trains the model.', absent=None)


class TiedRow(Facts):
    """A weight that other stages of a pipeline have too."""

    parameter: str = fact("Name of the parameter in this stage.")
    ranks: int = fact("Stages that have it.")
    first_dtype: str = fact("Element type before the engine casts the model.")


class StageRow(Facts):
    """This rank's stage of DeepSpeed's pipeline, and the pipeline's settings."""

    stage: int = fact("Number of the stage, from 0.")
    bounds: list[int] = fact("Layer at which each stage begins, and the number of layers.")
    layers: list[str] = fact("Names of the stage's layers, by which DeepSpeed partitions the model.")
    pipe_partitioned: bool = fact("Whether tensor-parallel ranks send a part of the activations each.")
    grad_partitioned: bool = fact("The same for their gradients.")
    activation_checkpoint_interval: int = fact("Layers that are recomputed together; 0: none are.")
    use_reentrant: bool = fact("Whether recomputation uses reentrant autograd.")
    attention_mask: bool = fact("Whether the last tensor between stages is an attention mask.")
    bool_tensors: bool = fact("Whether bool tensors are sent between stages.")
    dynamic_shape: bool = fact("Whether shapes between stages may change.")
    tied: list[TiedRow] = fact("Weights that other stages have too.")


class UnitRow(Facts):
    """Parameters that `fully_shard` communicates together."""

    name: str = fact('Dotted name of its module; "": the root.')
    parameters: list[int] = fact("Its parameters, to which the next three lists belong.")
    shapes: list[list[int]] = fact("Shapes before sharding; of tensor-parallel parameters, of this rank's shard.")
    dims: list[int] = fact("Dimensions that are sharded.")
    dtypes: list[str] = fact("Element types of all_gathers.")
    reduce_dtype: str | None = fact("Element type of reductions; null: that of the gradients.")
    shards: int = fact("Ranks that a parameter is sharded over.")
    copies: int = fact("Replicas of each shard (HSDP); 1 without.")
    reshard_after_forward: int | bool = fact("Whether forward reshards parameters; a number: over so many ranks.")
    unshard_in_backward: bool = fact("Whether backward gathers parameters.")


class ScheduledStageRow(Facts):
    """A row of the table `stages`: a stage that a schedule of torch.distributed.pipelining runs on this rank.

    Tensors are those of one micro-batch; between stages of one rank, they are passed without a message.
    """

    stage: int = fact("Number of the stage, from 0.")
    micro_batches: int = fact("Micro-batches of a step.")
    received: list[int] = fact("Bytes of each tensor from the stage before.")
    sent: list[int] = fact("Bytes of each tensor to the stage after.")
    gradients_received: list[int] = fact("Bytes of each gradient from the stage after.")
    gradients_sent: list[int] = fact("Bytes of each gradient to the stage before.")


class ExpertLayerRow(Facts):
    """A row of the table `experts`: a layer with experts, and what its passes in a training step do.

    A pass sends the rank's tokens to the ranks of their experts (dispatch), and the results back (combine).
    """

    module: str = fact('Dotted name of the module that sends the tokens; "": not known.')
    token_bytes: int = fact("Bytes of a token, and of a result.")
    weight_bytes: int = fact("Bytes of a token's weight, if a call of its own sends them; 0: none does.")
    counts_op: str = fact("Operation with which ranks agree on numbers of tokens.", absent="")
    counts_bytes: int = fact("Payload of that call; 0: there is none.")
    passes: int = fact("Forward passes of the step.")
    repeated: list[int] = fact(
        "Repeated calls, to recompute activations: of numbers of tokens, dispatch, combine, weights."
    )
    gradients: list[int] = fact("Passes whose backward sends gradients: of dispatch, combine, weights.")


class RoutingRow(Facts):
    """A row of the table `routing`: a step whose tokens for experts differ from those of the step before."""

    step: int = fact("The step; -1: before the first.")
    layers: list[list[int]] | None = fact(
        "For each layer: id of its row of `experts`, tokens that this rank sends to experts in all passes of the step, "
        "and tokens that its own experts compute; null: not known from this step on. A token counts once for each of "
        "its experts, and padding to the capacity of experts counts, too."
    )


class StyleRow(Facts):
    """A module that `parallelize_module` made tensor-parallel. Layouts are "Replicate" or "Shard(1)"."""

    module: str = fact("Dotted name.")
    style: str = fact('Class of the style ("ColwiseParallel").')
    inputs: list[str] = fact("Layouts in which inputs arrive.")
    desired: list[str] = fact("Layouts that inputs are brought to.")
    outputs: list[str] = fact("Layouts in which outputs leave.")
    local: bool = fact("Whether outputs are local tensors, not DTensors.")
    embedding: bool = fact("Whether the module is an embedding.")
    weight: list[int] | None = fact("Shape of its weight before sharding; null: it has none.")
    bias: list[int] | None = fact("Shape of its bias before sharding; null: it has none.")
    sent: bool = fact("Whether the first rank sends its parameters.")


class PassRow(Facts):
    """Equal passes of a model one after the other. Settings are null where units differ, or torch lacks them."""

    kind: str = fact(
        'DeepSpeed: "evaluation" after a step, "interruption" within it. ZeRO-3, no passes: "gathered": something else '
        'left `parameters` gathered, as a checkpoint that was loaded; of the first pass: "external" and "returned": '
        '`modules` use `parameters` of others, which "returned" them; "idle": `modules` did not run. '
        'FSDP2: "training"; "evaluation", without gradients; "part", of a part of the model; "backward", one of '
        'several forward passes; "resharded" and "unsharded": no pass, but the program resharded (for a state '
        "dict) or gathered the units `modules`; resharded without them: all."
    )
    times: int = fact("Number of passes.")
    parameters: list[int] | None = fact("ZeRO-3: parameters; null: those that are kept.")
    modules: list[int] = fact("ZeRO-3: modules of the job. FSDP2: units.")
    reduce_grads: bool | None = fact("FSDP2: whether backward reduces gradients.")
    all_reduce_grads: bool | None = fact("FSDP2: whether it reduces them among replicas.")
    reshard_after_backward: bool | None = fact("FSDP2: whether it reshards parameters.")
    is_last_backward: bool = fact("FSDP2: whether an optimizer step follows, as the program says.")


class PassesRow(Facts):
    """A row of the table `passes`: a step whose passes differ from those of the step before."""

    job: int = fact("Id of the job's row.")
    step: int = fact("The step; -1: before the first.")
    passes: list[PassRow] | None = fact("Its passes in order; null: not known from this step on.")


class JobRow(Facts):
    """A model that is trained, as one rank has it."""

    source: str | None = fact('What was captured: "deepspeed", "ddp", "fsdp", "dtensor", "megatron".', absent=None)
    engine: str | None = fact("Class or function that trains the model.", absent=None)
    versions: dict[str, str] = fact("Added on reading: versions of libraries.", absent={})

    # Ranks by parallel dimension.
    world_size: int = fact("Ranks of the job.")
    data_parallel_size: int = fact("Data-parallel ranks; for DDP and DeepSpeed with those that share a ring.")
    sequence_data_parallel_size: int | None = fact(
        "Ranks that reduce gradients together: data- and sequence-parallel ones.", absent=None
    )
    sequence_parallel_size: int = fact("Ranks that share sequences by Ulysses.")
    context_parallel_size: int = fact("Megatron: ranks that share sequences.")
    tensor_parallel_size: int = fact("Tensor-parallel ranks.")
    tensor_parallel_rank: int = fact("Rank within the tensor-parallel group.", absent=0)
    expert_parallel_size: int = fact("Megatron: ranks that have different experts.")
    expert_parallel_sizes: list[int] = fact("DeepSpeed: sizes of the groups that have different experts.", absent=[])
    pipeline_stages: int = fact("Stages of the pipeline; 1 without.")
    model_chunks: int = fact("Megatron: parts of the model on this rank (interleaved schedule).")

    # Batches.
    micro_batch_size: int = fact("Sequences of a rank's micro-batch.")
    gradient_accumulation_steps: int = fact("Micro-batches of a step.")
    train_batch_size: int = fact("Sequences of a step on all ranks.")

    # DeepSpeed.
    zero_stage: int = fact("ZeRO stage, 0 to 3.")
    zero: ZeroSettings = fact("Settings of ZeRO.")
    partitioned_by_engine: list[int] = fact("ZeRO-3: parameters that the engine partitioned.", absent=[])
    pipeline: StageRow = fact("This rank's stage of a pipeline.")
    precision: str = fact('"fp32", "bf16" or "fp16".')
    grad_accum_dtype: str = fact("Element type in which gradients are accumulated.")
    communication_data_type: str = fact("Element type in which gradients are reduced.")
    gradient_clipping: float = fact("Norm that gradients are clipped to; 0: they are not.")
    prescale_gradients: bool = fact("Whether gradients are divided before they are reduced.")
    gradient_predivide_factor: float = fact("Number that they are divided by then.")
    sparse_gradients: bool = fact("Whether gradients of embeddings are sent as sparse tensors.", absent=False)
    optimizer: str = fact("Class of the optimizer, for DeepSpeed of its wrapper.")
    basic_optimizer: str = fact("Class of the optimizer that DeepSpeed wraps.")
    optimizer_groups: list[list[int]] = fact("Parameters of each group of the optimizer; ZeRO-3: of each sub-group.")
    check_grad_overflow: bool = fact("ZeRO-1, ZeRO-2: whether overflow is checked.")
    norm_dtype: str = fact("Element type of norms.")
    moe: bool = fact("Whether the model has experts.")
    modules: list[ModuleRow] = fact("ZeRO-3: modules that run, parents first.")
    embeddings: list[int] = fact("ZeRO-3: embeddings among `modules`.", absent=[])

    # DistributedDataParallel.
    broadcast_buffers: bool = fact("Whether buffers are broadcast in each step.")
    broadcast_bucket_size: int = fact("Bytes of a bucket of broadcasts.")
    bucket_bytes_cap: int = fact("Bytes of a bucket of gradients.")
    first_bucket_bytes_cap: int = fact("Bytes of the first bucket.")
    bucket_bytes_caps: list[int] = fact("Bytes of each bucket, if the program sets them.")
    first_buckets_bytes: list[int] = fact("Bytes of the buckets before they are rebuilt.")
    find_unused_parameters: bool = fact("Whether parameters may be unused.")
    gradient_as_bucket_view: bool = fact("Whether gradients are views of buckets.")
    skip_all_reduce_unused_params: bool = fact("Whether unused parameters are left out.")
    static_graph: bool = fact("Whether the graph never changes.")
    ignored: list[str] = fact("Names of parameters and buffers that are left out.")
    mixed_precision: str | None = fact("Its own mixed precision; null: none.")

    # fully_shard, in the first micro-batch of a step; parallelize_module.
    reduce_grads: bool = fact("Whether backward reduces gradients.")
    all_reduce_grads: bool = fact("Whether it reduces them among replicas.")
    reshard_after_backward: bool = fact("Whether it reshards parameters.")
    units: list[UnitRow] = fact("Units, the root first.")
    tensor_plan: list[StyleRow] = fact("Tensor-parallel modules, in the model's order.")
    foreach: bool | None = fact("The optimizer's `foreach`.")

    # The model.
    parameters: list[TensorRow] = fact("Parameters in the order of registration, shared ones once.")
    buffers: list[TensorRow] = fact("Buffers in the order of registration.")
    model: ModelSettings = fact("Architecture, if the model declares it.")
    passes: list[PassesRow] = fact("Rows of `passes`, added on reading.", absent=[])

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.elements for parameter in self.parameters)
