"""Logs in version 1 of the format: reports equal those of the same log in version 2, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import damaged_logs
import log_versions
import pytest
import recorded_schemes

from commtrace.cli import main
from commtrace.reading.log import open_log
from commtrace.schema import VERSION


@pytest.mark.long
@pytest.mark.parametrize("scheme", recorded_schemes.SCHEMES)
def test_reports_of_both_versions_are_equal(scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged_logs.unpack(tmp_path)
    log, documents = tmp_path / scheme, []
    for version in (1, 2):
        assert {process.tables.process["version"] for process in open_log(log).processes} == {version}
        groups = [row["ranks"] for row in _rows(log) if row["table"] == "groups"]
        assert {type(ranks) for ranks in groups} == {list if version == 1 else str}
        texts = []
        for arguments in (["report", str(log), "--json"], ["report", str(log), "--sections", "all"]):
            assert main(arguments) == 0
            texts.append(capsys.readouterr().out)
        assert main(["export", str(log), "--out", str(tmp_path / f"{version}.csv")]) == 0
        documents.append((texts, (tmp_path / f"{version}.csv").read_bytes()))
        capsys.readouterr()
        if version == 1:
            log_versions.to_version_2(log)
    assert VERSION == 2
    assert documents[0] == documents[1]


def _rows(log: Path) -> list[dict[str, object]]:
    return [json.loads(line) for path in log.rglob("*.jsonl") for line in path.read_text().splitlines()]


def test_ranks_of_different_versions_share_groups(tmp_path: Path) -> None:
    damaged_logs.unpack(tmp_path)
    log = tmp_path / "ddp"
    file_of_rank_0, file_of_rank_1 = sorted(log.rglob("*.jsonl"))
    text = file_of_rank_1.read_text()
    log_versions.to_version_2(log)
    file_of_rank_1.write_text(text)
    processes = open_log(log).processes
    assert [process.tables.process["version"] for process in processes] == [2, 1], file_of_rank_0
    first, second = (set(process.tables.groups.values()) for process in processes)
    assert {group for group in first if len(group.ranks) > 1} & second
