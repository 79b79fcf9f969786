"""Export of a run's event table to a file: one row per event, the columns of `schema.EVENT_COLUMNS`.

The columns are public under EVENT_TABLE_VERSION, which Parquet files have in their metadata. An unknown value is an
empty field in CSV and null in Parquet. A CSV file begins like this:

    rank,op,variant,api,group,group_ranks,group_size,role,dtype,payload_bytes,wire_bytes,peer,tag,seq,t_begin_ns,...
    3,all_reduce,allreduce_,torch,0-3/0,0-3,4,data,float32,1048576,1572864.0,-1,-1,17,8120531,...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from commtrace.output_files import atomic_write
from commtrace.schema import EVENT_TABLE_VERSION

from .labels import Array
from .packed_log import ROW_GROUP, import_parquet
from .record_columns import RecordColumns, row_groups
from .recorded_run import EVENT_FIELDS, EventTable, RecordedRun

Selection: TypeAlias = Sequence[int] | None


def export(
    run: RecordedRun,
    out: Path,
    form: str,
    *,
    force: bool = False,
    ranks: Selection = None,
    steps: Selection = None,
) -> int:
    """Write a run's events to a file, process by process in the order of the log, in constant memory.

    The file appears under its name only when it is complete; an error leaves no file.

    Args:
        run: The run.
        out: The file.
        form: A key of `WRITERS`: "csv" or "parquet".
        force: Whether to replace an existing file.
        ranks: Ranks to include; None: all.
        steps: Steps to include, -1 for calls before the first step; None: all.

    Returns:
        The number of rows.

    Raises:
        OutputError: The file exists or cannot be written.
        MissingLibraryError: Parquet needs pyarrow, which is not installed.
    """
    with atomic_write(out, force=force) as part:
        return WRITERS[form](run, part, ranks, steps)


def _write_csv(run: RecordedRun, path: Path, ranks: Selection, steps: Selection) -> int:
    rows = 0
    with open(path, "x", encoding="utf-8", newline="") as file:
        for number, block in enumerate(run.blocks(ranks, steps)):
            block.to_csv(file, header=number == 0, index=False, lineterminator="\n")
            rows += len(block)
    return rows


def _write_parquet(run: RecordedRun, path: Path, ranks: Selection, steps: Selection) -> int:
    pyarrow, parquet = import_parquet("--format parquet", ", or use --format csv")
    table = EventTable(run.labels)
    schema = pyarrow.Schema.from_pandas(table.frame(RecordColumns.of(EVENT_FIELDS, 0)), preserve_index=False)
    schema = schema.with_metadata(
        {**schema.metadata, "commtrace.normal_form_version": str(EVENT_TABLE_VERSION), "commtrace.run": run.id}
    )
    labels = {name: pyarrow.array(labels.tolist(), pyarrow.string()) for name, labels in table.categories.items()}

    def array(field: Any, values: Array) -> Any:
        if field.name not in labels:
            return pyarrow.array(values, field.type, mask=table.missing(field.name, values))
        positions = pyarrow.array(values, field.type.index_type)
        return pyarrow.DictionaryArray.from_arrays(positions, labels[field.name])

    rows = 0
    with open(path, "xb") as file, parquet.ParquetWriter(file, schema) as writer:
        for records in row_groups(run.records(ranks, steps), EVENT_FIELDS, ROW_GROUP):
            columns = table.columns(records)
            writer.write_table(pyarrow.table([array(field, columns[field.name]) for field in schema], schema))
            rows += len(records)
    return rows


WRITERS: Final[dict[str, Callable[[RecordedRun, Path, Selection, Selection], int]]] = {
    "csv": _write_csv,
    "parquet": _write_parquet,
}
