"""Table of the hooks. To register a hook, add a line; `commtrace.startup` installs it after its library is imported."""

PACKAGE = "commtrace.hooks"

# Library -> module of its hook, which has `install()` and `uninstall()`.
HOOKS = {
    "torch": "commtrace.hooks.torch.hook",
    "mpi4py.MPI": "commtrace.hooks.mpi.hook",
    "deepspeed": "commtrace.hooks.deepspeed.hook",
    **dict.fromkeys(
        (
            *(f"deepspeed.sequence.{module}" for module in ("layer", "cross_entropy", "linear_cross_entropy")),
            "deepspeed.sequence.vocab_parallel_ops",
            "deepspeed.runtime.sequence_parallel.ulysses_sp",
        ),
        "commtrace.hooks.deepspeed.sequence_purposes",
    ),
    "torch.distributed._local_tensor": "commtrace.hooks.torch.blind_spot_warnings",
    "torch.distributed.tensor.parallel.api": "commtrace.hooks.torch.dtensor",
    "torch.distributed.tensor._api": "commtrace.hooks.torch.redistribution",
    "torch.utils.checkpoint": "commtrace.hooks.torch.recomputation",
    "torch.distributed.pipelining.schedules": "commtrace.hooks.torch.pipelining",
    "torch.distributed.distributed_c10d": "commtrace.hooks.torch.entry_points",
    "torch.nn.utils.clip_grad": "commtrace.hooks.torch.entry_points",
    "torch.distributed.checkpoint.state_dict": "commtrace.hooks.torch.entry_points",
    "torch.distributed.checkpoint.state_dict_saver": "commtrace.hooks.torch.entry_points",
    "torch.distributed.checkpoint.state_dict_loader": "commtrace.hooks.torch.entry_points",
    "torch.distributed.tensor.parallel.loss": "commtrace.hooks.torch.entry_points",
    "torch.distributed.tensor.experimental._context_parallel._attention": "commtrace.hooks.torch.entry_points",
    "torch.distributed.tensor.experimental._attention": "commtrace.hooks.torch.entry_points",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "commtrace.hooks.torch.fsdp1",
    "torch.nn.modules._functions": "commtrace.hooks.torch.batch_norm",
    "torch.utils.data.dataloader": "commtrace.hooks.torch.entry_points",
    "torchtitan.distributed.utils": "commtrace.hooks.torch.entry_points",
    "torchtitan.models.common.token_dispatcher": "commtrace.hooks.torch.expert_dispatch",
    "torchtitan.distributed.expert_parallel": "commtrace.hooks.torch.expert_dispatch",
    "megatron.core.transformer.moe.token_dispatcher": "commtrace.hooks.torch.expert_dispatch",
    "torch.distributed.fsdp._fully_shard._fsdp_state": "commtrace.hooks.torch.fsdp2",
    "accelerate.accelerator": "commtrace.hooks.frameworks.accelerate",
    "accelerate.data_loader": "commtrace.hooks.frameworks.accelerate",
    "transformers.trainer": "commtrace.hooks.frameworks.transformers",
    "transformers.modeling_utils": "commtrace.hooks.frameworks.transformers",
    "transformers.generation.utils": "commtrace.hooks.frameworks.transformers",
    "lightning.pytorch.trainer.trainer": "commtrace.hooks.frameworks.lightning",
    "pytorch_lightning.trainer.trainer": "commtrace.hooks.frameworks.lightning",
    "lightning.fabric.fabric": "commtrace.hooks.frameworks.lightning",
    "lightning_fabric.fabric": "commtrace.hooks.frameworks.lightning",
    "torchmetrics.metric": "commtrace.hooks.frameworks.lightning",
    **dict.fromkeys(
        (
            "picotron.process_group_manager",
            "picotron.data_parallel.bucket",
            "picotron.data_parallel.data_parallel",
            "picotron.pipeline_parallel.pp_communications",
            "picotron.tensor_parallel.tp_communications",
            "picotron.context_parallel.context_parallel",
            "picotron.utils",
        ),
        "commtrace.hooks.frameworks.picotron",
    ),
    "megatron.core.parallel_state": "commtrace.hooks.megatron.core_groups",
    "megatron.core.optimizer.optimizer": "commtrace.hooks.megatron.core_optimizer",
    "megatron.core.pipeline_parallel.schedules": "commtrace.hooks.megatron.core_schedules",
    **dict.fromkeys(
        (
            *(f"megatron.core.tensor_parallel.{module}" for module in ("mappings", "layers", "cross_entropy")),
            "megatron.core.distributed.param_and_grad_buffer",
            "megatron.core.distributed.distributed_data_parallel",
            "megatron.core.distributed.finalize_model_grads",
            "megatron.core.transformer.moe.moe_layer",  # has imported the dispatchers
        ),
        "commtrace.hooks.megatron.core_purposes",
    ),
    "megatron.mpu.initialize": "commtrace.hooks.megatron.gpt_neox_groups",
    "megatron.training": "commtrace.hooks.megatron.gpt_neox_training",
}

# Library -> oldest supported version (docs/versions.md).
OLDEST = {"torch": (2, 6), "mpi4py.MPI": (3, 1), "deepspeed": (0, 15)}

# Library -> module that makes the process a simulated rank (`commtrace dryrun`), installed after the library's hook.
SIMULATIONS = {
    "torch": "commtrace.dryrun.simulation",
    "torch.distributed.checkpoint.default_planner": "commtrace.dryrun.checkpoint_patches",
    "deepspeed": "commtrace.dryrun.deepspeed_patches",
}
