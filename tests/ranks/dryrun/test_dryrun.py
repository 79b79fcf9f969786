"""`commtrace dryrun`: the command, what it writes, and what it refuses."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import processes
import pytest

pytest.importorskip("torch")

import commtrace
from commtrace.cli import main
from commtrace.run import Run, open_run
from commtrace.schema import RECORD, Flag, State

pytestmark = pytest.mark.long

LIMIT_SECONDS: Final = 240

SCRIPT: Final = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
assert dist.get_backend() == "gloo" and not torch.cuda.is_available()
assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
halves = [dist.new_group([rank, rank + 1]) for rank in range(0, dist.get_world_size(), 2)]
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 1 << 20), nn.ReLU(), nn.Linear(1 << 20, 64)))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.arange(640.0).view(10, 64), batch_size=2, num_workers=1)
for batch in data:
    assert batch[0, 1] - batch[0, 0] == 1      # loaded data are real
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if loss.item() > 1:
        raise SystemExit("a loss was computed")
    kept = loss.expand(3)[loss.expand(3) > 0]
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(7), group=halves[0])
elif dist.get_rank() == 1:
    dist.all_reduce(torch.ones(7), group=halves[0])
count = torch.ones(1)
dist.all_reduce(count)
objects = [{"rank": dist.get_rank()}]
dist.broadcast_object_list(objects, src=0)
assert objects == [{"rank": 0}], objects       # rank 0's objects are real
class Kept: pass
kept = Kept()
kept.parts = {"model": [model.module]}
for saved in (model.state_dict(), model, {"state": optimizer.state_dict()}, kept):
    torch.save(saved, "large.pt")
    assert os.stat("large.pt").st_blocks * 512 < 1 << 20 < 1 << 28 < os.path.getsize("large.pt")   # holes
torch.save({"epoch": 3, "batch": batch}, "now.pt")
assert torch.load("now.pt")["epoch"] == 3
print("done", dist.get_rank(), count.item())
dist.destroy_process_group()
"""


def line_of(text: str) -> int:
    """Return the number of the first line of SCRIPT that contains a text."""
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if text in line)


def dry_run(folder: Path, *options: str, script: str = SCRIPT) -> processes.Result:
    """Run `commtrace dryrun` on a script."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "commtrace.cli", "dryrun", *options, "--out", str(folder / "log")]
    return processes.run([*command, sys.executable, "train.py"], cwd=folder, limit=LIMIT_SECONDS)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, processes.Result]:
    """Dry-run the distinct ranks of a job of four; ranks 0 and 1 also communicate in a group of two."""
    folder = tmp_path_factory.mktemp("job")
    result = dry_run(folder, "--world-size", "4", "--ranks", "all-distinct", "--jobs", "2")
    assert result.status == 0, result.err
    return open_run(folder / "log"), result


def test_the_ranks_that_differ_stand_for_all(job: tuple[Run, processes.Result]) -> None:
    run, result = job
    assert run.stands_for == {0: 1, 1: 1, 2: 2}, result.out
    assert "represents 2 ranks: 2-3" in result.out
    assert run.simulated
    assert run.world_size == 4


def test_the_whole_job_is_what_all_ranks_would_communicate(job: tuple[Run, processes.Result]) -> None:
    run, _ = job
    events = run.events()
    total = run.table("whole_job").groupby("op")["payload_bytes"].sum()
    weights = events["rank"].map(run.stands_for)
    assert total.to_dict() == (events["payload_bytes"] * weights).groupby(events["op"]).sum().to_dict()
    assert total["all_reduce"] > 4 * 5 * 2 * 64 * (1 << 20) * 4


def test_a_simulated_log_has_an_order_and_no_times(job: tuple[Run, processes.Result]) -> None:
    run, _ = job
    for process in run.processes:
        records = np.concatenate([block for segment in process.segments for block in segment.blocks()])
        assert (records["t_begin"] == np.arange(1, len(records) + 1)).all()
        for name in ("t_return", "t_wait", "t_start", "t_end", "clock"):
            assert not records[name].any()
        assert (records["flags"] & np.uint8(Flag.SIMULATED)).all()
        assert {*records["state"].tolist()} == {int(State.UNOBSERVABLE)}
    assert not run.table("host_time")["calls_known"].sum()
    for table in ("bandwidth", "timeline", "sizes_over_time"):
        assert not len(run.table(table)), table


def test_the_report_says_that_it_is_simulated_and_gives_no_time(
    job: tuple[Run, processes.Result], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = job
    assert main(["report", str(run.log.path), "--width", "120"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"Run {run.id}, simulated")
    assert "the 3 ranks that ran represent all of the job" in text
    assert "The whole job (simulated)" in text
    for phrase in ("Bandwidth", "Time inside", "GB/s", "waiting for the end", "tracing cost"):
        assert phrase not in text


def test_the_check_is_equal_to_theory(job: tuple[Run, processes.Result], capsys: pytest.CaptureFixture[str]) -> None:
    """The check reports no difference in DDP's calls."""
    run, _ = job
    main(["check", str(run.log.path)])
    out = capsys.readouterr().out
    assert "simulated: 3 of 4 ranks were run" in out
    assert "in backward" not in out


