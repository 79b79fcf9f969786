"""Packed logs: every command gives the results that it gives for the log."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import damaged_logs
import log_versions
import numpy as np
import processes
import pytest
import recorded_schemes
from factory import BARRIER, RUN, LogFactory, record, records, training
from packed_logs import assert_equal, pack, results

import commtrace.reading.pack
from commtrace.cli import main
from commtrace.errors import LogError
from commtrace.output_files import atomic_directory
from commtrace.reading.log import open_log
from commtrace.reading.log_notes import merge_notes
from commtrace.reading.packed_log import PROCESSES, PackedSegment, notes_to_store
from commtrace.run import open_run
from commtrace.schema import EVENT_COLUMNS, RECORD, State

parquet = pytest.importorskip("pyarrow.parquet")


@pytest.mark.long
@pytest.mark.parametrize("scheme", recorded_schemes.SCHEMES)
def test_commands_give_equal_results(scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged_logs.unpack(tmp_path)
    training(tmp_path / "other", ranks=3, steps=6)
    assert_equal(tmp_path / scheme, pack(tmp_path / scheme), tmp_path / "other", capsys)


@pytest.mark.long
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(3, 300))])
def test_damaged_logs_give_equal_results(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged_logs.unpack(tmp_path)
    if seed % 2:
        log_versions.to_version_2(tmp_path)
    rng = random.Random(seed)
    log = tmp_path / rng.choice(damaged_logs.SCHEMES)
    other = tmp_path / "other"
    training(other, ranks=3, steps=6)
    damaged_logs.damage(log, other, rng)
    if main(["report", str(log)]) == 0:
        assert_equal(log, pack(log), other, capsys)


@pytest.mark.long
def test_several_runs_and_moved_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    training(log, ranks=1)
    later = "20261122-000000-abcdef"
    training(log, ranks=3, run=later, unix_ns=1_795_300_000_000_000_000)
    shutil.copytree(log / RUN, log / "renamed")
    shutil.copy(log / RUN / "node17" / "rank00000-4711.jsonl", log / later / "node17" / "rank00007-1.jsonl")
    packed = pack(log)
    assert sorted(path.name for path in packed.iterdir()) == [f"run={RUN}", f"run={later}", "run=renamed"]
    assert_equal(log / RUN, packed / f"run={RUN}", log, capsys)
    documents = [results(["report", path, "--json"], capsys, path)[1] for path in (log, packed)]
    hint = re.compile('commtrace report [^ "]*')
    lines = [hint.sub("", str(document)).replace(str(log), "LOG").splitlines() for document in documents]
    assert lines[0] == lines[1]


def test_ranks_share_row_groups_and_segments_their_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commtrace.reading.pack, "ROW_GROUP", 8)
    monkeypatch.setattr(commtrace.reading.pack, "PART_ROWS", 40)
    log = tmp_path / "log"
    rng = np.random.default_rng(0)
    for rank in range(12):
        process = LogFactory(log).process(rank).known()
        for length in (3, 0, 11):
            rows = records(record(seq=number, state=int(rng.integers(0, 6))) for number in range(length))
            rows["phase"][rng.random(length) < 0.2] = 77
            process.write(rows)
    packed = pack(log)
    files = sorted(packed.glob("*/*.parquet"))
    assert len(files) > 1
    groups = [parquet.ParquetFile(file).metadata.row_group(0).num_rows for file in files]
    assert groups == [8] * len(files)
    segments = [
        [segment for process in open_log(path).processes for segment in process.segments] for path in (log, packed)
    ]
    for segment_of_log, segment_of_pack in zip(*segments, strict=True):
        assert isinstance(segment_of_pack, PackedSegment)
        for size in (1, 4, 100):
            for count in (0, 2, 5, 11, 100):
                pair = [segment.last(count) for segment in (segment_of_log, segment_of_pack)]
                blocks = [[*segment.blocks(size)] for segment in pair]
                assert [block.tolist() for block in blocks[0]] == [block.tolist() for block in blocks[1]]
                assert pair[0].damaged == pair[1].damaged
                assert pair[0].last_step == pair[1].last_step
        for begin in range(segment_of_log.count):
            for count in (1, 5, 100):
                pair = [segment.part(begin, count) for segment in (segment_of_log, segment_of_pack)]
                parts = [[block.tolist() for block in segment.blocks(4)] for segment in pair]
                assert parts[0] == parts[1]
                assert pair[0].damaged == pair[1].damaged
        memory = bytearray(4 * RECORD.itemsize)
        in_memory = [block.copy() for block in segment_of_pack.blocks(4, memory)]
        assert records(in_memory).tolist() == records(segment_of_log.blocks()).tolist()


def test_columns_are_those_of_the_event_table(tmp_path: Path) -> None:
    training(tmp_path / "log").process(5, host="node18").known().write(record(kind=99, group=99))
    events = open_run(tmp_path / "log").events()
    table = parquet.read_table(pack(tmp_path / "log")).to_pandas()
    for name in events:
        expected = events[name].astype(object).where(events[name].notna(), None).tolist()
        column = table[name].astype(object)
        assert column.where(column.notna(), None).tolist() == expected, name
    assert [*dict.fromkeys(table["host"])] == ["node17", "node18"]
    assert set(table["run"]) == {RUN}
    assert table["rank"].is_monotonic_increasing


def test_the_page_has_all_columns(tmp_path: Path) -> None:
    training(tmp_path / "log")
    (part,) = pack(tmp_path / "log").rglob("part-*")
    schema = parquet.read_schema(part.with_name(PROCESSES))
    (facts,) = schema.metadata.values()
    segment = schema.field("segments").type.value_type
    names = {*schema.names, *(segment.field(number).name for number in range(segment.num_fields)), *json.loads(facts)}
    names |= {*parquet.read_schema(part).names} - {*EVENT_COLUMNS}
    page = (processes.ROOT / "docs" / "reference" / "log-format.md").read_text().partition("## Packed logs")[2]
    assert not [name for name in sorted(names) if f"`{name}`" not in page]


def test_wanted_events_are_read_by_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commtrace.reading.pack, "ROW_GROUP", 4)
    training(tmp_path / "log", ranks=3, steps=20)
    packed = pack(tmp_path / "log")
    read: list[int] = []
    part_file = commtrace.reading.packed_log.PartFile
    monkeypatch.setattr(part_file, "records", _counted(part_file.records, read))
    for selection, groups in (
        ({"steps": [3, 17]}, range(3, 12)), ({"ranks": [1]}, range(8, 14)), ({"ops": ["barrier"]}, range(3, 4)),
        ({"ranks": [2], "steps": [-1], "ops": ["barrier"]}, range(1, 3)),
    ):  # fmt: skip
        read.clear()
        events = open_run(packed).events(**selection)
        assert len({*read}) in groups, selection
        assert events.equals(open_run(tmp_path / "log").events(**selection))
        assert len(events)
    assert open_run(packed).notes == ()


def _counted(function: Any, calls: list[int]) -> Any:
    def counted(self: object, group: int) -> Any:
        calls.append(group)
        return function(self, group)

    return counted


def test_one_note_says_that_kept_records_are_not_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training(tmp_path / "log", ranks=3)
    for path in (tmp_path / "log").rglob("*.00000.npy"):
        shutil.copy(path, path.with_name(path.name.replace(".00000.npy", "-kept.npy")))
    pack(tmp_path / "log")
    (line,) = capsys.readouterr().err.splitlines()
    assert "3 processes with last calls of steps that were not recorded; not packed" in line


def test_notes_keep_their_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training(tmp_path / "log", ranks=34)
    for rank, path in enumerate(sorted((tmp_path / "log").rglob("*.jsonl"))):
        path.write_bytes(path.read_bytes() + b"{" * 5 + b"\n" * (rank + 1) + b"{\n")
    notes = open_run(tmp_path / "log").notes
    packed = open_run(pack(tmp_path / "log")).notes
    assert packed == notes
    (merged,) = merge_notes(packed)
    assert merged.text.startswith("34 notes on rank 0-33: 2 lines cannot be read, the first is line ")
    shutil.rmtree(tmp_path / "packed")
    as_text = notes_to_store(notes)["notes"]
    monkeypatch.setattr(commtrace.reading.pack, "notes_to_store", lambda notes: {"notes": as_text})
    older = open_run(pack(tmp_path / "log")).notes
    assert [(note.text, note.rank) for note in older] == [(note.text, note.rank) for note in notes]


def test_the_log_does_not_change(tmp_path: Path) -> None:
    log = tmp_path / "log"
    training(log).process(0, pid=9).write(record(state=State.FREE)).write(record(kind=BARRIER), open_=True)
    before = {path: path.read_bytes() for path in log.rglob("*") if path.is_file()}
    pack(log)
    assert {path: path.read_bytes() for path in log.rglob("*") if path.is_file()} == before


def failure(arguments: Sequence[object], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error message of a command that fails."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_what_exists_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    training(log)
    packed = pack(log)
    assert "already exists; choose another name or pass --force" in failure(["pack", log, "--out", packed], capsys)
    (packed / "run=x").mkdir()
    pack(log, "--force")
    assert not (packed / "run=x").exists()
    (tmp_path / "mine").mkdir()
    assert "--force does not replace it" in failure(["pack", log, "--out", tmp_path / "mine", "--force"], capsys)
    assert "is in the log" in failure(["pack", log, "--out", log / "packed"], capsys)
    assert "is packed already" in failure(["pack", packed], capsys)
    assert "make its folder first" in failure(["pack", log, "--out", tmp_path / "none" / "packed"], capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "mine", "packed"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_half_a_packed_log_is_removed_and_the_old_one_kept(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    training(log)
    packed = pack(log)
    before = sorted(path.stat().st_mtime_ns for path in packed.rglob("*"))

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(commtrace.reading.pack, "_packed_records", fail)
    assert main(["pack", str(log), "--out", str(packed), "--force"]) == (2 if isinstance(error, OSError) else 130)
    if isinstance(error, OSError):
        assert "cannot be written (no space left on device); make room" in capsys.readouterr().err
    assert sorted(path.stat().st_mtime_ns for path in packed.rglob("*")) == before
    assert [path.name for path in packed.parent.iterdir()] == ["log"]


def test_a_worker_adds_nothing_to_a_folder_that_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Dask worker may go on writing after another one has failed."""
    folders: list[Path] = []
    rmtree = shutil.rmtree

    def remove(folder: Path, *, ignore_errors: bool) -> None:
        for written in folders:
            with pytest.raises(FileNotFoundError):
                (written / "part").write_bytes(b"")
        rmtree(folder, ignore_errors=ignore_errors)

    def fail() -> None:
        with atomic_directory(tmp_path / "out", marker="*") as folder:
            folders.append(folder)
            raise ZeroDivisionError

    monkeypatch.setattr(shutil, "rmtree", remove)
    with pytest.raises(ZeroDivisionError):
        fail()
    assert folders
    assert not [*tmp_path.iterdir()]


