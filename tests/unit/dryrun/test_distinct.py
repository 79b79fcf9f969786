"""Which ranks differ: told by the groups that a program makes, and by running few."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import pytest

from commtrace.dryrun.distinct_ranks import RankMismatchError, coordinates, families, find_distinct


def grid(tensor: int, data: int, pipeline: int) -> list[list[int]]:
    """Megatron's groups, tensor innermost: all of one kind after the other."""
    world = range(tensor * data * pipeline)
    kinds: tuple[Callable[[int], Hashable], ...] = (
        lambda rank: rank // tensor,
        lambda rank: (rank % tensor, rank // (tensor * data)),
        lambda rank: rank % (tensor * data),
    )
    groups: list[list[int]] = []
    for kind in kinds:
        found: dict[Hashable, list[int]] = {}
        for rank in world:
            found.setdefault(kind(rank), []).append(rank)
        groups += found.values()
    return groups


class Job:
    """Ranks that communicate as `like` says, and those of them that were run."""

    def __init__(self, like: Callable[[int], Hashable]) -> None:
        self.like = like
        self.run: set[int] = set()

    def __call__(self, ranks: Sequence[int]) -> Mapping[int, Hashable]:
        self.run.update(ranks)
        return {rank: self.like(rank) for rank in self.run}


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
    """Every stage of four differs, tensor rank 0 does of two, data ranks do not of sixteen: eight kinds."""

    def like(rank: int) -> Hashable:
        return rank // 32, rank % 2 == 0

    found = find_distinct(128, grid(2, 16, 4), job := Job(like))
    assert len(found) == 8
    assert sorted(rank for ranks in found.values() for rank in ranks) == [*range(128)]
    for first, ranks in found.items():
        assert {like(rank) for rank in ranks} == {like(first)}
    assert len(job.run) < 40


def test_ranks_that_no_group_tells_apart_and_that_differ_are_an_error() -> None:
    with pytest.raises(RankMismatchError, match="name the ranks to run"):
        find_distinct(1024, [], Job(lambda rank: rank % 3 if 2 < rank < 500 else 0))
