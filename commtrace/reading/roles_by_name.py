"""Roles of groups by their descriptions, and of calls in a group that several parallel dimensions share.

Megatron-Core describes its groups ("TENSOR_MODEL_PARALLEL_GROUP"), and DeviceMesh names them by dimension ("mesh_tp").
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from commtrace.schema import Purpose

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

_DATA: Final = ("data",)
_ACTIVATIONS: Final = ("tensor", "sequence", "context")
_EXPERT: Final = ("expert",)
_PIPELINE: Final = ("pipeline",)
_OF_PURPOSE: Final = {
    **dict.fromkeys(
        (
            *(Purpose.PARAMETERS_FORWARD, Purpose.PARAMETERS_BACKWARD, Purpose.PARAMETERS_RECOMPUTATION),
            *(Purpose.PARAMETERS_STAGE, Purpose.PARAMETERS_ON_REQUEST, Purpose.PARAMETERS_AFTER_OPTIMIZER),
            *(Purpose.GRADIENTS, Purpose.BUCKETS, Purpose.USED_PARAMETERS, Purpose.BUFFERS, Purpose.METRICS),
        ),
        _DATA,
    ),
    **dict.fromkeys((Purpose.ATTENTION, Purpose.ATTENTION_GRADIENTS), ("context",)),
    **dict.fromkeys(
        (Purpose.ACTIVATIONS, Purpose.ACTIVATIONS_RECOMPUTED, Purpose.ACTIVATION_GRADIENTS, Purpose.LOSS), _ACTIVATIONS
    ),
    **dict.fromkeys(
        (
            *(Purpose.EXPERT_TOKENS, Purpose.EXPERT_DISPATCH, Purpose.EXPERT_COMBINE),
            *(Purpose.EXPERT_GRADIENTS, Purpose.EXPERT_COUNTS),
        ),
        _EXPERT,
    ),
    **dict.fromkeys((Purpose.PIPELINE_ACTIVATIONS, Purpose.PIPELINE_GRADIENTS, Purpose.PIPELINE_SET_UP), _PIPELINE),
}
_OF_PURPOSE_NAME: Final = {purpose.value: roles for purpose, roles in _OF_PURPOSE.items()}


def role_from_purpose(purpose: str, roles: Collection[str]) -> str | None:
    """Return which role of a group the calls with a purpose serve; None where the purpose does not decide."""
    return next((role for role in _OF_PURPOSE_NAME.get(purpose, ()) if role in roles), None)


def role_of_dimension(name: str) -> str | None:
    """Return the role of a mesh dimension with this name; None if it is not known."""
    return _MESH.get(name)


def role_from_description(description: str) -> str | None:
    """Return the role of a group with this description; None where it does not name one."""
    if description.startswith("mesh_"):
        return _MESH.get(description.removeprefix("mesh_"))
    return _MEGATRON.get(description)
