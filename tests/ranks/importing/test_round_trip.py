"""A run that commtrace and other tools record at once: the imports of their files equal the log, call by call."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pandas as pd
import processes
import pytest

pytest.importorskip("torch")

import commtrace
from commtrace.importing.import_run import import_files

PROGRAMS = Path(__file__).parents[2] / "support" / "hook_programs"
SAME = ["op", "group_ranks", "payload_bytes", "wire_bytes", "peer", "tag"]

pytestmark = pytest.mark.exhaustive


def calls(log: Path, rank: int) -> pd.DataFrame:
    return commtrace.open(log).events(ranks=[rank]).astype({"op": str, "group_ranks": str})


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        pytest.param("purposes.py", (), id="ddp, fsdp, tensor, pipeline, ring attention, experts, checkpoints"),
        pytest.param("train.py", ("0", "ddp", "fsdp2", "1", "3"), id="ddp, fsdp, zero-1, zero-3"),
    ],
)
def test_the_imports_equal_the_log(program: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    if "3" in arguments:
        pytest.importorskip("deepspeed")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name in ("traces", "dumps", "told"):
        (tmp_path / name).mkdir()
    # torchtitan's stand-in is beside the program.
    path = os.pathsep.join([str(PROGRAMS), os.environ.get("PYTHONPATH", "")])
    result = processes.run(
        [*launch, PROGRAMS / "profiled.py", tmp_path / "traces", tmp_path / "dumps", PROGRAMS / program,
         tmp_path / "told", *arguments],
        limit=280, COMMTRACE=tmp_path / "log", PYTHONPATH=path,
    )  # fmt: skip
    assert result.status == 0, result.err
    import_files([tmp_path / "traces"], tmp_path / "from traces")
    import_files([tmp_path / "dumps"], tmp_path / "from dumps")
    for rank in range(2):
        log, traced = (calls(tmp_path / name, rank) for name in ("log", "from traces"))
        # gloo's calls do not state their group in a trace: groups with equal ranks, as of DeepSpeed, are one.
        same = [*SAME, *(["seq"] if log["group"].nunique() == 1 else [])]
        pd.testing.assert_frame_equal(traced[same], log[same], check_dtype=False)
        # Dumps of gloo have no messages, and the operation that carries out a reduce_scatter.
        collectives = log[~log["op"].isin(["send", "recv"])].reset_index(drop=True)
        dumped = calls(tmp_path / "from dumps", rank)
        assert dumped["op"].tolist() == collectives["op"].replace("reduce_scatter", "all_reduce").tolist()
        assert dumped["group_ranks"].tolist() == collectives["group_ranks"].tolist()
        known = dumped["payload_bytes"].notna()
        assert dumped[known]["payload_bytes"].tolist() == collectives[known]["payload_bytes"].tolist()
        assert {*collectives[~known]["variant"]} <= {"allgather_into_tensor_coalesced_"}


def test_latencies_of_comms_logger_are_those_of_the_calls(tmp_path: Path) -> None:
    """Its timer surrounds each call, and states the sum of all before: undone, but for an operation's first call."""
    pytest.importorskip("deepspeed")
    raw = tmp_path / "raw"
    raw.mkdir()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = processes.run([*launch, PROGRAMS / "comms_logged.py", raw], limit=280, COMMTRACE=tmp_path / "log")
    assert result.status == 0, result.err
    import_files([raw], tmp_path / "imported")
    recorded = commtrace.open(tmp_path / "log").events()
    later = recorded[recorded.groupby(["rank", "op"], observed=True).cumcount() > 0].query("op != 'barrier'")
    took = (later["t_end_ns"] - later["t_begin_ns"]).groupby(later["op"].astype(str)).agg(["size", "sum", "median"])
    imported = commtrace.open(tmp_path / "imported").table("host_time").set_index("op")
    table = took.join(imported[["calls_known", "sum_ns", "p50_ns"]])
    # On a quiet machine the two agree within some percent. Here: a call is inside its latency.
    print(table.assign(ratio=table["p50_ns"] / table["median"]).to_string())
    assert set(took.index) == {"all_gather", "all_reduce", "all_to_all", "broadcast"} == set(imported.index)
    assert table["calls_known"].tolist() == table["size"].tolist()
    assert (table["sum_ns"] >= table["sum"]).all()
    # The last sum, taken for a latency, as it stands in the raw data.
    last = [json.loads(path.read_text())["all_reduce"][str(4 << 22)][1][-1] for path in sorted(raw.iterdir())]
    assert sum(last) * 1e6 >= table.loc["all_reduce", "sum_ns"]
