"""Executors, which read the records of a run in this process, in worker processes, in a pool or on a cluster.

A pass over the records calls a function for each part of the run (`RecordedRun.parts`). The executor merges the
results in a tree that depends only on the number of parts: every executor gives equal results, to the last bit of a
sum.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, Union

from commtrace.errors import CommtraceError
from commtrace.launchers import usable_cores

from .labels import ProcessIds
from .segment_reader import Segment

if TYPE_CHECKING:
    from distributed import Client

MERGED_AT_ONCE: Final = 64
"""Maximum number of results that are merged in one node of the tree."""
MIN_PARALLEL_RECORDS: Final = 8_000_000
"""Minimum number of records in one pass for which worker processes are used."""
MAX_WORKERS: Final = 16
"""Maximum number of worker processes."""


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
AnyExecutor: TypeAlias = Union["Executor", futures.Executor, "Client", None]


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


class PoolExecutor(Executor):
    """Executor in the processes or threads of a pool."""

    def __init__(self, pool: futures.Executor) -> None:
        self._pool = pool

    def map(self, name: str, function: ReadPart[Result], parts: Sequence[RunPart]) -> Iterator[Result]:
        """Yield the results of the parts."""
        results = self._pool.map(functools.partial(read_part, function), parts)
        for part, (result, facts) in zip(parts, results, strict=True):
            set_facts([part], facts)
            yield result


class WorkerProcesses(Executor):
    """Executor in worker processes if there are many records to read, else in this process."""

    def map(self, name: str, function: ReadPart[Result], parts: Sequence[RunPart]) -> Iterator[Result]:
        """Yield the results of the parts."""
        records = sum(segment.count for part in parts for segment in part.segments)
        workers = min(usable_cores(), MAX_WORKERS, len(parts))
        context = _process_context() if records >= MIN_PARALLEL_RECORDS and workers > 1 else None
        if context is None:
            yield from super().map(name, function, parts)
            return
        pool = futures.ProcessPoolExecutor(workers, context)
        try:
            yield from PoolExecutor(pool).map(name, function, parts)
        except BrokenProcessPool:
            folder = os.path.commonpath([segment.path.parent for part in parts for segment in part.segments])
            raise CommtraceError(f"{folder}: a worker process was killed, probably because memory ran out") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _process_context() -> multiprocessing.context.BaseContext | None:
    """Return how this process can start workers; None if it cannot.

    Forking saves the import of pandas (one second), but would copy locks that other threads hold. A spawned process
    imports the file of the main module again, which runs a script that has no `if __name__ == "__main__"`.
    """
    if multiprocessing.current_process().daemon:  # it may have no children
        return None
    if threading.active_count() == 1:
        return multiprocessing.get_context("fork")
    is_script = hasattr(sys.modules["__main__"], "__file__")  # not a notebook or a prompt
    return None if is_script else multiprocessing.get_context("spawn")


DEFAULT_EXECUTOR: Final = WorkerProcesses()
"""The executor if none is given."""


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


def as_executor(executor: AnyExecutor) -> Executor:
    """Return an executor on this machine (None), in a pool, or on the cluster of a Dask client."""
    if executor is None:
        return DEFAULT_EXECUTOR
    if isinstance(executor, Executor):
        return executor
    if isinstance(executor, futures.Executor):
        return PoolExecutor(executor)
    from .dask_executor import DaskExecutor

    return DaskExecutor(executor)


@contextlib.contextmanager
def open_executor(scheduler: str | None) -> Iterator[Executor]:
    """Yield the executor for a value of option `--dask`; None: on this machine."""
    if scheduler is None:
        yield DEFAULT_EXECUTOR
        return
    from .dask_executor import connect

    with connect(scheduler) as executor:
        yield executor
