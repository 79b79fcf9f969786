"""Export of the event table to files."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pandas as pd
import pytest
from factory import LogFactory, record, training
from pandas.testing import assert_frame_equal

import commtrace.reading.export
from commtrace.errors import MissingLibraryError, OutputError
from commtrace.reading.export import export
from commtrace.run import Run, open_run
from commtrace.schema import EVENT_COLUMNS, EVENT_TABLE_VERSION


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run of two ranks, with a further process of rank 0 that has two segments."""
    training(tmp_path / "log").process(0, pid=2).known().write(record()).write(record(kind=99, group=99))
    return open_run(tmp_path / "log")


def test_csv(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "events.csv"
    assert export(run, out, "csv") == 16
    text = out.read_text().splitlines()
    assert text[0] == ",".join(EVENT_COLUMNS)
    assert len(text) == 17
    events = pd.read_csv(out, keep_default_na=False, na_values={"wire_bytes": [""], "group_size": [""]})
    expected = pd.concat(run.blocks(), ignore_index=True)
    assert events["payload_bytes"].tolist() == expected["payload_bytes"].tolist()
    assert events["op"].tolist() == expected["op"].tolist()
    assert events["wire_bytes"].isna().sum() == events["group_size"].isna().sum() == 1


def test_parquet(run: Run, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "events.parquet"
    assert export(run, out, "parquet") == 16
    assert_frame_equal(pd.read_parquet(out), pd.concat(run.blocks(), ignore_index=True))
    metadata = parquet.read_schema(out).metadata
    assert metadata[b"commtrace.normal_form_version"] == str(EVENT_TABLE_VERSION).encode()


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_ranks_and_steps_that_are_wanted(run: Run, tmp_path: Path, form: str) -> None:
    out = tmp_path / f"events.{form}"
    rows = export(run, out, form, ranks=[1], steps=[-1, 2])
    frame = pd.read_csv(out) if form == "csv" else pd.read_parquet(out)
    assert len(frame) == rows > 0
    assert set(frame["rank"]) == {1}
    assert set(frame["step"]) == {-1, 2}


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_run_without_events_gives_the_columns(tmp_path: Path, form: str) -> None:
    LogFactory(tmp_path / "log").process()
    out = tmp_path / f"events.{form}"
    assert export(open_run(tmp_path / "log"), out, form) == 0
    frame = pd.read_csv(out) if form == "csv" else pd.read_parquet(out)
    assert tuple(frame.columns) == EVENT_COLUMNS


def test_an_existing_file_is_kept_unless_forced(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "events.csv"
    out.write_text("precious")
    with pytest.raises(OutputError, match=r"events\.csv: already exists; .*--force"):
        export(run, out, "csv")
    assert out.read_text() == "precious"
    export(run, out, "csv", force=True)
    assert out.read_text().startswith("rank,op,")


@pytest.mark.parametrize(("number", "fix"), [(errno.ENOSPC, "make room"), (errno.EACCES, "where you may write")])
def test_half_a_file_is_removed_and_the_old_one_is_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fix: str
) -> None:
    out = tmp_path / "events.csv"
    out.write_text("precious")

    def fail(run: Run, path: Path, *selection: object) -> int:
        path.write_text("half")
        raise OSError(number, "No way")

    monkeypatch.setitem(commtrace.reading.export.WRITERS, "csv", fail)
    with pytest.raises(OutputError, match=f"cannot be written \\(no way\\); .*{fix}"):
        export(run, out, "csv", force=True)
    assert out.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.csv", "log"]


def test_a_folder_that_is_missing(run: Run, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="make its folder first"):
        export(run, tmp_path / "none" / "events.csv", "csv")


def test_a_directory_is_no_file(run: Run, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is a directory"):
        export(run, tmp_path, "csv", force=True)


def test_parquet_without_pyarrow(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'commtrace\[parquet\]'"):
        export(run, tmp_path / "events.parquet", "parquet")
    assert not (tmp_path / "events.parquet").exists()
