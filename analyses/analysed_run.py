"""A recorded run and what its analyses share: results that are computed once, when the first of them needs them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Final

import numpy as np

import commtrace
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.stored_tables import StoredTables, open_stored

from .across_ranks.call_times import COLUMNS as TIME_COLUMNS
from .across_ranks.clock_alignment import align_clocks, calls_that_align
from .across_ranks.clocks import Clocks
from .across_ranks.critical_paths import StepPaths, read_step_paths
from .across_ranks.matching import CallReader, CallTable, Derived, MatchedCalls, every_nth
from .grouping import Array
from .record_blocks import RecordBlock

CALLS_AT_ONCE: Final = 4_000_000
"""Calls that are matched at a time."""
TIMED_AT_ONCE: Final = 1 << 19
"""Calls whose times are computed at a time."""
SAMPLED_CALLS: Final = 200_000
"""Calls of the sample that the table `waiting` is made from."""


class AnalysedRun(RecordedRun):
    """A recorded run, with the results that several analyses use.

    Attributes:
        call_table: The calls that `fold` read for the analyses that are being computed; None: they need none.
    """

    call_table: CallTable | None = None

    def new_call_table(self, columns: Sequence[str], derived: Mapping[str, Derived]) -> CallTable:
        """Return an empty table for the calls of the run.

        It has the columns of `call_times`, and whether each call belongs to the sample (`is_sampled`). Without further
        columns, it is for the calls of the sample, and, if there are several hosts, for those that align clocks.

        Args:
            columns: Further columns of the calls, as in `match_calls`.
            derived: Further derived columns likewise.
        """
        records = sum(segment.count for process in self.processes for segment in process.segments)
        derived = {**TIME_COLUMNS, **derived, "is_sampled": partial(every_nth, self.sampled_every)}
        parts = -(-records // CALLS_AT_ONCE) if columns else 1
        keep = None if columns else partial(_is_sampled_or_aligns, self.sampled_every, calls_that_align(self))
        return CallTable(self.labels, CallReader(columns, derived, keep=keep), records, parts)

    def matched_calls(self, *, sampled: bool = False) -> Iterator[MatchedCalls]:
        """Yield the matched calls that analyses need (`fold_engine.NeededCalls`), in parts that fit into memory.

        Args:
            sampled: Whether to yield only those of the sample.
        """
        if self.call_table is None:
            raise RuntimeError("the analysis does not say which calls it needs")
        for calls in self.call_table.parts():
            wanted = calls.rows(np.flatnonzero(calls["is_sampled"])) if sampled else calls
            yield from wanted.split(TIMED_AT_ONCE)

    @cached_property
    def sampled_every(self) -> int:
        """N if the sample consists of every n-th operation; a prime, which is unlikely to divide a program's period."""
        records = sum(segment.count for process in self.processes for segment in process.segments)
        every = -(-records // SAMPLED_CALLS) or 1
        while every > 2 and any(every % divisor == 0 for divisor in range(2, int(every**0.5) + 1)):
            every += 1
        return every

    @cached_property
    def clocks(self) -> Clocks:
        """The clocks of the run's hosts relative to one of them, as bounds derived from the run's calls.

        `clocks.aligned` has a function of time for each host; the table `clocks` has the numbers. Nothing is read for
        a run on one host.
        """
        return align_clocks(self, self.call_table)

    @cached_property
    def step_paths(self) -> StepPaths | None:
        """What the ends of the last steps depend on, across ranks; None if that is not known (`critical_paths`)."""
        return read_step_paths(self, self.clocks)

    @cached_property
    def stored_tables(self) -> StoredTables | None:
        """The stored tables of a packed log; None if there are none that this code computed."""
        return open_stored(self.log, code_digest)


def _is_sampled_or_aligns(sampled_every: int, aligns: Derived, block: RecordBlock) -> Array:
    return np.asarray(every_nth(sampled_every, block) | aligns(block))


@functools.cache
def code_digest() -> str:
    """Return a digest of commtrace's code, which identifies tables computed by other code."""
    digest = hashlib.sha256(commtrace.__version__.encode())
    for folder in (Path(commtrace.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
