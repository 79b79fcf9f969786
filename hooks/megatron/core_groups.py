"""The hook of Megatron-LM: roles of the groups of `megatron.core.parallel_state`.

Groups of several dimensions that are not listed here have no role.
"""

from __future__ import annotations

from commtrace.hooks.torch.group_registry import Registry

_registry = Registry(
    "megatron.core.parallel_state",
    "initialize_model_parallel",
    {
        "_MODEL_PARALLEL_GROUP": "model",  # the ranks of one replica
        "_TENSOR_MODEL_PARALLEL_GROUP": "tensor",
        "_PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
        # Gradients of embeddings that the first and the last stage share.
        "_EMBEDDING_GROUP": "pipeline",
        "_POSITION_EMBEDDING_GROUP": "pipeline",
        "_DATA_PARALLEL_GROUP": "data",
        "_DATA_PARALLEL_GROUP_GLOO": "data",
        "_DATA_PARALLEL_GROUP_WITH_CP": "data",
        "_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "data",
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "data",
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "data",
        "_INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "data",
        "_CONTEXT_PARALLEL_GROUP": "context",
        "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS": "context",
        "_EXPERT_MODEL_PARALLEL_GROUP": "expert",
        "_EXPERT_TENSOR_PARALLEL_GROUP": "tensor",
        "_EXPERT_DATA_PARALLEL_GROUP": "data",
        "_EXPERT_DATA_PARALLEL_GROUP_GLOO": "data",
        # Names before Megatron-LM 0.9.
        "_DATA_MODULO_EXPERT_PARALLEL_GROUP": "data",
        "_DATA_MODULO_EXPERT_PARALLEL_GROUP_GLOO": "data",
    },
)
install, uninstall = _registry.install, _registry.uninstall
