"""Reading complete and damaged logs from disk."""

from __future__ import annotations

import builtins
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factory import ALL_REDUCE, RUN, UNIX_NS, LogFactory, open_segment, record, records, training
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commtrace.errors import LogError, NewerLogError
from commtrace.reading import process_reader
from commtrace.reading.log import Log, LogDirectory, open_log
from commtrace.reading.segment_reader import inspect_segment
from commtrace.recording.ring import RingContent
from commtrace.recording.summary_files import Snapshot
from commtrace.schema import RECORD, Records, State


def read(log: Log) -> Records:
    """Return all records of a log."""
    return records(block for process in log.processes for segment in process.segments for block in segment.blocks())


def kinds(log: Log) -> list[str]:
    """Return the kinds of the notes of a log."""
    return [note.kind for note in log.notes]


def test_a_whole_log(tmp_path: Path) -> None:
    training(tmp_path, ranks=3, steps=2)
    log = open_log(tmp_path)
    assert (log.run, log.world_size, log.notes, log.other_runs) == (RUN, 3, (), ())
    assert [(process.rank, process.pid, process.host) for process in log.processes] == [
        (0, 4711, "node17"),
        (1, 4712, "node17"),
        (2, 4713, "node17"),
    ]
    assert len(read(log)) == 3 * 5
    assert log.processes[0].tables.kinds[ALL_REDUCE].op == "all_reduce"


