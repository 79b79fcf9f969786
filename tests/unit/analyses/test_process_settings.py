"""How processes were set up: the tables of the section, ranks that differ, and settings that runs do not share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from factory import ALONE, WORLD, LogFactory, record, training

from commtrace.analyses.compare.recorded_calls import read_calls
from commtrace.analyses.compare.two_runs import compare_calls
from commtrace.analyses.log_section import LOG_SECTION
from commtrace.analyses.scaling import scaling
from commtrace.analyses.scaling.findings import sentences
from commtrace.analyses.setup_section import SECTION
from commtrace.run import open_run

NCCL = {"name": "NCCL", "file": "/opt/a/libnccl.so.2", "version": "2.27.3", "build": "aa"}
OLD_NCCL = {"name": "NCCL", "file": "/opt/b/libnccl.so.2", "version": "2.21.5", "build": "bb"}
SETUP: dict[str, Any] = {"libraries": [NCCL], "threads": 1, "processor": "EPYC"}


def write(
    folder: Path, ranks: int = 4, *, host: str = "node1", first: int = 0, setup: dict[str, Any] | None = SETUP,
    of_rank: dict[int, dict[str, Any]] | None = None, **process: Any,
) -> Path:  # fmt: skip
    """Write a log of so many ranks. `of_rank` has what differs in the rows of a rank."""
    log = LogFactory(folder)
    for rank in range(first, first + ranks):
        own = {"environment": {"NCCL_ALGO": "Ring"}, "cores": "0-7", **process, **(of_rank or {}).get(rank, {})}
        own_setup = own.pop("setup", setup)
        tables = log.process(rank, host=host, world_size=4, local_rank=rank - first, **own)
        if own_setup is not None:
            tables.add("setup", **own_setup)
        tables.known({WORLD: [*range(4)], ALONE: [rank]}).write([record()]).stats().end()
    return folder


def findings(path: Path) -> list[str]:
    return [*SECTION.findings(open_run(path).tables())]


def differences(a: Path, b: Path) -> list[tuple[str, ...]]:
    settings = compare_calls(*(read_calls(open_run(path)) for path in (a, b))).settings
    return [tuple(row) for row in settings.itertuples(index=False)]


def test_equal_ranks_share_a_row_and_nothing_is_found(tmp_path: Path) -> None:
    table = open_run(write(tmp_path)).table("setup")
    assert {*table["ranks"]} == {"0-3"}
    assert not table["deviates"].any()
    values = dict(zip(table["name"], table["value"], strict=True))
    assert values["library NCCL"] == "2.27.3 (/opt/a/libnccl.so.2)"
    assert values["cores"] == "0-7 (8)"
    assert findings(tmp_path) == []


def test_a_rank_that_differs_is_named_with_all_that_differs(tmp_path: Path) -> None:
    other = {
        "environment": {"NCCL_ALGO": "Tree"},
        "cores": "0-3",
        "setup": {**SETUP, "libraries": [OLD_NCCL], "threads": 4},
    }
    (text,) = findings(write(tmp_path, of_rank={3: other}))
    assert text == (
        "Rank 3 is set up differently from the others. NCCL_ALGO: Tree, the others: Ring; library NCCL: 2.21.5 "
        "(/opt/b/libnccl.so.2), the others: 2.27.3 (/opt/a/libnccl.so.2); cores: 0-3 (4), the others: 0-7 (8)."
    )


def test_halves_that_differ(tmp_path: Path) -> None:
    tree = {"environment": {"NCCL_ALGO": "Tree"}}
    (text,) = findings(write(tmp_path, of_rank={2: tree, 3: tree}))
    assert text == "Ranks are set up differently: NCCL_ALGO: Ring on ranks 0-1; Tree on ranks 2-3."


@pytest.mark.long
@pytest.mark.parametrize(
    "values",
    [
        [{"CUDA_VISIBLE_DEVICES": str(rank // 2)} for rank in range(4)],
        [{"NCCL_IB_HCA": f"mlx5_{rank}"} for rank in range(4)],
        [{"NCCL_TOPO_FILE": f"/tmp/{rank // 2}.xml"} for rank in range(4)],
        [{"MASTER_PORT": str(4000 + rank // 2)} for rank in range(4)],
        [{"NCCL_TOKEN": None}, {"NCCL_TOKEN": None}, {"NCCL_TOKEN": None}, {"NCCL_TOKEN": None}],
    ],
)
def test_what_each_rank_has_for_itself_is_no_finding(tmp_path: Path, values: list[dict[str, str | None]]) -> None:
    of_rank = {rank: {"environment": environment} for rank, environment in enumerate(values)}
    assert findings(write(tmp_path, of_rank=of_rank)) == []


def test_cores_of_each_local_rank_are_no_finding(tmp_path: Path) -> None:
    for number, host in enumerate(("node1", "node2")):
        own = {2 * number: {"cores": "0-3"}, 2 * number + 1: {"cores": "4-5"}}
        write(tmp_path, 2, host=host, first=2 * number, of_rank=own)
    assert findings(tmp_path) == []


def test_a_report_says_why_the_slower_recorder_was_used(tmp_path: Path) -> None:
    slower = {"slower_recorder": {"torch": "it is not built", "mpi4py": "no call of it was made"}}
    run = open_run(write(tmp_path, of_rank={1: {"setup": {**SETUP, **slower}}}))
    assert [text for text in LOG_SECTION.warnings(run, run.tables()) if "recorder" in text] == [
        "Calls of torch on rank 1 were recorded by the Python recorder, which costs far more per call than the native "
        "one and observes fewer ends: it is not built."
    ]


def test_a_report_says_how_many_calls_could_not_be_timed_on_their_device(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    for rank, untimed in enumerate((0, 7, 3)):
        log.process(rank, world_size=3).known({WORLD: [0, 1, 2]}).write([record()]).stats(untimed=untimed)
    run = open_run(tmp_path)
    (text,) = (text for text in LOG_SECTION.warnings(run, run.tables()) if "DEVICE_TIMES" in text)
    assert "10 calls on a device could not be timed" in text


def test_times_to_create_groups(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    for rank, ns in enumerate((5_000_000, 7_000_000)):
        process = log.process(rank, local_rank=rank).add("setup", **SETUP)
        process.add("groups", id=WORLD, ranks=[0, 1], name="0", desc="", index=0, backend="nccl", create_ns=ns)
        process.add("groups", id=ALONE, ranks=[rank], name="1", desc="", index=0, backend="gloo").add(
            "roles", group=WORLD, role="data", source="test"
        ).write([record()]).stats().end()
    rows = open_run(tmp_path).table("communicators").astype(object)
    rows = rows.where(rows.notna(), None)
    assert rows.to_numpy().tolist() == [
        ["data", "nccl", 2, 1, "0-1", 5_000_000, 7_000_000, 1],
        ["unknown", "gloo", 1, 2, "0-1", None, None, None],
    ]


def test_diff_names_what_differs_with_its_ranks(tmp_path: Path) -> None:
    a = write(tmp_path / "a")
    b = write(
        tmp_path / "b", setup={**SETUP, "libraries": [OLD_NCCL]}, of_rank={2: {"environment": {"NCCL_ALGO": "Tree"}}}
    )
    assert differences(a, a) == []
    assert differences(a, b) == [
        ("NCCL_ALGO", "Ring", "Tree", "2", "times"),
        ("library NCCL", "2.27.3 (/opt/a/libnccl.so.2)", "2.21.5 (/opt/b/libnccl.so.2)", "", "times"),
    ]


def test_diff_leaves_out_what_follows_from_another_setting(tmp_path: Path) -> None:
    a = write(tmp_path / "a", environment={"OMP_NUM_THREADS": "1"})
    b = write(tmp_path / "b", environment={"OMP_NUM_THREADS": "8"}, setup={**SETUP, "threads": 8})
    c = write(tmp_path / "c", environment={"OMP_NUM_THREADS": "1"}, setup={**SETUP, "threads": 8})
    assert [row[:3] for row in differences(a, b)] == [("OMP_NUM_THREADS", "1", "8")]
    assert [row[:3] for row in differences(a, c)] == [("threads of torch", "1", "8")]


def test_versions_can_explain_calls_and_come_first(tmp_path: Path) -> None:
    a = write(tmp_path / "a", versions={"torch": "2.8"})
    b = write(tmp_path / "b", versions={"torch": "2.9"}, environment={"NCCL_ALGO": "Tree"})
    assert [(row[0], row[4]) for row in differences(a, b)] == [("version torch", "calls"), ("NCCL_ALGO", "times")]


def test_what_older_logs_lack_is_not_compared(tmp_path: Path) -> None:
    old = write(tmp_path / "old", setup=None)
    new = write(tmp_path / "new", environment={"NCCL_ALGO": "Ring", "UCX_TLS": "tcp"})
    assert differences(old, new) == []
    changed = write(tmp_path / "changed", environment={"UCX_TLS": "tcp"})
    assert [row[:3] for row in differences(old, changed)] == [("NCCL_ALGO", "Ring", "-")]


@pytest.mark.long
@pytest.mark.parametrize(
    "setup",
    [
        {"libraries": 7}, {"libraries": [{}]}, {"interfaces": [{"name": "x"}]}, {"limits": {"cpus": "many"}},
        {"limits": {"memory_bytes": None}}, {"numa_nodes": [1]}, {"gpus": [1]}, {"drivers": "x"}, {"rdma_ports": 1.5},
        {"groups_created": {}}, {"threads": [1]},
    ],
)  # fmt: skip
def test_damaged_rows_are_left_out(tmp_path: Path, setup: dict[str, Any]) -> None:
    path = write(tmp_path, setup=setup)
    assert "NCCL_ALGO" in {*open_run(path).table("setup")["name"]}
    assert findings(path) == []


def test_scaling_names_settings_that_differ_apart_from_the_size(tmp_path: Path) -> None:
    runs = {}
    for ranks, algorithm, cores in ((2, "Ring", "0-7"), (4, "Tree", "0-15")):
        training(tmp_path / str(ranks), ranks=ranks)
        for path in (tmp_path / str(ranks)).rglob("*.jsonl"):
            lines = path.read_text().splitlines()
            facts = f'"environment": {{"NCCL_ALGO": "{algorithm}"}}, "cores": "{cores}", '
            lines[0] = lines[0].replace('"format"', f'{facts}"format"')
            path.write_text("\n".join([lines[0], '{"table": "setup", "processor": "EPYC"}', *lines[1:]]) + "\n")
        runs[str(ranks)] = open_run(tmp_path / str(ranks))
    tables = scaling(runs)
    rows = tables["scaling_settings"].to_numpy().tolist()
    assert rows == [["NCCL_ALGO", "2", "Ring"], ["NCCL_ALGO", "4", "Tree"]]
    assert "The runs differ in more than their size: NCCL_ALGO: Ring (2); Tree (4)." in sentences(tables)
