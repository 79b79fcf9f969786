"""Roles of groups by their descriptions.

Megatron-Core describes its groups ("TENSOR_MODEL_PARALLEL_GROUP"), and DeviceMesh names them by dimension ("mesh_tp").
"""

from __future__ import annotations

from typing import Final

_MEGATRON: Final = {
    "DATA_PARALLEL_GROUP": "data",
    "DATA_PARALLEL_GROUP_WITH_CP": "data",
    "TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
    "CONTEXT_PARALLEL_GROUP": "context",
    "EXPERT_MODEL_PARALLEL_GROUP": "expert",
    "EXPERT_DATA_PARALLEL_GROUP": "data",
}

# Names of dimensions in torchtitan and in PyTorch's tutorials.
_MESH: Final = {
    "dp": "data",
    "ddp": "data",
    "fsdp": "data",
    "dp_replicate": "data",
    "dp_shard": "data",
    "replicate": "data",
    "shard": "data",
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "sp": "sequence",
    "ep": "expert",
    "data": "data",
    "data_parallel": "data",
    "tensor": "tensor",
    "tensor_parallel": "tensor",
    "pipeline": "pipeline",
    "sequence_parallel": "sequence",
    "context": "context",
    "expert": "expert",
}


def role_from_description(description: str) -> str | None:
    """Return the role of a group with this description; None where it does not name one."""
    if description.startswith("mesh_"):
        return _MESH.get(description.removeprefix("mesh_"))
    return _MEGATRON.get(description)
