"""Which ranks of a job communicate alike, found by running as few as possible.

1. The groups that the program made divide the ranks: a family of groups that together have every rank once (all tensor
   groups, say) gives each rank a coordinate, its place in its group. What is left (plain data parallelism) is one more.
2. Along each coordinate ranks are run, from rank 0 on: every one up to TRIED, of more the first three, the middle, the
   last two, and those between two neighbours that differ. Equal logs make a class.
3. Of each combination of classes one rank is run; combinations with equal logs are one.
4. A few other ranks, drawn at random, are run to check. One that is not like the rank that stands for it is an error.

What cannot be seen so: a rank in the middle of a long coordinate that differs from equal ones around it.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from commtrace.errors import CommtraceError

TRIED: Final = 8
CHECKS: Final = 3

RunRanks = Callable[[Sequence[int]], Mapping[int, Hashable]]
"""Runs ranks; what tells them apart, of each."""

Place = tuple[int, ...]
"""The coordinates of a rank."""


class NotAlikeError(CommtraceError):
    """Ranks that should communicate alike do not."""


def find_distinct(world_size: int, groups: Iterable[Sequence[int]], run: RunRanks) -> dict[int, list[int]]:
    """Each rank that was run and is unlike the others -> the ranks that it stands for. Raises NotAlikeError."""
    places = coordinates(world_size, families(world_size, groups))
    rank_at = {place: rank for rank, place in places.items()}
    classes = [_classes(axis, places, rank_at, run) for axis in range(len(places[0]))]
    combinations = {rank: rank_at[_representative(place, classes)] for rank, place in places.items()}
    found = run(sorted({*combinations.values()}))
    first: dict[Hashable, int] = {}
    for rank in sorted({*combinations.values()}):
        first.setdefault(found[rank], rank)
    stands_for: dict[int, list[int]] = defaultdict(list)
    for rank, combination in combinations.items():
        stands_for[first[found[combination]]].append(rank)
    _check(stands_for, run)
    return dict(stands_for)


def _representative(place: Place, classes: Sequence[Mapping[int, int]]) -> Place:
    return tuple(like[value] for value, like in zip(place, classes, strict=True))


def _check(stands_for: Mapping[int, Sequence[int]], run: RunRanks) -> None:
    by_rank = {rank: first for first, ranks in stands_for.items() for rank in ranks}
    others = sorted(set(by_rank) - set(stands_for))
    drawn = sorted(random.Random(len(by_rank)).sample(others, min(CHECKS, len(others))))
    found = run(sorted({*drawn, *(by_rank[rank] for rank in drawn)}))
    for rank in drawn:
        if found[rank] != found[by_rank[rank]]:
            raise NotAlikeError(
                f"rank {rank} does not communicate like rank {by_rank[rank]}, though the groups that the program makes "
                "tell no difference; name the ranks to run (--ranks 0,1,60-63), or run all of them (--ranks all)"
            )


# ---- coordinates -----------------------------------------------------------------------------------------------------


def families(world_size: int, groups: Iterable[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Groups of one size, made one after the other, that together have every rank once."""
    found: list[list[Sequence[int]]] = []
    family: list[Sequence[int]] = []
    for group in groups:
        if not 1 < len(group) < world_size:
            continue
        if family and (len(group) != len(family[0]) or {*group} & {*itertools.chain(*family)}):
            family = []
        family.append(group)
        if len(family) * len(group) == world_size:
            found.append(family)
            family = []
    return found


def coordinates(world_size: int, found: Iterable[list[Sequence[int]]]) -> dict[int, Place]:
    """The place of each rank in a grid that such families span, smallest groups first.

    A family that adds nothing to the others, or does not fit into a grid with them, is left out.
    """
    places: dict[int, Place] = dict.fromkeys(range(world_size), ())
    cells = 1
    for family in sorted(found, key=lambda family: len(family[0])):
        index = {rank: place for group in family for place, rank in enumerate(group)}
        finer = {rank: (*place, index[rank]) for rank, place in places.items()}
        if len({*finer.values()}) == cells * len(family[0]):
            places, cells = finer, cells * len(family[0])
    if cells == world_size:
        return places
    alike: dict[Place, Iterator[int]] = defaultdict(itertools.count)
    whole = {rank: (*place, next(alike[place])) for rank, place in places.items()}
    if len({next(count) for count in alike.values()}) == 1:
        return whole
    return {rank: (rank,) for rank in range(world_size)}


# ---- classes along one coordinate ------------------------------------------------------------------------------------


def _classes(axis: int, places: Mapping[int, Place], rank_at: Mapping[Place, int], run: RunRanks) -> dict[int, int]:
    """Value of a coordinate -> the smallest one that is like it, with all other coordinates those of rank 0."""
    size = 1 + max(place[axis] for place in places.values())
    rank_of = [rank_at[(*places[0][:axis], value, *places[0][axis + 1 :])] for value in range(size)]
    tried = {*range(size)} if size <= TRIED else {0, 1, 2, size // 2, size - 2, size - 1}
    while True:
        found = run([rank_of[value] for value in sorted(tried)])
        between = {
            (low + high) // 2
            for low, high in itertools.pairwise(sorted(tried))
            if high > low + 1 and found[rank_of[low]] != found[rank_of[high]]
        }
        if not between:
            break
        tried |= between
    like: dict[int, int] = {}
    first: dict[Hashable, int] = {}
    for value in range(size):
        if value in tried:
            seen = found[rank_of[value]]
        like[value] = first.setdefault(seen, value)
    return like
