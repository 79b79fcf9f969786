"""Roles of groups by the descriptions that DeviceMesh and Megatron-Core give them."""

from __future__ import annotations

import pytest

from commtrace.reading.group_roles import role_from_description


@pytest.mark.parametrize(
    ("description", "role"),
    [
        ("mesh_fsdp", "data"),
        ("mesh_loss_mesh", "data"),
        ("mesh_efsdp", "data"),
        ("mesh_etp", "tensor"),
        ("mesh_tp", "tensor"),
        ("mesh_world", None),
        ("fsdp", None),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("default_pg", None),
    ],
)
def test_a_description_names_the_role(description: str, role: str | None) -> None:
    assert role_from_description(description) == role
