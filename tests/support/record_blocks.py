"""Blocks of records for tests."""

from __future__ import annotations

from commtrace.analyses.record_blocks import RecordBlock
from commtrace.reading.record_columns import RecordColumns
from commtrace.reading.recorded_run import RecordedRun
from commtrace.schema import RECORD, Records


def block_of(run: RecordedRun, records: Records, process: int = 0) -> RecordBlock:
    """Return records as a block of the process at position `process` of the log."""
    columns = RecordColumns.of(RECORD.names or (), len(records))
    return RecordBlock(columns.fill(records, run.labels.processes[process]), run.labels)
