"""Executors, which read the parts of a run in this process, in worker processes, in a pool or on a cluster."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, Union

from commtrace.errors import CommtraceError
from commtrace.process_setup.processor_limits import usable_cores

from .allocator import keep_freed_memory
from .run_parts import Executor, ReadPart, Result, RunPart, read_part, set_facts

if TYPE_CHECKING:
    from distributed import Client

MIN_PARALLEL_RECORDS: Final = 8_000_000
"""Minimum number of records in one pass for which worker processes are used."""
MAX_WORKERS: Final = 16
"""Maximum number of worker processes."""


AnyExecutor: TypeAlias = Union["Executor", futures.Executor, "Client", None]


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
        is_large = records >= MIN_PARALLEL_RECORDS
        with worker_pool(len(parts) if is_large else 0, (s.path for part in parts for s in part.segments)) as pool:
            results = (
                super().map(name, function, parts) if pool is None else PoolExecutor(pool).map(name, function, parts)
            )
            yield from results


@contextlib.contextmanager
def worker_pool(tasks: int, files: Iterable[Path]) -> Iterator[futures.ProcessPoolExecutor | None]:
    """Yield a pool of worker processes for a number of tasks; None if it would have only one, or none can be started.

    Args:
        tasks: The number.
        files: Files that the tasks read, for the error.

    Raises:
        CommtraceError: A worker process was killed.
    """
    workers = min(usable_cores(), MAX_WORKERS, tasks)
    context = _process_context() if workers > 1 else None
    if context is None:
        yield None
        return
    pool = futures.ProcessPoolExecutor(workers, context)
    try:
        yield pool
    except BrokenProcessPool:
        folder = os.path.commonpath([file.parent for file in files])
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
    """Yield the executor for a value of option `--dask`; None: on this machine. For commands, whose process is ours."""
    keep_freed_memory()
    if scheduler is None:
        yield DEFAULT_EXECUTOR
        return
    from .dask_executor import connect

    with connect(scheduler) as executor:
        yield executor