def test_lines_that_ask_for_what_is_not_computed_are_named_once(job: tuple[Run, processes.Result]) -> None:
    run, result = job
    rows = [(row["line"], row["what"]) for row in run.processes[0].tables.notices]
    assert len(rows) == len({*rows})
    assert [line for line, what in rows if "reads a number" in what] == [
        line_of("loss.item()"),
        line_of("count.item()"),
    ]
    assert [line for line, what in rows if "makes a shape" in what] == [line_of("kept =")]
    assert result.err.count(f"train.py:{line_of('loss.item()')}") == 1


def test_a_page_and_an_export_work(job: tuple[Run, processes.Result], tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("jinja2")
    run, _ = job
    assert main(["report", str(run.log.path), "--html", str(tmp_path / "page.html")]) == 0
    assert "Simulated, a dry run" in (tmp_path / "page.html").read_text()
    assert main(["export", str(run.log.path), "--out", str(tmp_path / "events.csv")]) == 0
    assert len((tmp_path / "events.csv").read_text().splitlines()) == 1 + len(commtrace.open(run.log.path).events())


@pytest.mark.parametrize(
    ("options", "command", "message"),
    [
        (["--world-size", "4"], [], "no program given"),
        (["--world-size", "4"], ["torchrun", "train.py"], "is a launcher, which starts ranks itself"),
        (["--world-size", "4"], ["python", "-m", "torch.distributed.run", "train.py"], "a launcher"),
        (["--world-size", "4"], ["no-such-program"], "no such program on PATH"),
        (["--world-size", "4", "--ranks", "0,4"], ["true"], "rank 4 is out of range"),
        (["--world-size", "4", "--ranks", "first"], ["true"], "--ranks first is not a list of ranks"),
        (["--world-size", "4"], ["true"], "rank 0 made no communication call"),
        (["--world-size", "4"], ["false"], "rank 0 exited with status 1; no log was written"),
        (["--world-size", "4", "--timeout", "0.2"], ["sleep", "60"], "rank 0 did not finish within"),
    ],
)
def test_what_cannot_be_is_said(
    options: list[str], command: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dryrun", *options, "--out", str(tmp_path / "log"), *command]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "log").exists()


FAILING: Final = """
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
if dist.get_rank() == 2:
    print(*(f"line {number}" for number in range(40)), sep="\\n", flush=True)
    raise RuntimeError("the third rank does not like it")
if dist.get_rank() == 3:
    time.sleep(600)
"""


@pytest.mark.exhaustive
def test_what_was_recorded_before_a_rank_failed_is_not_lost(tmp_path: Path) -> None:
    """The failed rank's output is kept as well, and so is the log if its directory is not writable."""
    result = dry_run(tmp_path, "--world-size", "4", "--ranks", "0,2", script=FAILING)
    assert result.status == 2
    assert "rank 2 exited with status 1; the log of rank 0, finished before the failure, is in" in result.err
    assert "the calls of rank 2 until then are in" in result.err
    assert "RuntimeError: the third rank does not like it" in result.err
    assert "line 39" in result.err
    assert "line 0\n" not in result.err
    kept = Path(result.err.strip().rpartition("the whole output is in ")[2])
    assert kept.read_text().startswith("line 0\nline 1\n")
    kept.unlink()
    run = open_run(tmp_path / "log")
    assert run.events().groupby("rank").size().to_dict() == {0: 1, 2: 1}
    assert {process.tables.process["rank"]: process.tables.process.get("failure") for process in run.processes} == {
        0: None,
        2: "exited with status 1",
    }
    assert [process.tables.process["rank"] for process in run.processes if process.tables.end is None] == [2]

    (tmp_path / "log" / open_run(tmp_path / "log").id).rename(tmp_path / "other")
    (tmp_path / "log").rmdir()
    (tmp_path / "log").symlink_to("/proc/self/fdinfo")
    result = dry_run(tmp_path, "--world-size", "4", "--ranks", "0", script=FAILING)
    assert result.status == 0, result.err
    fallback = Path(result.out.strip().rpartition(" is in ")[2])
    assert f"the log goes to {fallback}" in result.err
    assert len(open_run(fallback).events())
    shutil.rmtree(fallback)


@pytest.mark.exhaustive
def test_logs_are_kept_when_a_distinct_rank_fails(tmp_path: Path) -> None:
    """Also of ranks that only the search for distinct ones has run."""
    result = dry_run(tmp_path, "--world-size", "3", "--ranks", "all-distinct", "--jobs", "1", script=FAILING)
    assert result.status == 2
    assert "rank 2 exited with status 1; the log of ranks 0-1, finished before the failure, is in" in result.err
    assert open_run(tmp_path / "log").events().groupby("rank").size().to_dict() == {0: 1, 1: 1, 2: 1}


MISFIT: Final = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4 if dist.get_rank() == 6 else 3))
"""
"""Rank 6 of 16 differs, which only the check of ranks drawn at random sees."""


@pytest.mark.exhaustive
def test_logs_are_kept_when_a_rank_differs_from_the_one_that_represents_it(tmp_path: Path) -> None:
    result = dry_run(tmp_path, "--world-size", "16", "--ranks", "all-distinct", "--jobs", "2", script=MISFIT)
    assert result.status == 2
    assert "rank 6 does not communicate like rank 0" in result.err
    assert "finished before the failure, is in" in result.err
    assert {0, 6, 8, 15} <= {process.rank for process in open_run(tmp_path / "log").processes}


@pytest.mark.exhaustive
def test_a_rank_that_hangs_says_where(tmp_path: Path) -> None:
    result = dry_run(tmp_path, "--world-size", "4", "--ranks", "3", "--timeout", "20", script=FAILING)
    assert result.status == 2
    assert "rank 3 did not finish within" in result.err
    assert f'train.py", line {1 + FAILING.splitlines().index("    time.sleep(600)")} in <module>' in result.err
    (process,) = open_run(tmp_path / "log").processes
    assert process.tables.process["failure"].startswith("did not finish within")


SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.full((5000,), 7.0)      # its memory is used again
grown = torch.empty(0)
grown.untyped_storage().resize_(20_000)
assert not grown.set_(grown.untyped_storage(), 0, (5000,)).any()
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024))
fully_shard(model)
model(torch.ones(2, 1024)).sum().backward()
"""


