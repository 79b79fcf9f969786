"""`commtrace bench`: the command, its tables and its file, with real ranks of gloo and MPI."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import mpi_launch
import processes
import pytest
from networks import ideal, results, row

from commtrace.cli import main
from commtrace.network import NetworkError
from commtrace.network.bench_operations import BENCH_OPERATIONS, COLLECTIVES, POINT_TO_POINT
from commtrace.network.bench_plan import BenchPlan
from commtrace.network.bench_ranks import connect
from commtrace.network.bench_results import BenchResults, read_results, write_results
from commtrace.network.bench_text import results_lines

BENCH = "import sys; from commtrace.cli import main; sys.exit(main())"


def measured() -> BenchResults:
    return results([*ideal("all_reduce", 4), *ideal("send_recv", 2), *ideal("send_recv_window", 2)])


# ---- the file --------------------------------------------------------------------------------------------------------


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    path, again = tmp_path / "network.json", tmp_path / "again.json"
    write_results(measured(), path)
    loaded = read_results(path)
    assert [row.avg_us for row in loaded.rows] == pytest.approx([row.avg_us for row in measured().rows], rel=1e-5)
    write_results(loaded, again)
    assert read_results(again) == loaded
    document = json.loads(path.read_text())
    assert (document["format"], document["version"]) == ("commtrace-network", 1)
    assert document["fits"][0]["pieces"][0]["alpha_us"] == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "an object of keys and values"),
        ("{}", "its format is not 'commtrace-network'"),
        ('{"format": "commtrace-network", "version": 9}', "this commtrace reads 1"),
        ('{"format": "commtrace-network", "version": 1}', "damaged"),
        ('{"format": "commtrace-network", "version": 1, "rows": [{"op": "all_reduce"}]}', "damaged"),
        (None, "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_said(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(NetworkError, match=re.escape(message)) as error:
        read_results(path)
    assert str(error.value).startswith(str(path))


# ---- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("form", ["auto", "nccl", "osu"])
def test_no_line_is_too_long(form: str, width: int) -> None:
    assert max(map(len, results_lines(measured(), form, width))) <= width


def test_a_table_as_nccl_tests_prints_it() -> None:
    nccl_results = results([row(ranks=4, payload_bytes=1 << 20, us=100.0, wrong=3), row(ranks=4, us=10.0)])
    lines = [*results_lines(nccl_results)]
    assert any("WRONG: 3 elements" in line for line in lines)
    cells = next(line.split() for line in lines if line.split()[:1] == ["1048576"])
    assert cells == ["1048576", "262144", "float", "sum", "-1", "100.00", "10.49", "15.73", "3"]
    wide = next(line.split() for line in results_lines(nccl_results, width=160) if line.split()[:1] == ["1048576"])
    assert wide[:9] == cells
    assert wide[9:14] == ["100.00", "100.00", "100.00", "10", "10"]


def test_a_table_as_osu_prints_it() -> None:
    means = {"rank_avg_us": 12.0, "rank_min_us": 10.0, "rank_max_us": 15.0}
    lines = [*results_lines(results([row(payload_bytes=1024, **means)]), "osu")]
    assert ["1024", "12.00", "10.00", "15.00", "100"] in [line.split() for line in lines]
    pair = [*results_lines(results([row(op="send_recv_window", payload_bytes=1 << 20, us=500.0)]))]
    assert ["1048576", "2097.15"] in [line.split() for line in pair]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_kept_results_are_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "network.json"
    write_results(measured(), path)
    assert main(["bench", "--show", str(path), "--width", "100"]) == 0
    out = capsys.readouterr().out
    assert out == "\n".join(results_lines(read_results(path), width=100)) + "\n"
    assert "held-out error: median 0.0 %" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --nproc 2"),
        (["--nproc", "1"], "there is only one rank: nothing to measure"),
        (["--nproc", "2", "--operations", "allreduce"], "no operation allreduce"),
        (["--nproc", "2", "--group-sizes", "4"], "a group of 4 among 2 ranks"),
        (["--nproc", "2", "--min-bytes", "1m", "--max-bytes", "64k"], "is more than"),
    ],
)
def test_wrong_plans_are_said_before_anything_starts(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert main(["bench", "--out", str(tmp_path / "network.json"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_results_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "network.json"
    path.write_text("precious")
    assert main(["bench", "--nproc", "2", "--out", str(path)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    "arguments",
    [["--max-bytes", "2"], ["--max-bytes", "1x"], ["--seconds", "0"], ["--nproc", "0"], ["--group-sizes", "2,x"]],
)
def test_wrong_numbers(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments])
    assert exit_.value.code == 2
    assert f"{arguments[1].rpartition(',')[2]!r} is not a" in capsys.readouterr().err


# ---- real ranks ------------------------------------------------------------------------------------------------------


def bench(*arguments: object, **variables: Any) -> processes.Result:
    return processes.run([sys.executable, "-c", BENCH, "bench", *map(str, arguments)], limit=60, **variables)


@pytest.mark.long
def test_two_ranks_of_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "network.json"
    done = bench("--nproc", 2, "--seconds", 0.001, "--max-bytes", 32, "--out", path, "--width", 80)
    assert done.status == 0, done.err
    loaded = read_results(path)
    assert {entry.op for entry in loaded.rows} == set(BENCH_OPERATIONS)
    assert [entry.wrong for entry in loaded.rows] == [0] * len(loaded.rows)
    for op in (*COLLECTIVES, *POINT_TO_POINT):
        rows = [entry for entry in loaded.rows if entry.op == op]
        first = 2 if op not in SHARED else 3
        assert [entry.payload_bytes for entry in rows] == [1 << exponent for exponent in range(first, 6)], op
        assert all(0 < entry.min_us <= entry.median_us <= entry.max_us for entry in rows)
        assert all((entry.ranks, entry.hosts) == (2, 1) for entry in rows)
    assert loaded.hosts[0]["ranks"] == 2
    assert loaded.versions["torch"]
    *tables, last = done.out.splitlines()
    assert max(map(len, tables)) <= 80
    assert last == f"results in {path}"  # its length depends on the path


SHARED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


@pytest.mark.long
def test_three_ranks_of_mpi4py_and_a_group_of_two(tmp_path: Path) -> None:
    mpi_launch.needs("mpich")
    path = tmp_path / "network.json"
    operations = (
        "all_reduce,reduce_scatter,send_recv,send_recv_window,broadcast,gather,scatter,all_to_all,reduce,barrier"
    )
    options = ["--through", "mpi4py", "--seconds", 0.002, "--max-bytes", 64, "--operations", operations]
    program = tmp_path / "bench.py"
    program.write_text(BENCH)
    done = mpi_launch.run("mpich", program, "bench", *options, "--group-sizes", 2, "--out", path, ranks=3)
    assert done.status == 0, done.out + done.err
    loaded = read_results(path)
    assert {(entry.op, entry.ranks) for entry in loaded.rows} == {
        (op, ranks) for op in operations.split(",") for ranks in ((2,) if op in POINT_TO_POINT else (2, 3))
    }
    assert not any(entry.wrong for entry in loaded.rows)
    assert "mpi" in loaded.versions
    assert "Avg Latency(us)" in done.out


def test_a_rank_that_fails_ends_all_and_is_named(tmp_path: Path) -> None:
    """Rank 1 cannot import torch; rank 0 must not wait for it until --timeout."""
    pytest.importorskip("torch")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif os.environ.get('RANK') == '1': sys.modules['torch'] = None\n"
    )
    path = tmp_path / "network.json"
    done = bench("--nproc", 2, "--max-bytes", 64, "--out", path, PYTHONPATH=tmp_path)
    assert done.status == 2
    assert done.err.startswith("commtrace: rank 1 of 2 exited with status 1: torch cannot be imported")
    assert done.err.count("\n") == 1
    assert not path.exists()


@pytest.mark.parametrize(
    ("backend", "message"), [("mpi", "built without MPI; measure MPI with --through"), ("nccl", "a GPU")]
)
def test_a_backend_that_there_is_not(backend: str, message: str) -> None:
    torch = pytest.importorskip("torch")
    if torch.distributed.is_mpi_available() if backend == "mpi" else torch.cuda.is_available():
        pytest.skip("this torch has the backend")
    with pytest.raises(NetworkError, match=message):
        connect(BenchPlan(backend=backend))
