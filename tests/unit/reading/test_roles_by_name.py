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
    folder: Path,
    groups: Mapping[int, Sequence[int]],
    dimensions: list[tuple[int, str]],
    known: Mapping[int, str],
) -> list[list[str]]:
    """Return the roles of calls with PURPOSES, and of one without, in each group of a job of four ranks."""
    files = factory.LogFactory(folder).process(0, world_size=4)
    files.known({**groups}, {**known})
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
    assert roles_of_calls(tmp_path, groups, shared, {2: "tensor"}) == [
        ["data", "expert", "world", "world"],
        ["data", "expert", "unknown", "unknown"],
    ]


def test_one_dimension_names_a_group_and_those_with_its_ranks(tmp_path: Path) -> None:
    groups = {1: [0, 1, 2, 3], 2: [0, 1], 3: [0, 1], 4: [0, 2], 5: [0, 2], 6: [0, 3]}
    roles = roles_of_calls(tmp_path, groups, [(1, "data"), (4, "context")], {2: "tensor"})
    assert [{*of_group} for of_group in roles] == [
        {"data"}, {"tensor"}, {"tensor"}, {"context"}, {"context"}, {"unknown"},
    ]  # fmt: skip


def test_a_group_of_all_ranks_has_the_only_dimension_of_a_job(tmp_path: Path) -> None:
    all_ranks = [0, 1, 2, 3]
    one = roles_of_calls(tmp_path / "one", {1: all_ranks, 5: all_ranks, 6: [0]}, [(5, "data")], known={})
    assert [{*of_group} for of_group in one] == [{"data"}, {"data"}, {"self"}]
    # Stages, and a group of the ranks that load data, which are all of them.
    two = roles_of_calls(tmp_path / "two", {1: all_ranks, 5: all_ranks, 6: [0, 2]}, [(5, "data"), (6, "pipeline")], {})
    assert [{*of_group} for of_group in two] == [{"world"}, {"data"}, {"pipeline"}]
    none = roles_of_calls(tmp_path / "none", {1: all_ranks, 5: all_ranks}, [], known={})
    assert [{*of_group} for of_group in none] == [{"world"}, {"world"}]


def test_the_purpose_decides_between_dimensions_with_equal_ranks(tmp_path: Path) -> None:
    groups = {1: [0, 1, 2, 3], 5: [0, 1, 2, 3], 6: [0, 1, 2, 3]}
    roles = roles_of_calls(tmp_path, groups, [(5, "data"), (6, "expert")], known={})
    assert roles[0] == ["data", "expert", "world", "world"]
    assert [{*of_group} for of_group in roles[1:]] == [{"data"}, {"expert"}]
