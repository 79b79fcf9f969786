"""Executors: where the records of a run are read.

A pass over the records of a run is a function of its parts. An executor calls the function for each part, and merges
the results in a tree that depends on the number of parts only: results are equal with every executor, to the last bit
of a sum.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar, Union

from .segment_reader import Segment

if TYPE_CHECKING:
    from distributed import Client

MERGED_AT_ONCE: Final = 64
"""Results that become one in a node of the tree."""


class Part(Protocol):
    """A part of a run to be read, picklable: it names its records, and does not hold them."""

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments of its records."""


AnyPart = TypeVar("AnyPart", bound=Part)
Shared = TypeVar("Shared")
Result = TypeVar("Result")
Facts: TypeAlias = list[tuple[object, ...]]
"""What reading found out about segments (`Segment.facts`)."""


AnyExecutor: TypeAlias = Union["Executor", futures.Executor, "Client", None]


class Executor:
    """Reads in this process."""

    def map(
        self, name: str, function: Callable[[Shared, AnyPart], Result], shared: Shared, parts: Sequence[AnyPart]
    ) -> Iterator[Result]:
        """Yield `function(shared, part)` of each part, in their order.

        Args:
            name: Name of the pass, for progress.
            function: Reads a part. It is picklable, as are `shared` and the results.
            shared: What all parts need.
            parts: The parts. Their segments know afterwards what is damaged in them.
        """
        return (function(shared, part) for part in parts)

    def reduce(
        self,
        name: str,
        function: Callable[[Shared, AnyPart], Result],
        merge: Callable[[Shared, Sequence[Result]], Result],
        shared: Shared,
        parts: Sequence[AnyPart],
    ) -> Result:
        """Return the results of all parts, of which there is at least one, merged; see `map`."""
        return merge_tree(functools.partial(merge, shared), self.map(name, function, shared, parts))


class PoolExecutor(Executor):
    """Reads in the processes or threads of a pool."""

    def __init__(self, pool: futures.Executor) -> None:
        self._pool = pool

    def map(
        self, name: str, function: Callable[[Shared, AnyPart], Result], shared: Shared, parts: Sequence[AnyPart]
    ) -> Iterator[Result]:
        """Yield the results of the parts."""
        results = self._pool.map(functools.partial(read_part, function, shared), parts)
        for part, (result, facts) in zip(parts, results, strict=True):
            learn([part], facts)
            yield result


IN_PROCESS: Final = Executor()


def read_part(function: Callable[[Shared, AnyPart], Result], shared: Shared, part: AnyPart) -> tuple[Result, Facts]:
    """Return the result of a part in another process, and what reading found out about its segments."""
    return function(shared, part), [segment.facts for segment in part.segments]


def learn(parts: Iterable[Part], facts: Facts) -> None:
    """Tell the segments of parts what another process found out about its copies of them."""
    for segment, of_copy in zip((segment for part in parts for segment in part.segments), facts, strict=True):
        segment.facts = of_copy


def merge_tree(merge: Callable[[Sequence[Result]], Result], results: Iterable[Result]) -> Result:
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
