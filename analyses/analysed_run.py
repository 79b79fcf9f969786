"""A recorded run and what its analyses share: results that are computed once, when the first of them needs them."""

from __future__ import annotations

import functools
import hashlib
from functools import cached_property
from pathlib import Path

import commtrace
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.stored_tables import StoredTables, open_stored

from .across_ranks.clock_alignment import align_clocks
from .across_ranks.clocks import Clocks
from .across_ranks.step_paths import StepPaths, read_step_paths


class AnalysedRun(RecordedRun):
    """A recorded run, with the results that several analyses use."""

    @cached_property
    def clocks(self) -> Clocks:
        """The clocks of the run's hosts relative to one of them, as bounds derived from the run's calls.

        `clocks.aligned` has a function of time for each host; the table `clocks` has the numbers. Nothing is read for
        a run on one host.
        """
        return align_clocks(self)

    @cached_property
    def step_paths(self) -> StepPaths | None:
        """What the ends of the last steps depend on, across ranks; None if that is not known (`step_paths`)."""
        return read_step_paths(self, self.clocks)

    @cached_property
    def stored_tables(self) -> StoredTables | None:
        """The stored tables of a packed log; None if there are none that this code computed."""
        return open_stored(self.log, code_digest)


@functools.cache
def code_digest() -> str:
    """Return a digest of commtrace's code, which identifies tables computed by other code."""
    digest = hashlib.sha256(commtrace.__version__.encode())
    for folder in (Path(commtrace.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
