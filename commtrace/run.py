"""The run that `commtrace.open` returns: its events, and the tables and figures of the analyses by name.

Only this module, `commtrace.commands` and, on first use, `commtrace` itself import the analyses.
"""

from __future__ import annotations

import contextlib
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from commtrace.analyses import analyse, detail
from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.errors import NoSuchFigureError, NoSuchTableError
from commtrace.reading.executors import AnyExecutor, as_executor
from commtrace.reading.log import open_log
from commtrace.reading.packed_log import PROCESSES
from commtrace.reading.recorded_run import RecordedRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plotly.graph_objects import Figure

    from commtrace.analyses.what_if.changed_run import ChangedRun


class Run(AnalysedRun):
    """One run of a program: what its ranks recorded, and the tables and figures of the analyses.

    Example:
        run = commtrace.open("logs/run1")
        run.events()                       # the event table, one row per call
        run.table("volume_by_operation")   # one table of the report
        run.figure("message_sizes")        # one figure of the page

    Records are read only when a table or figure is requested.
    """

    @cached_property
    def _tables(self) -> dict[str, pd.DataFrame]:
        return analyse(self)

    @cached_property
    def _figure_tables(self) -> dict[str, pd.DataFrame]:
        return {}

    def tables(self, executor: AnyExecutor = None) -> dict[str, pd.DataFrame]:
        """Return the tables of every analysis by name, as `commtrace report --json` shows them.

        Args:
            executor: Reads and analyses the records: a `concurrent.futures.Executor`, or a `dask.distributed.Client`.
                Default: the executor of the run; its result is cached.

        Returns:
            Tables by name; `describe_table` describes their columns and units.
        """
        return self._tables if executor is None else analyse(AnalysedRun(self.log, as_executor(executor)))

    def table(self, name: str) -> pd.DataFrame:
        """Return one table.

        Args:
            name: A table of the report, or one that only a figure shows (`timeline`, for example).

        Raises:
            NoSuchTableError: No analysis has a table of this name.
        """
        if name not in self._figure_tables and (table := detail(self, name)) is not None:
            self._figure_tables[name] = table
        tables = self._figure_tables if name in self._figure_tables else self.tables()
        if name not in tables:
            raise NoSuchTableError(f"no table is called {name!r}; choose from {', '.join(tables)}")
        return tables[name]

    def describe_table(self, name: str) -> pd.DataFrame:
        """Return the meaning of the columns of a table.

        Args:
            name: A name that `table` takes, or a table of `commtrace.analyses.side_by_side` or of `commtrace scaling`.

        Returns:
            A row per column of the table, whose name is the index: `unit` and `meaning`.

        Raises:
            NoSuchTableError: No table has this name.
        """
        from commtrace.analyses.analysis_catalog import TABLES, describe_columns

        if name not in TABLES:
            raise NoSuchTableError(f"no table is called {name!r}; choose from {', '.join(TABLES)}")
        return pd.DataFrame.from_dict(describe_columns([name])[name], orient="index")

    def figure(self, name: str) -> Figure:
        """Return a plotly figure of this run.

        Args:
            name: One of `commtrace.analyses.figures.FIGURES`.

        Raises:
            NoSuchFigureError: No figure has this name, or the log lacks its data.
            MissingLibraryError: plotly is not installed.
        """
        from commtrace.analyses.figures import FIGURES

        if name not in FIGURES:
            raise NoSuchFigureError(f"no figure is called {name!r}; choose from {', '.join(FIGURES)}")
        figure = FIGURES[name]
        with contextlib.suppress(NoSuchTableError):
            table = self.table(figure.table)
            if figure.has_data(table):
                return figure.draw(table)
        raise NoSuchFigureError(f"{name}: {figure.absent}")

    def what_if(self, *changes: str) -> pd.DataFrame:
        """Return predicted step times, as `commtrace whatif` shows them.

        Args:
            changes: Changes that are made together, such as "compute=0.5x", "bucket=50MB" or
                "without-straggler=worst" (`commtrace.analyses.what_if.changes`); none: each of the catalogue.

        Returns:
            The table `what_if`; the first row is the recorded run. `attrs["remarks"]` has sentences on what the
            predictions assume beyond what was validated.

        Raises:
            CommtraceError: The steps of the run cannot be replayed, or a change does not apply to it.
        """
        from commtrace.analyses.what_if.predictions import what_if

        return what_if(self._changed(changes), catalogue=not changes)

    def required_bandwidth(self, *changes: str) -> pd.DataFrame:
        """Return how much faster transfers must be to be hidden, as `commtrace whatif --required-bandwidth` does.

        Args:
            changes: Changes that are made before, such as "compute=0.1x" (`what_if`).

        Returns:
            The table `required_bandwidth`, a row per parallel dimension.

        Raises:
            CommtraceError: The steps of the run cannot be replayed, or a change does not apply to it.
        """
        from commtrace.analyses.what_if.predictions import required_bandwidth

        return required_bandwidth(self._changed(changes))

    def exposed_by_speed(self, *changes: str) -> pd.DataFrame:
        """Return the exposed part of a step for many speeds of transfers, for the figure of that name.

        Args:
            changes: Changes that are made before (`what_if`).

        Returns:
            The table `exposed_by_speed`, rows for each parallel dimension.

        Raises:
            CommtraceError: The steps of the run cannot be replayed, or a change does not apply to it.
        """
        from commtrace.analyses.what_if.predictions import exposed_shares

        return exposed_shares(self._changed(changes))

    def bandwidth_bounds(
        self,
        *,
        rate: float | None = None,
        computation_s: float | None = None,
        calibrate: AnalysedRun | None = None,
        latency_s: float = 0.0,
    ) -> dict[str, pd.DataFrame]:
        """Return the bandwidth and latency that a dry run needs, as `commtrace whatif --required-bandwidth` does.

        Args:
            rate: Floating-point operations by second that a rank reaches.
            computation_s: Instead: seconds for which a rank computes in a step.
            calibrate: Instead: a recorded run of this layout, whose rate is measured.
            latency_s: Latency of a message, s.

        Returns:
            The tables `bandwidth_bounds`, a row per parallel dimension and purpose, whose `attrs["remarks"]` has
            sentences on what it assumes, and `exposed_by_bandwidth`, for the figure of that name.

        Raises:
            CommtraceError: The run is no dry run, or not exactly one of the speeds is given.
        """
        from commtrace.analyses.what_if.bandwidth_bounds import required_bandwidth

        return required_bandwidth(
            self, rate=rate, computation_s=computation_s, calibrate=calibrate, latency_s=latency_s
        )  # fmt: skip

    def step_timelines(self, *changes: str) -> pd.DataFrame:
        """Return a step before and after changes, for the figure of that name.

        Args:
            changes: Changes that are made together (`what_if`).

        Returns:
            The table `step_timelines`, a row per computation and transfer.

        Raises:
            CommtraceError: The steps of the run cannot be replayed, or a change does not apply to it.
        """
        from commtrace.analyses.what_if.timelines import step_timelines

        return step_timelines(self._changed(changes))

    def _changed(self, changes: Sequence[str]) -> ChangedRun:
        from commtrace.analyses.what_if.changed_run import replayed_run
        from commtrace.analyses.what_if.changes import changed_run

        return changed_run(replayed_run(self), changes)

    def diff(self, other: RecordedRun) -> pd.DataFrame:
        """Return the differences between the calls of this run and another run, as `commtrace diff` does.

        Args:
            other: The run to compare with.

        Returns:
            The table `call_differences`; without rows if nothing differs.
        """
        from commtrace.analyses.compare.recorded_calls import read_calls
        from commtrace.analyses.compare.two_runs import compare_calls

        return compare_calls(read_calls(self), read_calls(other)).table


