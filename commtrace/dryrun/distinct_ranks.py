"""Search for the ranks of a job that communicate differently, with as few runs as possible.

1. The groups that the program makes divide the ranks: a family of groups that together contain every rank once (all
   tensor-parallel groups, for example) gives each rank a coordinate, its rank in its group. Ranks that have equal
   coordinates (plain data parallelism) are numbered by one more coordinate.
2. For each coordinate, ranks that differ from rank 0 only in it are run: all of them if it has at most MAX_RUN_VALUES
   values; otherwise those with the first three values, the middle one and the last two, and then those between two
   neighbours that differ. Values with equal logs form a class.
3. One rank of each combination of classes is run; combinations with equal logs are merged.
4. CHECKS other ranks, drawn at random, are run as a check. It is an error if one differs from the rank that represents
   it.

The search can miss a single rank in the middle of a long coordinate that differs from those around it.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from commtrace.errors import CommtraceError

MAX_RUN_VALUES: Final = 8
CHECKS: Final = 3

RunRanks = Callable[[Sequence[int]], Mapping[int, Hashable]]
"""A function that runs ranks and returns the signatures of all ranks that it has run so far."""

Coordinates = tuple[int, ...]


class RankMismatchError(CommtraceError):
    """A rank differs from the rank that represents it."""


def find_distinct(world_size: int, groups: Iterable[Sequence[int]], run: RunRanks) -> dict[int, list[int]]:
    """Return a dict from each distinct rank to the ranks that it represents, including itself.

    `groups` are the ranks of the groups that the program makes, in order.

    Raises:
        RankMismatchError: A check failed.
    """
    places = coordinates(world_size, families(world_size, groups))
    rank_at = {place: rank for rank, place in places.items()}
    classes = [_classes(axis, places, rank_at, run) for axis in range(len(places[0]))]
    combinations = {
        rank: rank_at[tuple(class_of[value] for value, class_of in zip(place, classes, strict=True))]
        for rank, place in places.items()
    }
    candidates = sorted({*combinations.values()})
    signatures = run(candidates)
    first: dict[Hashable, int] = {}
    for rank in candidates:
        first.setdefault(signatures[rank], rank)
    stands_for: dict[int, list[int]] = defaultdict(list)
    for rank, combination in combinations.items():
        stands_for[first[signatures[combination]]].append(rank)
    _check(stands_for, run)
    return dict(stands_for)


def _check(stands_for: Mapping[int, Sequence[int]], run: RunRanks) -> None:
    by_rank = {rank: first for first, ranks in stands_for.items() for rank in ranks}
    others = sorted(set(by_rank) - set(stands_for))
    drawn = sorted(random.Random(len(by_rank)).sample(others, min(CHECKS, len(others))))
    signatures = run(sorted({*drawn, *(by_rank[rank] for rank in drawn)}))
    for rank in drawn:
        if signatures[rank] != signatures[by_rank[rank]]:
            raise RankMismatchError(
                f"rank {rank} does not communicate like rank {by_rank[rank]}, although the groups of the program do "
                "not distinguish them; name the ranks to run (--ranks 0,1,60-63), or run all of them (--ranks all)"
            )


# ---- coordinates -----------------------------------------------------------------------------------------------------


def families(world_size: int, groups: Iterable[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Return families: consecutive groups of one size that together contain every rank once."""
    complete: list[list[Sequence[int]]] = []
    family: list[Sequence[int]] = []
    for group in groups:
        if not 1 < len(group) < world_size:
            continue
        if family and (len(group) != len(family[0]) or {*group} & {*itertools.chain(*family)}):
            family = []
        family.append(group)
        if len(family) * len(group) == world_size:
            complete.append(family)
            family = []
    return complete


def coordinates(world_size: int, families: Iterable[list[Sequence[int]]]) -> dict[int, Coordinates]:
    """Return the coordinates of each rank in the grid that the families span, smallest groups first.

    A family that adds no coordinate, or does not form a grid with the others, is left out. Ranks with equal coordinates
    get one more coordinate. If there is no grid, the rank is the only coordinate.
    """
    places: dict[int, Coordinates] = dict.fromkeys(range(world_size), ())
    cells = 1
    for family in sorted(families, key=lambda family: len(family[0])):
        index = {rank: position for group in family for position, rank in enumerate(group)}
        finer = {rank: (*place, index[rank]) for rank, place in places.items()}
        if len({*finer.values()}) == cells * len(family[0]):
            places, cells = finer, cells * len(family[0])
    if cells == world_size:
        return places
    counters: dict[Coordinates, Iterator[int]] = defaultdict(itertools.count)
    numbered = {rank: (*place, next(counters[place])) for rank, place in places.items()}
    if len({next(counter) for counter in counters.values()}) == 1:
        return numbered
    return {rank: (rank,) for rank in range(world_size)}


# ---- classes along one coordinate ------------------------------------------------------------------------------------


def _classes(
    axis: int, places: Mapping[int, Coordinates], rank_at: Mapping[Coordinates, int], run: RunRanks
) -> dict[int, int]:
    """Return a dict from each value of a coordinate to the smallest of its class, at rank 0's other coordinates."""
    size = 1 + max(place[axis] for place in places.values())
    rank_of = [rank_at[(*places[0][:axis], value, *places[0][axis + 1 :])] for value in range(size)]
    values_run = {*range(size)} if size <= MAX_RUN_VALUES else {0, 1, 2, size // 2, size - 2, size - 1}
    while True:
        signatures = run([rank_of[value] for value in sorted(values_run)])
        between = {
            (low + high) // 2
            for low, high in itertools.pairwise(sorted(values_run))
            if high > low + 1 and signatures[rank_of[low]] != signatures[rank_of[high]]
        }
        if not between:
            break
        values_run |= between
    class_of: dict[int, int] = {}
    first: dict[Hashable, int] = {}
    for value in range(size):
        if value in values_run:
            last_signature = signatures[rank_of[value]]
        class_of[value] = first.setdefault(last_signature, value)
    return class_of
