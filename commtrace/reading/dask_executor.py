"""Executor on the workers of a Dask cluster, which need the log directory under the same path as this process.

Why not `Client.get_executor()`: it merges all results in this process, and sends the function with every part. A report
of 400 parts (1.1 million records, two local workers) then took 74.6 s of processor time, 25.5 s of them in this
process, instead of 56.3 s and 18.2 s. It waits in silence for a cluster without workers. Results are equal, and both
executors repeat what a lost worker had read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import commtrace
from commtrace.errors import ClusterError, LogError, MissingLibraryError
from commtrace.formatting import format_plural
from commtrace.process_setup.processor_limits import usable_cores

from .run_parts import Executor, Facts, Merge, ReadPart, Result, RunPart, batches, read_part, set_facts

WORKERS_TIMEOUT_SECONDS: Final = 600
"""How long a cluster may be without workers, which may be waiting in a batch queue."""

_ADDRESS: Final = re.compile(r"\w+://.+|[^/]+:\d+")
_ADDRESS_HINT: Final = (
    "give an address such as tcp://HOST:8786, the file of dask scheduler --scheduler-file, or local:N"
)


@contextlib.contextmanager
def connect(scheduler: str) -> Iterator[DaskExecutor]:
    """Yield the executor on a cluster.

    Args:
        scheduler: Address of a scheduler, a scheduler file, or "local" or "local:N" for N new workers on this host.

    Raises:
        MissingLibraryError: `distributed` is not installed.
        ClusterError: The scheduler cannot be reached, or the cluster fails.
    """
    distributed = _import_distributed()
    local = re.fullmatch(r"local(?::(\d+))?", scheduler)
    for name in ("distributed", "distributed.client"):  # their errors become ClusterError
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        if local:
            workers = int(local[1] or 0) or usable_cores()
            options = {
                "n_workers": workers,
                "threads_per_worker": 1,
                "dashboard_address": "127.0.0.1:0",
                "silence_logs": 50,
            }
            address = stack.enter_context(distributed.LocalCluster(**options))
        elif _ADDRESS.fullmatch(scheduler):
            address = scheduler
        elif os.path.exists(scheduler):
            address = _address_in(scheduler)
        else:
            raise ClusterError(f"--dask {scheduler}: no such scheduler file; {_ADDRESS_HINT}")
        try:
            if not local:
                asyncio.run(_try_to_connect(address))
            client = stack.enter_context(distributed.Client(address, set_as_default=False))
        except (OSError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ClusterError(
                f"--dask {scheduler}: no scheduler answers ({reason}); start one (dask scheduler), or give its address"
            ) from None
        yield DaskExecutor(client)


def _address_in(scheduler_file: str) -> str:
    """Return the address in a file of `dask scheduler --scheduler-file`."""
    try:
        return str(json.loads(Path(scheduler_file).read_bytes())["address"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ClusterError(f"--dask {scheduler_file}: not a scheduler file; {_ADDRESS_HINT}") from None


async def _try_to_connect(address: str) -> None:
    """Connect to a scheduler and disconnect. A `Client` that cannot connect may hang when it is deleted."""
    comm, security = import_module("distributed.comm"), _import_distributed().Security()
    connection = await comm.connect(address, **security.get_connection_args("client"))
    await connection.close()


def _import_distributed() -> Any:
    try:
        return import_module("distributed")
    except ImportError:
        raise MissingLibraryError.of_extra("--dask", "distributed", "dask") from None


class DaskExecutor(Executor):
    """Executor on the workers of a cluster. If a worker dies, others read its parts again.

    Args:
        client: A `dask.distributed.Client`.

    Raises:
        ClusterError: The scheduler or a worker has another version of commtrace, or none.
    """

    def __init__(self, client: Any) -> None:
        self._distributed = _import_distributed()
        self._client = client
        self._address = client.scheduler.address
        with self._errors():
            probe = _probe()
            versions = {f"worker {address}": version for address, version in client.run(probe).items()}
            versions |= {f"scheduler {self._address}": client.run_on_scheduler(probe)}
        for where, version in versions.items():
            _check_version(where, version)

    def map(self, name: str, function: ReadPart[Result], parts: Sequence[RunPart]) -> Iterator[Result]:
        """Yield the results of the parts."""
        futures = self._submit(name, function, parts)
        with self._progress(name, futures):
            for part in parts:
                result, facts = self._result(futures.pop(0))
                set_facts([part], facts)
                yield result

    def reduce(self, name: str, function: ReadPart[Result], merge: Merge[Result], parts: Sequence[RunPart]) -> Result:
        """Return the merged results of the parts."""
        futures = self._submit(name, function, parts)
        with self._progress(name, futures):
            shared_merge, merged = self._share(merge), list[Any]()
            while len(merged) != 1:
                merged = futures = [
                    # Merges take precedence over reading, so that results need less memory.
                    self._client.submit(_merge, shared_merge, *batch, key=_key("merge"), priority=1)
                    for batch in batches(futures)
                ]
            result: Result
            result, facts = self._result(futures[0])
        set_facts(parts, facts)
        return result

    def _submit(self, name: str, function: ReadPart[Result], parts: Sequence[RunPart]) -> list[Any]:
        """Return the futures of the results of parts."""
        with self._errors():
            shared = ([value] * len(parts) for value in (commtrace.__version__, self._share(function)))
            pickled = [pickle.dumps(part) for part in parts]
            futures: list[Any] = self._client.map(_read, *shared, pickled, key=[_key(name) for _ in parts])
        return futures

    def _share(self, value: object) -> Any:
        """Return the future of a value that all workers need."""
        with self._errors(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sending large graph", UserWarning)
            # Not scattered: scattered data is lost with the worker that holds it.
            return self._client.submit(pickle.loads, pickle.dumps(value), key=_key("shared"))

    def _result(self, future: Any) -> Any:
        """Return the result of a future, or raise its error."""
        last_worker, is_waiting = time.monotonic(), False
        with self._errors():
            while not future.done():
                with self._client.as_current(), contextlib.suppress(self._distributed.TimeoutError):
                    self._distributed.wait(future, timeout=min(5, WORKERS_TIMEOUT_SECONDS))
                if future.done() or self._client.scheduler_info()["workers"]:
                    last_worker = time.monotonic()
                elif not is_waiting:
                    is_waiting = True
                    print(f"commtrace: scheduler {self._address} has no workers; waiting for one", file=sys.stderr)
                elif time.monotonic() - last_worker > WORKERS_TIMEOUT_SECONDS:
                    text = f"scheduler {self._address}: had no workers for {WORKERS_TIMEOUT_SECONDS} s"
                    raise ClusterError(f"{text}; start some: dask worker {self._address}")
            error = future.exception() if future.status == "error" else None
            if error is None:
                return future.result()
        if isinstance(error, self._distributed.scheduler.KilledWorker):
            workers = format_plural(error.allowed_failures + 1, "worker")
            text = f"{error.task}: {workers} died while reading it, the last on {error.last_worker.address}"
            raise ClusterError(f"{text}, probably because memory ran out; give workers more memory") from None
        if isinstance(error, ImportError) or str(error).startswith("Can't get attribute"):
            raise ClusterError(f"a worker of {self._address}: {error}; {_SAME_VERSION}") from error
        raise error

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert connection errors to ClusterError."""
        try:
            yield
        except (self._distributed.CancelledError, OSError):
            text = f"scheduler {self._address}: connection lost"
            raise ClusterError(f"{text}; see why it ended, start it again, and repeat the command") from None

    @contextlib.contextmanager
    def _progress(self, name: str, futures: Sequence[Any]) -> Iterator[None]:
        """Show on a terminal how many of the futures are done."""
        from rich.console import Console
        from rich.progress import Progress

        progress = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        with progress:
            bar = progress.add_task(name, total=len(futures))
            for future in futures:
                future.add_done_callback(lambda _: progress.advance(bar))
            yield


