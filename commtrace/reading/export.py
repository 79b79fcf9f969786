"""Write a run's events to a file, in normal form: one row per event, the columns of `schema.NORMAL_FORM`.

The columns are public under NORMAL_FORM_VERSION, which Parquet files carry in their metadata. What is not known is an
empty field in CSV and null in Parquet. The beginning of a CSV file:

    rank,op,variant,api,group,group_ranks,group_size,role,dtype,payload_bytes,wire_bytes,peer,tag,seq,t_begin_ns,...
    3,all_reduce,allreduce_,torch,0-3/0,0-3,4,data,float32,1048576,1572864.0,-1,-1,17,8120531,...
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from commtrace.errors import MissingLibraryError, OutputError
from commtrace.reading.run import Run
from commtrace.schema import NORMAL_FORM_VERSION


def export(run: Run, out: Path, form: str, *, force: bool = False) -> int:
    """Write a run's events as "csv" or "parquet"; returns the number of rows.

    Memory stays constant; rows come process by process, in the order of the files. The file appears under its name only
    when it is whole, and nothing is left behind after an error. Raises OutputError or MissingLibraryError.
    """
    if out.is_dir():
        raise OutputError(f"{out}: is a directory; give the name of a file in it")
    if os.path.lexists(out) and not force:
        raise OutputError(f"{out}: exists already; give another name, or --force to replace it")
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        rows = WRITERS[form](run, part)
        os.replace(part, out)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written ({_reason(error)}); {_mend(error)}") from error
    finally:
        _remove(part)
    return rows


def _write_csv(run: Run, path: Path) -> int:
    rows = 0
    with open(path, "x", encoding="utf-8", newline="") as file:
        for number, block in enumerate(run.blocks()):
            block.to_csv(file, header=number == 0, index=False, lineterminator="\n")
            rows += len(block)
    return rows


def _write_parquet(run: Run, path: Path) -> int:
    pyarrow, parquet = _pyarrow()
    blocks = run.blocks()
    schema = pyarrow.Schema.from_pandas(next(blocks), preserve_index=False)
    schema = schema.with_metadata(
        {**schema.metadata, "commtrace.normal_form_version": str(NORMAL_FORM_VERSION), "commtrace.run": run.id}
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


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _mend(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "make room, or give a file on another disk"
    if error.errno == errno.ENOENT:
        return "make its folder first"
    return "give a file in a folder where you may write"


def _remove(part: Path) -> None:
    try:
        part.unlink(missing_ok=True)
    except OSError:  # the folder does not exist, or the store is gone: there is nothing to remove, or no way to
        pass


WRITERS: Final[dict[str, Callable[[Run, Path], int]]] = {"csv": _write_csv, "parquet": _write_parquet}
