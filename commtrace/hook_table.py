"""Table of the hooks. To register a hook, add a line; `commtrace.startup` installs it after its library is imported."""

PACKAGE = "commtrace.hooks"

# Library -> module of its hook, which has `install()` and `uninstall()`.
HOOKS = {
    "torch": "commtrace.hooks.torch.hook",
    "mpi4py.MPI": "commtrace.hooks.mpi.hook",
    "deepspeed": "commtrace.hooks.deepspeed.hook",
    "torch.distributed._local_tensor": "commtrace.hooks.torch.unobserved",
    "torch.distributed.tensor.parallel.api": "commtrace.hooks.torch.dtensor",
    "torch.distributed.tensor._api": "commtrace.hooks.torch.redistribution",
    "torch.utils.checkpoint": "commtrace.hooks.torch.recomputation",
    "torch.distributed.pipelining.schedules": "commtrace.hooks.torch.pipelining",
    "torch.nn.utils.clip_grad": "commtrace.hooks.torch.entry_points",
    "torch.distributed.checkpoint.state_dict": "commtrace.hooks.torch.entry_points",
    "torch.distributed.checkpoint.state_dict_saver": "commtrace.hooks.torch.entry_points",
    "torch.distributed.checkpoint.state_dict_loader": "commtrace.hooks.torch.entry_points",
    "torch.distributed.tensor.parallel.loss": "commtrace.hooks.torch.entry_points",
    "torch.distributed.fsdp._fully_shard._fsdp_state": "commtrace.hooks.torch.fsdp",
    "megatron.core.parallel_state": "commtrace.hooks.megatron.megatron_core",
    "megatron.core.optimizer.optimizer": "commtrace.hooks.megatron.core_optimizer",
    "megatron.core.pipeline_parallel.schedules": "commtrace.hooks.megatron.core_schedules",
    "megatron.mpu.initialize": "commtrace.hooks.megatron.gpt_neox",
    "megatron.training": "commtrace.hooks.megatron.gpt_neox_training",
}

# Library -> oldest supported version (docs/versions.md).
OLDEST = {"torch": (2, 6), "mpi4py.MPI": (4, 1), "deepspeed": (0, 15)}

# Library -> module that makes the process a simulated rank (`commtrace dryrun`), installed after the library's hook.
SIMULATIONS = {
    "torch": "commtrace.dryrun.simulation",
    "torch.distributed.checkpoint.default_planner": "commtrace.dryrun.checkpoint_patches",
    "deepspeed": "commtrace.dryrun.deepspeed_patches",
}