_SAME_VERSION: Final = "install the same version of commtrace for this process, the scheduler and all workers"


def _key(name: str) -> str:
    """Return a unique task name, which dashboards show."""
    return f"commtrace-{name}-{uuid4().hex}"


def _probe() -> Callable[[], str | None]:
    """Return a function that returns the version of commtrace, and that can be unpickled without commtrace."""

    def version() -> str | None:
        try:
            from commtrace import __version__
        except ImportError:
            return None
        return __version__

    return version


def _check_version(where: str, version: str | None) -> None:
    if version != commtrace.__version__:
        what = "commtrace is not installed there" if version is None else f"has commtrace {version}"
        raise ClusterError(f"{where}: {what}, but this process has {commtrace.__version__}; {_SAME_VERSION}")


def _read(version: str, function: ReadPart[Result], pickled_part: bytes) -> tuple[Result, Facts]:
    """Read a part on a worker. Return the result, and the facts of its segments."""
    from distributed import get_worker

    where = f"worker {get_worker().address}"
    _check_version(where, version)  # the worker may have joined later
    part = pickle.loads(pickled_part)
    for folder in {segment.path.parent for segment in part.segments}:
        if not folder.is_dir():
            raise LogError(f"{folder}: {where} has no such folder; mount it there under the same path")
    return read_part(function, part)


def _merge(merge: Merge[Result], *parts: tuple[Result, Facts]) -> tuple[Result, Facts]:
    """Merge results on a worker. Return the result, and the facts of the segments of all of them."""
    return merge([result for result, _ in parts]), [*chain(*(facts for _, facts in parts))]
