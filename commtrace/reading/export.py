"""Write a run's events to a file, in normal form: one row per event, the columns of `schema.NORMAL_FORM`.

The columns are public under NORMAL_FORM_VERSION, which Parquet files carry in their metadata. What is not known is an
empty field in CSV and null in Parquet. The beginning of a CSV file:

    rank,op,variant,api,group,group_ranks,group_size,role,dtype,payload_bytes,wire_bytes,peer,tag,seq,t_begin_ns,...
    3,all_reduce,allreduce_,torch,0-3/0,0-3,4,data,float32,1048576,1572864.0,-1,-1,17,8120531,...
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from commtrace.errors import MissingLibraryError
from commtrace.output_files import atomic_write
from commtrace.schema import EVENT_TABLE_VERSION

from .run import RecordedRun


def export(run: RecordedRun, out: Path, form: str, *, force: bool = False) -> int:
    """Write a run's events as "csv" or "parquet"; returns the number of rows.

    Memory stays constant; rows come process by process, in the order of the files. The file appears under its name only
    when it is whole, and nothing is left behind after an error. Raises OutputError or MissingLibraryError.
    """
    with atomic_write(out, force=force) as part:
        return WRITERS[form](run, part)


def _write_csv(run: RecordedRun, path: Path) -> int:
    rows = 0
    with open(path, "x", encoding="utf-8", newline="") as file:
        for number, block in enumerate(run.blocks()):
            block.to_csv(file, header=number == 0, index=False, lineterminator="\n")
            rows += len(block)
    return rows


def _write_parquet(run: RecordedRun, path: Path) -> int:
    pyarrow, parquet = _pyarrow()
    blocks = run.blocks()
    schema = pyarrow.Schema.from_pandas(next(blocks), preserve_index=False)
    schema = schema.with_metadata(
        {**schema.metadata, "commtrace.normal_form_version": str(EVENT_TABLE_VERSION), "commtrace.run": run.id}
    )
    rows = 0
    with open(path, "xb") as file, parquet.ParquetWriter(file, schema) as writer:
        for block in blocks:
            writer.write_table(pyarrow.Table.from_pandas(block, schema, preserve_index=False))
            rows += len(block)
    return rows


def _pyarrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise MissingLibraryError(
            "--format parquet: needs pyarrow; pip install 'commtrace[parquet]', or use --format csv"
        ) from None


WRITERS: Final[dict[str, Callable[[RecordedRun, Path], int]]] = {"csv": _write_csv, "parquet": _write_parquet}