@pytest.mark.long
@pytest.mark.parametrize("kib", [1, 8, 200])
def test_a_full_disk(kib: int, tmp_path: Path) -> None:
    """Exceeding a file size limit is an error like a full disk: in the first rows, in later ones, or at the end."""
    rng = np.random.default_rng(0)
    rows = records([record()] * 20_000)
    for name in ("t_begin", "t_return", "t_end", "payload"):
        rows[name] = rng.integers(1, 1 << 40, len(rows))
    LogFactory(tmp_path / "log").process().known().write(rows)
    code = "import sys; from commtrace.cli import main; sys.exit(main())"
    command = f"ulimit -f {kib}; exec {sys.executable} -c '{code}' pack {tmp_path / 'log'}"
    result = processes.run(["bash", "-c", command])
    assert result.status == 2
    (line,) = result.err.splitlines()
    assert line.endswith("cannot be written (file too large); make room, or give a file on another disk")
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_damage_to_a_packed_log_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training(tmp_path / "log")
    packed = pack(tmp_path / "log")
    (part,) = packed.glob("*/*.parquet")
    content = part.read_bytes()
    part.write_bytes(content[:100])
    run = open_run(packed)
    assert [(note.kind, note.path, len(run.events())) for note in run.notes] == [("unreadable", part, 0)]
    part.write_bytes(content[:200] + bytes(2_000) + content[2_200:])
    with pytest.raises(LogError, match=r"part-00000\.parquet: cannot be read .*; pack the log again"):
        open_run(packed).events()
    part.unlink()
    assert [(note.kind, note.path) for note in open_run(packed).notes] == [("missing", part)]
    (processes,) = packed.glob("*/_processes")
    processes.write_bytes(b"PAR1")
    assert "_processes: cannot be read" in failure(["report", packed], capsys)


@pytest.mark.long
@pytest.mark.parametrize("library", ["pandas", "polars", "duckdb", "dask.dataframe"])
def test_queries_of_the_documents(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    training(tmp_path / "logs" / "run1", ranks=3)
    assert main(["pack", "logs/run1"]) == 0
    page = (processes.ROOT / "docs" / "how-to" / "pack.md").read_text(encoding="utf-8")
    (query,) = (text for text in re.findall("```python\n(.*?)```", page, re.DOTALL) if f"import {library}" in text)
    capsys.readouterr()
    exec(query, {})
    result = capsys.readouterr().out
    # In each of 3 steps a rank sends 2 * 2/3 of the 4,096 bytes of an all_reduce, and 2,048 - 682 of an all_gather.
    expected = {"pandas": 12_288, "dask.dataframe": 20_482}.get(library, 36_864)
    assert str(expected) in result.replace(",", "").replace(".0", "")