@pytest.mark.parametrize("below", ["", RUN, f"{RUN}/node17"])
def test_a_log_may_be_given_by_any_of_its_folders(tmp_path: Path, below: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training(tmp_path)
    assert open_log(tmp_path / below).run == RUN
    monkeypatch.chdir(tmp_path / below)
    assert open_log(Path()).run == RUN


def test_records_come_in_blocks_of_bounded_size(tmp_path: Path) -> None:
    rows = records(record(seq=number) for number in range(10))
    LogFactory(tmp_path).process().write(rows)
    (segment,) = open_log(tmp_path).processes[0].segments
    blocks = list(segment.blocks(4))
    assert [len(block) for block in blocks] == [4, 4, 2]
    assert (np.concatenate(blocks) == rows).all()


def test_open_and_recovered_segments_are_read(tmp_path: Path) -> None:
    process = LogFactory(tmp_path).process()
    process.write(record(seq=0)).write(record(seq=1), open_=True).write(record(seq=2), number="salvaged")
    log = open_log(tmp_path)
    assert sorted(read(log)["seq"]) == [0, 1, 2]
    assert log.notes == ()


def test_a_process_may_have_recovered_records_only(tmp_path: Path) -> None:
    rows = records(record(seq=number) for number in range(3))
    LogFactory(tmp_path).process().write(rows, number="salvaged").stats(calls=3)
    log = open_log(tmp_path)
    assert len(read(log)) == 3
    assert log.notes == ()


def test_a_copy_of_an_open_segment_beside_the_closed_one_is_not_counted_twice(tmp_path: Path) -> None:
    LogFactory(tmp_path).process().write([record(), record()], number=0).write(record(), number=0, open_=True)
    assert len(read(open_log(tmp_path))) == 2


def test_a_segment_that_is_closed_while_it_is_read(tmp_path: Path) -> None:
    process = LogFactory(tmp_path).process().write(record(), open_=True)
    log = open_log(tmp_path)
    (path,) = process.segments
    path.rename(path.with_suffix(""))
    assert len(read(log)) == 1


def test_a_segment_that_is_removed_while_it_is_read(tmp_path: Path) -> None:
    process = LogFactory(tmp_path).process().write(record()).write(record())
    log = open_log(tmp_path)
    process.segments[0].unlink()
    assert len(read(log)) == 1


def test_slots_that_were_never_filled_are_left_out(tmp_path: Path) -> None:
    LogFactory(tmp_path).process().write([record(), record(state=State.FREE), record()])
    assert len(read(open_log(tmp_path))) == 2


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("open_", [False, True])
def test_a_segment_cut_at_any_byte(tmp_path: Path, open_: bool, stride: int) -> None:
    rows = records(record(seq=number) for number in range(3))
    process = LogFactory(tmp_path).process().write(rows, open_=open_)
    (path,) = process.segments
    content = path.read_bytes()
    header = len(content) - rows.nbytes
    for length in {*range(0, len(content), stride), *range(header, len(content), RECORD.itemsize)}:
        path.write_bytes(content[:length])
        log = open_log(tmp_path)
        complete, rest = divmod(max(length - header, 0), RECORD.itemsize)
        assert (read(log) == rows[:complete]).all()
        nothing_missing = open_ and length >= header and rest == 0
        assert kinds(log) == ([] if nothing_missing else ["cut"]), length


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_tables_file_cut_at_any_byte(tmp_path: Path, stride: int) -> None:
    log = training(tmp_path, ranks=1, steps=1)
    (path,) = (log.directory / RUN / "node17").glob("*.jsonl")
    content = path.read_bytes()
    for length in range(0, len(content), stride):
        path.write_bytes(content[:length])
        opened = open_log(tmp_path)
        assert len(read(opened)) == 3
        assert (opened.processes[0].rank, opened.processes[0].pid, opened.run) == (0, 4711, RUN)
        # A cut at the end of a line loses nothing; a cut within a line loses that line, and a note says so.
        assert kinds(opened) == (
            [] if content[length - 1 : length] in (b"\n", b"}", b"") and _parses(content[:length]) else ["cut"]
        )


def _parses(data: bytes) -> bool:
    try:
        return all(isinstance(json.loads(line), dict) for line in data.splitlines())
    except ValueError:
        return False


@given(garbage=st.binary(max_size=300))
def test_garbage_in_a_segment(tmp_path_factory: pytest.TempPathFactory, garbage: bytes) -> None:
    tmp_path = tmp_path_factory.mktemp("garbage")
    process = LogFactory(tmp_path).process().write(record())
    (process.folder / f"{process.stem}.00001.npy").write_bytes(garbage)
    log = open_log(tmp_path)
    assert len(read(log)) == 1
    assert kinds(log) in (["foreign"], ["cut"])
    shutil.rmtree(tmp_path)


TABLES = ["kinds", "groups", "roles", "sites", "job", "stats", "end", "clock", "process", "new"]

VALUES = st.one_of(st.none(), st.integers(), st.floats(), st.sampled_from(["", "x", [], [[]], {}, [1, -1], 1e400]))

KEYS = ("id", "op", "ranks", "index", "file", "line", "role", "group", "run", "rank", "format", "version", "unix_ns")

ROWS = st.fixed_dictionaries({"table": st.sampled_from(TABLES)}, optional=dict.fromkeys(KEYS, VALUES))


@settings(deadline=None)
@given(row=ROWS)
def test_garbage_in_a_row(tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any]) -> None:
    check_with_line(tmp_path_factory.mktemp("garbage"), json.dumps(row).encode())


@settings(deadline=None)
@given(line=st.binary(max_size=40))
@example(line=b"[" * 100_000)
@example(line=b'"table"')
@example(line=b'{"table": [1]}')
@example(line=b"9" * 10_000)
def test_garbage_in_a_tables_file(tmp_path_factory: pytest.TempPathFactory, line: bytes) -> None:
    check_with_line(tmp_path_factory.mktemp("garbage"), line)


def check_with_line(directory: Path, line: bytes) -> None:
    """Assert that a log with this line in its tables can be read."""
    process = LogFactory(directory).process().known()
    with open(process.tables, "ab") as file:
        file.write(line + b"\n")
    process.write(record())
    log = open_log(directory)
    assert len(read(log)) == 1
    assert len(log.processes[0].tables.kinds) >= 6
    shutil.rmtree(directory)


