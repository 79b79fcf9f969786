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

# Names of mesh dimensions in torchtitan and in PyTorch's tutorials.
_MESH: Final = {
    **dict.fromkeys(
        ("dp", "ddp", "fsdp", "dp_replicate", "dp_shard", "replicate", "shard", "data", "data_parallel"), "data"
    ),
    **dict.fromkeys(("batch", "loss_mesh", "efsdp"), "data"),  # torchtitan
    **dict.fromkeys(("tp", "tensor", "tensor_parallel", "etp"), "tensor"),
    **dict.fromkeys(("pp", "pipeline"), "pipeline"),
    **dict.fromkeys(("cp", "context"), "context"),
    **dict.fromkeys(("sp", "sequence_parallel"), "sequence"),
    **dict.fromkeys(("ep", "expert"), "expert"),
}


def role_from_description(description: str) -> str | None:
    """Return the role of a group with this description; None where it does not name one."""
    if description.startswith("mesh_"):
        return _MESH.get(description.removeprefix("mesh_"))
    return _MEGATRON.get(description)
