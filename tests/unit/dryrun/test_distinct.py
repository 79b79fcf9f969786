"""Ranks that differ, found from the groups that a program makes and by running a few ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import pytest

from commtrace.dryrun.distinct_ranks import RankMismatchError, coordinates, families, find_distinct


def grid(tensor: int, data: int, pipeline: int) -> list[list[int]]:
    """Return Megatron's groups, one kind after the other; tensor-parallel ranks are neighbours."""
    world = range(tensor * data * pipeline)
    kinds: tuple[Callable[[int], Hashable], ...] = (
        lambda rank: rank // tensor,
        lambda rank: (rank % tensor, rank // (tensor * data)),
        lambda rank: rank % (tensor * data),
    )
    groups: list[list[int]] = []
    for kind in kinds:
        groups_by_key: dict[Hashable, list[int]] = {}
        for rank in world:
            groups_by_key.setdefault(kind(rank), []).append(rank)
        groups += groups_by_key.values()
    return groups


class Job:
    """A job in which ranks with equal `kind_of(rank)` communicate equally; `run` has the ranks that were run."""

    def __init__(self, kind_of: Callable[[int], Hashable]) -> None:
        self.kind_of = kind_of
        self.run: set[int] = set()

    def __call__(self, ranks: Sequence[int]) -> Mapping[int, Hashable]:
        self.run.update(ranks)
        return {rank: self.kind_of(rank) for rank in self.run}


def test_families_have_every_rank_once() -> None:
    groups = [[0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 2, 3], [0, 3], [0, 1]]
    assert families(4, groups) == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]


def test_coordinates_are_places_in_groups() -> None:
    places = coordinates(24, families(24, grid(2, 3, 4)))
    assert len({*places.values()}) == 24
    assert places[0] == (0, 0, 0)
    assert places[1] == (1, 0, 0)
    assert {place[0] for rank, place in places.items() if rank % 2} == {1}


def test_what_groups_do_not_tell_is_a_coordinate_of_its_own() -> None:
    assert coordinates(4, []) == {0: (0,), 1: (1,), 2: (2,), 3: (3,)}
    assert coordinates(4, [[[0, 1], [2, 3]]]) == {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1)}


@pytest.mark.parametrize("world", [1, 2, 3, 7, 1000])
def test_data_parallel_ranks_are_alike(world: int) -> None:
    job = Job(lambda rank: "same")
    assert find_distinct(world, [], job) == {0: [*range(world)]}
    assert len(job.run) <= 12


def test_the_last_rank_may_differ() -> None:
    job = Job(lambda rank: rank == 1023)
    assert find_distinct(1024, [], job) == {0: [*range(1023)], 1023: [1023]}
    assert len(job.run) < 32


def test_where_ranks_change_is_found() -> None:
    job = Job(lambda rank: rank >= 700)
    assert find_distinct(1024, [], job) == {0: [*range(700)], 700: [*range(700, 1024)]}
    assert len(job.run) < 32


def test_stages_and_the_first_tensor_rank_differ() -> None:
    """Four different stages, two different tensor ranks and 16 equal data ranks make eight kinds."""

    def kind_of(rank: int) -> Hashable:
        return rank // 32, rank % 2 == 0

    distinct = find_distinct(128, grid(2, 16, 4), job := Job(kind_of))
    assert len(distinct) == 8
    assert sorted(rank for ranks in distinct.values() for rank in ranks) == [*range(128)]
    for first, ranks in distinct.items():
        assert {kind_of(rank) for rank in ranks} == {kind_of(first)}
    assert len(job.run) < 40


def test_ranks_that_no_group_tells_apart_and_that_differ_are_an_error() -> None:
    with pytest.raises(RankMismatchError, match="name the ranks to run"):
        find_distinct(1024, [], Job(lambda rank: rank % 3 if 2 < rank < 500 else 0))