def test_foreign_files_are_left_out_and_named(tmp_path: Path) -> None:
    process = LogFactory(tmp_path).process().write(record())
    np.save(process.folder / f"{process.stem}.00001.npy", np.zeros(4))
    np.save(process.folder / "weights.npy", np.zeros(4))
    (process.folder / "notes.txt").write_text("mine")
    for name in ("rank00001-4712.jsonl", "pipe.txt"):  # a pipe has no end: to open it would take forever
        os.mkfifo(process.folder / name)
    log = open_log(tmp_path)
    assert len(read(log)) == 1
    assert sorted((note.kind, note.path.name) for note in log.notes) == [
        ("foreign", "rank00000-4711.00001.npy"),
        ("foreign", "rank00001-4712.jsonl"),
        ("foreign", "weights.npy"),
    ]


def test_a_log_that_is_removed_while_it_is_read(tmp_path: Path) -> None:
    LogFactory(tmp_path).process().write(record())
    directory = LogDirectory(tmp_path, recover=False)
    (folder,) = directory.folders
    shutil.rmtree(tmp_path)
    with pytest.raises(LogError, match="its files were removed while the log was read"):
        directory.read(folder)


def test_a_missing_tables_file(tmp_path: Path) -> None:
    process = LogFactory(tmp_path).process(3).write(record())
    process.tables.unlink()
    log = open_log(tmp_path)
    assert (log.run, log.processes[0].rank, log.processes[0].pid, log.world_size) == (RUN, 3, 4711, None)
    assert kinds(log) == ["missing"]


def test_missing_segments(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    log.process(0).write(record(), number=0).write(record(), number=3)
    log.process(1).stats(calls=7)
    log.process(2).write(record(), number=2).stats(removed=1000)  # the oldest were removed, which is no damage
    opened = open_log(tmp_path)
    assert [note.what for note in opened.notes] == [
        "segments 1 to 2 are missing",
        "no segments, though 7 calls were counted",
    ]


def test_a_later_row_replaces_an_earlier_one(tmp_path: Path) -> None:
    process = LogFactory(tmp_path).process().known()
    process.add("kinds", id=ALL_REDUCE, op="broadcast", variant="v", api="mpi", dtype="int8", reduce_op=None)
    process.stats(calls=1).stats(calls=2)
    tables = open_log(tmp_path).processes[0].tables
    assert tables.kinds[ALL_REDUCE].op == "broadcast"
    assert (tables.stats or {})["calls"] == 2


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogFactory(tmp_path)
    denied = log.process(0).write(record()).segments[0]
    log.process(1).write(record())
    real = builtins.open

    def deny(path: Any, *arguments: Any, **options: Any) -> Any:
        if Path(path) == denied:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(builtins, "open", deny)
    opened = open_log(tmp_path)
    assert [(note.kind, note.path, note.what) for note in opened.notes] == [("unreadable", denied, "permission denied")]
    assert len(read(opened)) == 1


# --- no log, newer log, several runs --------------------------------------------------------------------------------


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    LogFactory(tmp_path).process(version=99).write(record())
    with pytest.raises(NewerLogError, match=r"rank00000-4711\.jsonl.*version 99.*up to 2; upgrade commtrace"):
        open_log(tmp_path)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"none: no such directory; pass the directory that COMMTRACE was set to"):
        open_log(tmp_path / "none")


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match="file: not a directory"):
        open_log(tmp_path / "file")


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no log in it; run the program with COMMTRACE="):
        open_log(tmp_path)


def test_a_directory_above_the_log_says_where_it_is(tmp_path: Path) -> None:
    training(tmp_path / "logs" / "run1")
    with pytest.raises(LogError, match=r"no log in it, but in .*logs/run1; give that directory"):
        open_log(tmp_path / "logs")


@pytest.mark.parametrize("denied", ["", RUN, f"{RUN}/node17"])
def test_a_folder_that_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied: str) -> None:
    training(tmp_path)
    real = os.scandir

    def deny(path: Any) -> Any:
        if Path(path) == tmp_path / denied:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", deny)
    with pytest.raises(LogError, match="ask its owner for read permission"):
        open_log(tmp_path)


