"""The hook of GPT-NeoX: roles of the groups of `megatron.mpu`. Its model-parallel groups are tensor-parallel only."""

from __future__ import annotations

from commtrace.hooks.torch.group_registry import Registry

_registry = Registry(
    "megatron.mpu.initialize",
    "initialize_model_parallel",
    {
        "_MODEL_PARALLEL_GROUP": "tensor",
        "_PIPE_PARALLEL_GROUP": "pipeline",
        "_CONTEXT_PARALLEL_GROUP": "context",
        "_DATA_PARALLEL_GROUP": "data",
        "_IO_PARALLEL_GROUP": "data",  # data-parallel ranks of the first and the last stage
    },
)
install, uninstall = _registry.install, _registry.uninstall
