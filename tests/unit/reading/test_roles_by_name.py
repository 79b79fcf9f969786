"""Roles of groups by their descriptions, dimensions and ranks, and of calls in shared groups by their purposes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import factory
import pytest

import commtrace
from commtrace.reading.roles_by_name import role_from_description
from commtrace.schema import Purpose


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


PURPOSES = (Purpose.GRADIENTS, Purpose.EXPERT_DISPATCH, Purpose.GRADIENT_NORM)


def roles_of_calls(
    folder: Path, groups: Mapping[int, Sequence[int]], dimensions: list[tuple[int, str]]
) -> list[list[str]]:
    """Return the roles of calls with PURPOSES, and of one without, in each group of a job of four ranks."""
    files = factory.LogFactory(folder).process(0, world_size=4)
    files.known({**groups}, {2: "tensor"})
    for number, role in dimensions:
        files.add("dimensions", id=number, group=number, role=role, source="test")
    for site, purpose in enumerate(PURPOSES, 10):
        files.add("sites", id=site, file="/x.py", line=1, function="f", purpose={"name": purpose.value})
    sites = (*range(10, 10 + len(PURPOSES)), 1)
    calls = [(group, site) for group in groups for site in sites]
    files.write([factory.record(group=group, site=site, seq=seq) for seq, (group, site) in enumerate(calls)]).end()
    roles = commtrace.open(folder).events()["role"].tolist()
    return [roles[at : at + len(sites)] for at in range(0, len(roles), len(sites))]


def test_the_purpose_decides_in_a_group_that_several_dimensions_share(tmp_path: Path) -> None:
    groups = {1: [0, 1, 2, 3], 3: [0, 2]}
    shared = [(number, role) for number in groups for role in ("data", "expert")]
    assert roles_of_calls(tmp_path, groups, shared) == [
        ["data", "expert", "world", "world"],
        ["data", "expert", "unknown", "unknown"],
    ]


def test_one_dimension_names_a_group_and_those_with_its_ranks(tmp_path: Path) -> None:
    groups = {1: [0, 1, 2, 3], 2: [0, 1], 3: [0, 1], 4: [0, 2], 5: [0, 2], 6: [0, 3]}
    roles = roles_of_calls(tmp_path, groups, [(1, "data"), (4, "context")])
    assert [{*of_group} for of_group in roles] == [
        {"data"}, {"tensor"}, {"tensor"}, {"context"}, {"context"}, {"unknown"},
    ]  # fmt: skip