def test_a_script_for_gpus_runs_on_simulated_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script fails without GPUs and restarts with simulated ones; attributes of its tensors hide methods."""
    script = (processes.PROGRAMS / "user_cuda.py").read_text()
    result = dry_run(tmp_path, "--world-size", "4", "--ranks", "0,3", "--ranks-per-node", "2", script=script)
    assert result.status == 0, result.err
    assert "the program requires CUDA; restarting with simulated devices" in result.err
    run = open_run(tmp_path / "log")
    assert {process.tables.process["simulated_device"] for process in run.processes} == {"cuda"}
    events = run.events()
    payloads = {rank: calls.groupby("op")["payload_bytes"].sum().to_dict() for rank, calls in events.groupby("rank")}
    gradients = 4 * (2 * (256 * 256 + 3 * 256) + 257)
    # Two steps: the gradients of DDP, a count of 8 bytes, five numbers in bfloat16.
    assert payloads[0]["all_reduce"] == payloads[3]["all_reduce"] == 2 * (gradients + 8 + 2 * 5)
    half = events[(events["group_size"] == 2) & (events["op"] == "broadcast")]
    assert half[["rank", "payload_bytes"]].to_numpy().tolist() == [[0, 8]]
    assert main(["report", str(run.log.path), "--width", "300"]) == 0
    assert "its CUDA devices were simulated" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_script_for_gpus_fails_on_the_cpu(tmp_path: Path) -> None:
    script = (processes.PROGRAMS / "user_cuda.py").read_text()
    result = dry_run(tmp_path, "--world-size", "4", "--device", "cpu", script=script)
    assert result.status == 2
    assert "This script requires CUDA" in result.err
    assert not (tmp_path / "log").exists()


DETERMINISTIC: Final = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.use_deterministic_algorithms(True)
values = torch.rand(1 << 22)  # too many to be computed
torch.histc(values, 8)  # torch's rule for its shape takes the device for CUDA, which has no deterministic kernel
assert torch.are_deterministic_algorithms_enabled()
dist.barrier()
"""


def test_deterministic_algorithms_are_asked_of_no_device(tmp_path: Path) -> None:
    result = dry_run(tmp_path, "--world-size", "2", "--device", "cpu", script=DETERMINISTIC)
    assert result.status == 0, result.err


PINGPONG: Final = """
import os
import torch
import torch.distributed as dist

with open("starts", "a") as starts:
    print(os.environ["RANK"], file=starts)
dist.init_process_group("gloo")
rank, last = dist.get_rank(), dist.get_world_size() - 1
for turn in range(40):
    number = torch.tensor([turn])
    if rank > 0:
        dist.recv(number, rank - 1)
    if rank < last:
        dist.send(number + 1, rank + 1)
        dist.recv(number, rank + 1)
    assert number.item() == turn + last, (rank, turn, number)     # needs the messages of all ranks
    if rank > 0:
        dist.send(number, rank - 1)
if rank == last:
    dist.recv(number, 0)      # nobody sends this
assert not number.item() or rank < last
"""


