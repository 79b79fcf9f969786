"""Stored tables of packed logs: reports use them in place of records only if both give the same results."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import damaged_logs
import pytest
import recorded_schemes
from packed_logs import pack, results

import commtrace.analyses.analysed_run
from commtrace.analyses import analyse, tables_to_store
from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.cli import main
from commtrace.reading.packed_log import PROCESSES, PartFile
from commtrace.reading.stored_tables import STORED
from commtrace.run import open_run

parquet = pytest.importorskip("pyarrow.parquet")
compute = pytest.importorskip("pyarrow.compute")

COMMANDS = ["report", "LOG", "--json"], ["report", "LOG", "--sections", "all"], ["check", "LOG"]


def all_results(packed: Path, capsys: pytest.CaptureFixture[str], *, html: bool = False) -> list[object]:
    """Return status, output and errors of the commands that read stored tables, without lines about these tables."""
    command_results: list[object] = []
    for command in COMMANDS:
        status, out, err = results([packed if word == "LOG" else word for word in command], capsys, packed)
        command_results.append((status, out, [line for line in str(err).splitlines() if STORED not in line]))
    if html:
        page = packed.parent / "page.html"
        assert main(["report", str(packed), "--html", str(page), "--force"]) == 0
        command_results.append(page.read_text(encoding="utf-8"))
    return command_results


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list that receives the part file of each row group that is read."""
    read: list[Path] = []
    records = PartFile.records

    def counted(self: PartFile, group: int) -> object:
        read.append(self.path)
        return records(self, group)

    monkeypatch.setattr(PartFile, "records", counted)
    return read


@pytest.mark.long
@pytest.mark.parametrize("scheme", recorded_schemes.LONG_AND_EXHAUSTIVE)
def test_reports_are_equal_without_stored_tables(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged_logs.unpack(tmp_path)
    packed = pack(tmp_path / scheme)
    with_tables = all_results(packed, capsys, html=True)
    (stored,) = packed.glob(f"*/{STORED}")
    stored.unlink()
    assert all_results(packed, capsys, html=True) == with_tables


def test_stored_tables_replace_records(tmp_path: Path, reads: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    damaged_logs.unpack(tmp_path)
    packed = pack(tmp_path / "ddp")
    assert main(["report", str(packed)]) == 0
    assert main(["check", str(packed)]) == 0
    assert reads == []
    run = open_run(packed)
    filtered = replace(run.log, processes=run.log.processes[1:])
    tables = analyse(AnalysedRun(filtered))
    assert reads
    assert tables["volume_by_operation"]["calls"].sum() < analyse(run)["volume_by_operation"]["calls"].sum()
    assert STORED in capsys.readouterr().err


@pytest.mark.parametrize("scheme", recorded_schemes.SCHEMES)
def test_all_analyses_are_stored(scheme: str, tmp_path: Path) -> None:
    """All analyses are stored: none has tables that storing would change."""
    damaged_logs.unpack(tmp_path)
    packed = pack(tmp_path / scheme)
    (stored,) = packed.glob(f"*/{STORED}")
    assert {*parquet.read_table(stored)["analysis"].to_pylist()} == {*dict(tables_to_store(open_run(packed)))}


def _with_other_sizes(folder: Path) -> None:
    (path,) = folder.glob("part-*")
    table = parquet.read_table(path)
    index = table.schema.get_field_index("payload_bytes")
    parquet.write_table(
        table.set_column(index, table.schema.field(index), compute.add(table["payload_bytes"], 8)), path
    )


def _with_other_tables_of_processes(folder: Path) -> None:
    table = parquet.read_table(folder / PROCESSES)
    tables = [text.replace(b'"world_size": 2', b'"world_size": 4') for text in table["tables"].to_pylist()]
    assert tables != table["tables"].to_pylist()
    index = table.schema.get_field_index("tables")
    parquet.write_table(table.set_column(index, table.schema.field(index), [tables]), folder / PROCESSES)


@pytest.mark.long
@pytest.mark.parametrize("change", [_with_other_sizes, _with_other_tables_of_processes])
def test_tables_of_other_records_do_not_count(
    change: Callable[[Path], None], tmp_path: Path, reads: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    damaged_logs.unpack(tmp_path)
    packed = pack(tmp_path / "ddp")
    (folder,) = packed.iterdir()
    before = all_results(packed, capsys)
    change(folder)
    reads.clear()
    assert main(["report", str(packed)]) == 0
    assert reads
    changed = all_results(packed, capsys)
    (folder / STORED).unlink()
    assert changed == all_results(packed, capsys)
    assert changed != before


def test_tables_of_other_code_do_not_count(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged_logs.unpack(tmp_path)
    packed = pack(tmp_path / "ddp")
    monkeypatch.setattr(commtrace.analyses.analysed_run, "code_digest", lambda: "other")
    capsys.readouterr()
    assert main(["report", str(packed)]) == 0
    (line,) = (line for line in capsys.readouterr().err.splitlines() if STORED in line)
    assert "by another version of commtrace; pack the log again" in line
    assert reads


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 12))])
def test_damaged_tables_change_no_report(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged_logs.unpack(tmp_path)
    packed = pack(tmp_path / "ddp")
    expected = all_results(packed, capsys)
    (stored,) = packed.glob(f"*/{STORED}")
    content = bytearray(stored.read_bytes())
    rng = random.Random(seed)
    if seed % 3 == 0:
        content = content[: rng.randrange(len(content))]
    elif seed % 3 == 1:
        content[-200:] = rng.randbytes(200)
    else:
        begin = rng.randrange(len(content) - 40)
        content[begin : begin + 40] = rng.randbytes(40)
    stored.write_bytes(content)
    assert all_results(packed, capsys) == expected
