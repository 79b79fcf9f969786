"""Parts of a run, and the executor that reads them one after the other in this process.

A pass over the records calls a function for each part of the run (`RecordedRun.parts`). The executor merges the
results in a tree that depends only on the number of parts: every executor gives equal results, to the last bit of a
sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

from .labels import ProcessIds
from .segment_reader import Segment

MERGED_AT_ONCE: Final = 64
"""Maximum number of results that are merged in one node of the tree."""


@dataclass
class RunPart:
    """Segments that are read together, each with the ids of its process. It does not hold their records."""

    number: int
    """Position among the parts of the run."""
    segments: list[Segment] = field(default_factory=list)
    processes: list[ProcessIds] = field(default_factory=list)


Result = TypeVar("Result")
ReadPart: TypeAlias = Callable[[RunPart], Result]
"""A picklable function of a part, with picklable results."""
Merge: TypeAlias = Callable[[Sequence[Result]], Result]
"""A picklable function that merges results."""
Facts: TypeAlias = list[tuple[object, ...]]
"""`Segment.facts` of segments after reading."""


class Executor:
    """Executor in this process."""

    def map(self, name: str, function: ReadPart[Result], parts: Sequence[RunPart]) -> Iterator[Result]:
        """Yield `function(part)` for each part, in order. Set the `facts` of the parts' segments.

        Args:
            name: Name of the pass, for progress.
            function: Function that reads a part.
            parts: The parts.
        """
        return map(function, parts)

    def reduce(self, name: str, function: ReadPart[Result], merge: Merge[Result], parts: Sequence[RunPart]) -> Result:
        """Return the merged results of one or more parts; see `map`."""
        return merge_tree(merge, self.map(name, function, parts))


def read_part(function: ReadPart[Result], part: RunPart) -> tuple[Result, Facts]:
    """Read a part in another process. Return the result, and the facts of its segments."""
    return function(part), [segment.facts for segment in part.segments]


def set_facts(parts: Iterable[RunPart], facts: Facts) -> None:
    """Set the facts of the segments of parts to those of their copies in another process."""
    for segment, copy_facts in zip((segment for part in parts for segment in part.segments), facts, strict=True):
        segment.facts = copy_facts


def merge_tree(merge: Merge[Result], results: Iterable[Result]) -> Result:
    """Merge one or more results in a tree, holding at most MERGED_AT_ONCE results of each level."""
    merged = (merge(batch) for batch in batches(results))
    first = [*itertools.islice(merged, 2)]
    return first[0] if len(first) == 1 else merge_tree(merge, itertools.chain(first, merged))


def batches(values: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield lists of up to MERGED_AT_ONCE values."""
    iterator = iter(values)
    while batch := [*itertools.islice(iterator, MERGED_AT_ONCE)]:
        yield batch