def open_run(directory: str | os.PathLike[str], *, recover: bool = False, executor: AnyExecutor = None) -> Run:
    """Return the newest run in a log directory. Nothing is written unless `recover` is set.

    Args:
        directory: The directory that COMMTRACE was set to, or one run's directory in it; or a file of another tool,
            or a directory of its files, which are imported to a temporary log.
        recover: First move records that killed processes of the run left in this host's shared memory to the log, as
            `commtrace recover` does. They are read in either case.
        executor: Reads and analyses the records: a `concurrent.futures.Executor`, or a `dask.distributed.Client`.
            Default: this process.

    Returns:
        The run, with `events()`, `table(name)` and `figure(name)`.

    Raises:
        LogError: The directory holds no run that can be read.
        ClusterError: The cluster has no commtrace, or another version.
    """
    return Run(open_log(_log_of(Path(directory)), recover=recover), as_executor(executor))


def _log_of(path: Path) -> Path:
    """Return a log's path; for files of another tool, that of a temporary log of their import."""
    if path.is_dir() and any(path.glob("**/*.jsonl")):
        return path
    if not path.exists() or (path / PROCESSES).exists():
        return path
    from commtrace.importing.import_run import import_for_reading, is_importable

    return import_for_reading(path) if is_importable(path) else path
