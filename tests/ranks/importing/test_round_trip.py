"""A run that commtrace and torch.profiler record at once: the import of the traces equals the log, call by call."""

from __future__ import annotations

import sys
from pathlib import Path

import processes
import pytest

pytest.importorskip("torch")

import commtrace
from commtrace.importing.import_run import import_files

PROGRAM = Path(__file__).parents[2] / "support" / "hook_programs" / "profiled.py"

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_import_equals_the_log(kind: str, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (tmp_path / "traces").mkdir()
    result = processes.run([*launch, PROGRAM, kind, tmp_path / "traces"], limit=240, COMMTRACE=tmp_path / "log")
    assert result.status == 0, result.err
    import_files([tmp_path / "traces"], tmp_path / "imported")
    for rank in range(2):
        log, imported = (commtrace.open(tmp_path / name).events(ranks=[rank]) for name in ("log", "imported"))
        assert imported["op"].tolist() == log["op"].tolist()
        assert imported["seq"].tolist() == log["seq"].tolist()
        assert imported["group_ranks"].tolist() == log["group_ranks"].tolist()
        known = imported["payload_bytes"].notna().to_numpy()
        # The trace does not have the sizes of a list of lists of tensors: DDP compares its model with one at the start.
        assert log.loc[~known, "variant"].tolist() == (["allgather_"] if kind == "ddp" else [])
        assert imported.loc[known, "payload_bytes"].tolist() == log.loc[known, "payload_bytes"].tolist()
        assert imported.loc[known, "wire_bytes"].tolist() == log.loc[known, "wire_bytes"].tolist()