def test_of_several_runs_the_newest_is_shown_and_the_others_are_named(tmp_path: Path) -> None:
    training(tmp_path, run="z-older", unix_ns=UNIX_NS)
    training(tmp_path, run="a-newer", unix_ns=UNIX_NS + 1, steps=1)
    log = open_log(tmp_path)
    assert (log.run, log.other_runs) == ("a-newer", ("z-older",))
    assert len(read(log)) == 2 * 3
    (note,) = log.notes
    assert note.kind == "runs"
    assert note.consequence == f"to see another: commtrace report {tmp_path / 'z-older'}"
    assert open_log(tmp_path / "z-older").run == "z-older"


def test_files_of_another_run_in_the_same_folder_are_not_mixed_in(tmp_path: Path) -> None:
    training(tmp_path, ranks=1)
    LogFactory(tmp_path).process(5, pid=1, run="stranger", unix_ns=UNIX_NS + 1).write(record())
    log = open_log(tmp_path)
    assert (log.run, log.other_runs, len(log.processes)) == (RUN, ("stranger",), 1)


def test_two_processes_of_one_rank_are_counted_and_named(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    log.process(0, pid=1).write(record())
    log.process(0, pid=2).write(record())
    opened = open_log(tmp_path)
    assert len(read(opened)) == 2
    assert [note.what for note in opened.notes] == ["rank 0 has more than one process (process ids 1 and 2)"]


def test_processes_that_disagree_on_the_number_of_ranks(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    log.process(0, world_size=2).write(record())
    log.process(1, world_size=4).write(record())
    assert kinds(open_log(tmp_path)) == ["process"]
    assert open_log(tmp_path).world_size == 4


def test_a_header_that_promises_less_than_is_there(tmp_path: Path) -> None:
    process = LogFactory(tmp_path).process().write(record())
    process.segments[0].write_bytes(open_segment(records([record(), record()])))
    log = open_log(tmp_path)
    assert len(read(log)) == 2
    assert kinds(log) == ["cut"]


def test_bytes_after_the_last_record_are_not_a_missing_record(tmp_path: Path) -> None:
    process = LogFactory(tmp_path).process().write(record())
    with open(process.segments[0], "ab") as file:
        file.write(b"x" * 7)
    log = open_log(tmp_path)
    assert len(read(log)) == 1
    assert [(note.kind, note.text, note.consequence) for note in log.notes] == [
        ("garbled", "7 bytes follow the last record", "they are left out")
    ]


def test_rows_of_a_dry_run_have_no_times(tmp_path: Path) -> None:
    LogFactory(tmp_path).process(0).add("leaving", step=3, status=None, exception=None).write(record())
    log = open_log(tmp_path)
    leaving = log.processes[0].tables.leaving
    assert leaving is not None
    assert (leaving["mono_ns"], leaving["step"]) == (None, 3)
    assert not [note for note in log.notes if "cannot be read" in note.text]


def test_records_that_were_written_after_a_ring_was_copied(tmp_path: Path) -> None:
    """A reading may take long, and its process goes on: however many records followed, none is counted twice."""
    capacity = 64
    copied = np.zeros(10, RECORD)
    copied["t_begin"], copied["state"] = range(1000, 1010), State.COMPLETE
    later = np.zeros(20 * capacity, RECORD)
    later["t_begin"], later["state"] = range(2000, 2000 + len(later)), State.COMPLETE
    np.save(tmp_path / "rank00000-7.00000.npy", np.concatenate([copied[:9], later]))
    segment, _ = inspect_segment(tmp_path / "rank00000-7.00000.npy")
    assert segment is not None
    ring = RingContent(
        tmp_path, 0, {"capacity": capacity}, {}, copied, b"", copied[:0], 0, Snapshot(0, {}, {}), is_alive=True
    )
    (left,) = process_reader._memory_segment(tmp_path, [segment], ring).blocks()
    assert left["t_begin"].tolist() == [1009]