def test_ranks_that_need_each_others_messages_run_side_by_side(tmp_path: Path) -> None:
    result = dry_run(
        tmp_path, "--world-size", "3", "--ranks", "all", "--jobs", "1", "--writes", "allow", script=PINGPONG
    )
    assert result.status == 0, result.err
    assert sorted((tmp_path / "starts").read_text().split()) == ["0", "1", "2"]
    calls = open_run(tmp_path / "log").events().groupby("rank").size()
    assert calls.to_dict() == {0: 80, 1: 160, 2: 81}
    assert result.err.count(": done, ") == 2


def test_a_rank_that_waits_for_one_that_fails_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\ndist.all_reduce(torch.ones(3))\n"
        "if dist.get_rank() == 0:\n    dist.recv(torch.tensor([1]), 1)\n"
        "raise RuntimeError('no message')\n"
    )
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "shm").mkdir()
    command = [sys.executable, "-m", "commtrace.cli", "dryrun", "--world-size", "2", sys.executable, "train.py"]
    result = processes.run(command, cwd=tmp_path, limit=LIMIT_SECONDS, COMMTRACE_SHM=tmp_path / "shm")
    assert result.status == 2
    assert "rank 1 exited with status 1; the calls of rank 1 until then are in" in result.err
    assert not [*(tmp_path / "shm").iterdir()]


@pytest.mark.exhaustive
def test_large_weights_are_sharded_by_fsdp2(tmp_path: Path) -> None:
    """FSDP2's DTensor computes shapes with its own tensors, which have no memory."""
    result = dry_run(tmp_path, "--world-size", "4", script=SHARDED)
    assert result.status == 0, result.err
    volume = open_run(tmp_path / "log").events().groupby("op")["payload_bytes"].sum()
    parameters = 4 * (2 * 1024 * 4096 + 1024 + 4096)
    assert volume["all_gather"] == volume["reduce_scatter"] == parameters


@pytest.mark.exhaustive
def test_a_rank_that_communicates_by_mpi_is_an_error(tmp_path: Path) -> None:
    """MPI would run the program as a job of one rank, whose calls say nothing about the real job."""
    pytest.importorskip("mpi4py")
    script = "from mpi4py import MPI\nimport torch\nprint(MPI.COMM_WORLD.allreduce(1))\n"
    result = dry_run(tmp_path, "--world-size", "4", script=script)
    assert result.status == 2
    assert "rank 0 communicated over MPI" in result.err
    assert not (tmp_path / "log").exists()


def test_a_folder_that_cannot_be_is_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["dryrun", "--world-size", "2", "--out", str(tmp_path / "file" / "log"), "true"]) == 2
    assert f"{tmp_path / 'file'} is not a directory" in capsys.readouterr().err


def test_a_limited_address_space_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "commtrace.cli", "dryrun", "--world-size", "2", "--out", str(tmp_path), "true"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))

    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert "ulimit -v" in done.stderr


@pytest.mark.exhaustive
def test_a_script_that_starts_ranks_itself_gets_an_error(tmp_path: Path) -> None:
    script = (
        "import torch, torch.distributed as dist, torch.multiprocessing as mp\n"
        "def work(number):\n    dist.init_process_group('gloo', rank=number, world_size=2)\n"
        "if __name__ == '__main__':\n    mp.start_processes(work, nprocs=2, start_method='fork')\n"
    )
    result = dry_run(tmp_path, "--world-size", "2", script=script)
    assert result.status == 2
    assert "leave out launchers and multiprocessing.spawn" in result.err
    assert not list((tmp_path / "log").glob("*/*/*")) if (tmp_path / "log").exists() else True


def test_tables_of_a_dry_run_are_read(tmp_path: Path) -> None:
    """Handwritten rows of a dry run are read."""
    from commtrace.reading.table_reader import read_tables

    rows = [
        {"table": "notices", "file": "a.py", "line": 3, "function": "f", "what": "reads"},
        {"table": "topology", "groups": ["0-1", [3, 2]]},
        {"table": "stands_for", "ranks": "0-3", "count": 4},
    ]
    path = tmp_path / "rank00000-1.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables, notes = read_tables(path)
    assert not notes
    assert tables.notices[0]["line"] == 3
    assert tables.topology == ((0, 1), (3, 2))
    assert tables.stands_for == ("0-3", 4)
    assert RECORD.itemsize == 96
