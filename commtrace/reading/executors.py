"""Executors: where the records of a run are read.

A pass over the records of a run is a function of its parts (`RecordedRun.parts`). An executor calls the function for
each part, and merges the results in a tree that depends on the number of parts only: results are equal with every
executor, to the last bit of a sum.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, Union

from .labels import ProcessIds
from .segment_reader import Segment

if TYPE_CHECKING:
    from distributed import Client

MERGED_AT_ONCE: Final = 64
"""Results that become one in a node of the tree."""


@dataclass
class RunPart:
    """Segments that are read in one go, and of each the ids of its process. Names the records, does not hold them."""

    number: int
    """Position among the parts of the run."""
    segments: list[Segment] = field(default_factory=list)
    processes: list[ProcessIds] = field(default_factory=list)


Result = TypeVar("Result")
ReadPart: TypeAlias = Callable[[RunPart], Result]
"""A function of a part, picklable, as are its results."""
Merge: TypeAlias = Callable[[Sequence[Result]], Result]
"""A function that merges results, picklable."""
Facts: TypeAlias = list[tuple[object, ...]]
"""What reading found out about segments (`Segment.facts`)."""
AnyExecutor: TypeAlias = Union["Executor", futures.Executor, "Client", None]


class Executor:
    """Reads in this process."""

    def map(self, name: str, function: ReadPart[Result], parts: Sequence[RunPart]) -> Iterator[Result]:
        """Yield `function(part)` of each part, in their order; their segments then know what is damaged in them.

        Args:
            name: Name of the pass, for progress.
            function: Reads a part.
            parts: The parts.
        """
        return map(function, parts)

    def reduce(self, name: str, function: ReadPart[Result], merge: Merge[Result], parts: Sequence[RunPart]) -> Result:
        """Return the results of all parts, of which there is at least one, merged; see `map`."""
        return merge_tree(merge, self.map(name, function, parts))


class PoolExecutor(Executor):
    """Reads in the processes or threads of a pool."""

    def __init__(self, pool: futures.Executor) -> None:
        self._pool = pool

    def map(self, name: str, function: ReadPart[Result], parts: Sequence[RunPart]) -> Iterator[Result]:
        """Yield the results of the parts."""
        results = self._pool.map(functools.partial(read_part, function), parts)
        for part, (result, facts) in zip(parts, results, strict=True):
            learn([part], facts)
            yield result


IN_PROCESS: Final = Executor()


def read_part(function: ReadPart[Result], part: RunPart) -> tuple[Result, Facts]:
    """Return the result of a part in another process, and what reading found out about its segments."""
    return function(part), [segment.facts for segment in part.segments]


def learn(parts: Iterable[RunPart], facts: Facts) -> None:
    """Tell the segments of parts what another process found out about its copies of them."""
    for segment, of_copy in zip((segment for part in parts for segment in part.segments), facts, strict=True):
        segment.facts = of_copy


def merge_tree(merge: Merge[Result], results: Iterable[Result]) -> Result:
    """Return all results, of which there is at least one, merged. Holds MERGED_AT_ONCE results of each level only."""
    merged = (merge(batch) for batch in batches(results))
    first = [*itertools.islice(merged, 2)]
    return first[0] if len(first) == 1 else merge_tree(merge, itertools.chain(first, merged))


def batches(values: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield MERGED_AT_ONCE values at a time."""
    iterator = iter(values)
    while batch := [*itertools.islice(iterator, MERGED_AT_ONCE)]:
        yield batch


def as_executor(executor: AnyExecutor) -> Executor:
    """Return the executor that reads in this process (None), in a pool, or on the cluster of a client."""
    if executor is None:
        return IN_PROCESS
    if isinstance(executor, Executor):
        return executor
    if isinstance(executor, futures.Executor):
        return PoolExecutor(executor)
    from .dask_executor import DaskExecutor

    return DaskExecutor(executor)


@contextlib.contextmanager
def open_executor(scheduler: str | None) -> Iterator[Executor]:
    """Yield the executor on the cluster of a scheduler, as option `--dask` names it; None: in this process."""
    if scheduler is None:
        yield IN_PROCESS
        return
    from .dask_executor import connect

    with connect(scheduler) as executor:
        yield executor
