"""`commtrace watch` and `top` of real jobs that hang, fail or go on."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import mpi_launch
import processes
import pytest

pytest.importorskip("torch")

from ranks import Nursery
from stalled_ranks import KINDS, places_of

from commtrace.analyses.across_ranks.stuck_calls import MIN_WAIT_NS
from commtrace.cli import main
from commtrace.commands.exit_status import AS_EXPECTED, FAILED, PROGRAM_FAILED, STUCK
from commtrace.run import open_run

LIMIT_SECONDS = 120
FAST = ["--interval", "0.3", "--wait", "60"]


class Webhook(http.server.BaseHTTPRequestHandler):
    """A server that keeps what is posted to it, or, at /hangs, never answers."""

    posted: ClassVar[list[dict[str, Any]]]
    hangs: ClassVar[threading.Event]

    def do_POST(self) -> None:
        if self.path == "/hangs":
            self.hangs.wait(LIMIT_SECONDS)
        self.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def webhook() -> Iterator[tuple[str, type[Webhook]]]:
    """The address of a server, and its handler."""

    class Handler(Webhook):
        posted: ClassVar[list[dict[str, Any]]] = []
        hangs: ClassVar[threading.Event] = threading.Event()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", Handler
        Handler.hangs.set()
        server.shutdown()


def watch(log: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start to watch a log."""
    command = [sys.executable, "-m", "commtrace.cli", "watch", str(log), "--json", *FAST, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(started: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]], str]:
    """Return the exit status, the incidents and the standard error of a watch."""
    out, err = started.communicate(timeout=LIMIT_SECONDS)
    return started.returncode, [json.loads(line) for line in out.splitlines()], err


def test_a_hang_is_told_once_with_rank_and_line(
    nursery: Nursery, tmp_path: Path, webhook: tuple[str, type[Webhook]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The watch begins before the log exists. A webhook that hangs, and a command that fails, delay nothing."""
    log, kept, (address, handler) = tmp_path / "log", tmp_path / "kept", webhook
    keeps, hangs = (
        watch(log, "--run", f"cat > {kept}", "--webhook", address),
        watch(log, "--run", "exit 3", "--webhook", f"{address}/hangs"),
    )
    ranks = nursery.start("stalled", log, "lock", ranks=3, stall_seconds=0.5)
    assert keeps.stdout is not None
    first = json.loads(keeps.stdout.readline())
    status = main(["top", str(log), "--once", "--width", "80"])
    shown = capsys.readouterr().out
    ranks.kill(0, 1, 2)
    ranks.wait()
    handler.hangs.set()
    assert (first["kind"], first["ranks"]) == ("hang", [1])
    assert "rank 1 did not enter it" in first["text"]
    stalled = {row["rank"]: row for row in first["tables"]["stalled_threads"]}
    assert stalled[1]["activity"] == "waiting for a lock or thread"
    assert stalled[1]["line"].startswith("programs/stalled.py:")
    assert status == STUCK
    assert "rank 1 did not enter it" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80
    _, later, _ = ended(keeps)
    assert [incident["kind"] for incident in later] == ["end"], "the hang is told once"
    _, told, problems = ended(hangs)
    assert [incident["kind"] for incident in told] == ["hang", "end"]
    assert "an incident was not delivered: Command 'exit 3'" in problems
    assert json.loads(kept.read_text())["kind"] == "end", "the last one"
    assert {posted["kind"] for posted in handler.posted} == {"hang", "end"}


@pytest.mark.long
@pytest.mark.parametrize("room", [0, 16384])
def test_a_hang_with_a_log_on_a_full_disk(room: int, small_disk: Path, nursery: Nursery) -> None:
    """What does not fit on the disk is read from the memory of the processes, stacks included."""
    log = small_disk / "log"
    started = watch(log, "--on", "hang:6s")
    with contextlib.suppress(OSError), open(small_disk / "ballast", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    if room:
        os.truncate(small_disk / "ballast", (small_disk / "ballast").stat().st_size - room)
    ranks = nursery.start("stalled", log, "lock", ranks=3)
    assert started.stdout is not None
    told = json.loads(started.stdout.readline())
    ranks.kill(0, 1, 2)
    ranks.wait()
    started.kill()
    started.communicate()
    assert (told["kind"], told["ranks"]) == ("hang", [1])
    rows = {row["rank"]: row for row in told["tables"]["stalled_threads"]}
    assert rows[1]["line"] in places_of("lock")


def test_a_healthy_job_has_no_incident(nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    started = watch(log, "--on", "hang,end")
    nursery.run("delayed", log, "ddp", ranks=2)
    assert ended(started)[:2] == (AS_EXPECTED, [])
    assert main(["top", str(log), "--once", "--width", "160"]) == AS_EXPECTED
    assert "2 of 2 ranks: 2 ended" in capsys.readouterr().out


def test_a_process_that_dies_is_told(nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "log"
    started = watch(log)
    ranks = nursery.start("stalled", log, "sleep", ranks=2, stall_seconds=0.5)
    assert started.stdout is not None
    hang = json.loads(started.stdout.readline())
    ranks.kill(1)
    ranks.kill(0)
    ranks.wait()
    status, told, _ = ended(started)
    assert status in (STUCK, PROGRAM_FAILED)
    (end,) = told
    assert end["kind"] == "end"
    assert {row["rank"] for row in end["tables"]["endings"]} == {0, 1}
    assert (hang["kind"], hang["ranks"]) == ("hang", [1])


SRUN = """#!{python}
# Starts the tasks of a job of SLURM, all on this host.
import os, subprocess, sys

job = {{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}}
tasks = [
    subprocess.Popen(sys.argv[1:], env={{**os.environ, **job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}})
    for rank in range(2)
]
sys.exit(max(abs(task.wait()) for task in tasks))
"""

TRAIN = """
import os
import torch
import torch.distributed as dist

rank = int(os.environ["SLURM_PROCID"])
dist.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=2)
for _ in range(5):
    dist.all_reduce(torch.ones(8))
if rank == 1:
    os._exit(7)
dist.all_reduce(torch.ones(8))
"""


def test_the_batch_script_of_the_page(tmp_path: Path, webhook: tuple[str, type[Webhook]]) -> None:
    """A stand-in for SLURM kills what is left when the script ends."""
    page = (processes.ROOT / "docs" / "how-to" / "watch.md").read_text()
    found = re.search(r"((?:    .*\n)*    COMMTRACE=\S+ srun .*\n(?:    .*\n)*)", page)
    assert found is not None
    (tmp_path / "srun").write_text(SRUN.format(python=sys.executable))
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN.format(store=tmp_path / "store"))
    (tmp_path / "job.sh").write_text(re.sub("^    ", "", found[1], flags=re.MULTILINE))
    path = os.pathsep.join([str(tmp_path), os.path.dirname(sys.executable), os.environ["PATH"]])
    result = processes.run(
        ["bash", tmp_path / "job.sh"], limit=LIMIT_SECONDS, cwd=tmp_path, PATH=path, SLURM_JOB_ID="77",
        ALERTS=webhook[0],
    )  # fmt: skip
    assert result.status == 7, result.err
    (posted,) = webhook[1].posted
    assert (posted["kind"], posted["ranks"]) == ("end", [1])
    assert posted["run"].startswith("slurm-77.0")


@contextlib.contextmanager
def hanging(library: str, nursery: Nursery, log: Path, kind: str, bad: int, size: int) -> Iterator[None]:
    """Run ranks that hang, over gloo ("torch") or under an MPI."""
    if library != "torch":
        mpi_launch.needs(library)
        with mpi_launch.started(library, processes.PROGRAMS / "stalled.py", kind, bad, "mpi", ranks=size, log=log):
            yield
        return
    ranks = nursery.start("stalled", log, kind, bad, ranks=size)
    try:
        yield
    finally:
        ranks.kill(*range(size))
        ranks.wait()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(int(os.environ.get("DRAWS", "4"))))
@pytest.mark.parametrize("library", ["torch", *mpi_launch.NAMES])
def test_a_random_hang(library: str, seed: int, nursery: Nursery, tmp_path: Path) -> None:
    """The rank, its line and what it does are right, and told within 5 s after the hang is long enough."""
    chance, log = random.Random(seed if library == "torch" else f"{library} {seed}"), tmp_path / "log"
    kind, size = chance.choice([*KINDS]), chance.randint(2, 8)
    bad = chance.randrange(size)
    started = watch(log, "--on", "hang:6s")
    with hanging(library, nursery, log, kind, bad, size):
        assert started.stdout is not None
        told = json.loads(started.stdout.readline())
    ended(started)
    assert told["ranks"] == ([*range(size)] if kind == "all" else [bad]), told["text"]
    activity, _ = KINDS[kind]
    rows = {row["rank"]: row for row in told["tables"]["stalled_threads"]}
    assert rows[bad]["activity"] == activity
    assert rows[bad]["line"] in places_of(kind) or not places_of(kind)
    calls = told["tables"]["stuck_calls"]
    begun_ns = calls[0]["since_ns"] if calls else rows[bad]["since_ns"]
    seconds = (told["unix_ns"] - begun_ns) / 1e9
    print(f"{library}, {kind}, rank {bad} of {size}: told after {seconds:.1f} s")
    assert seconds < MIN_WAIT_NS / 1e9 + 5


HEALTHY = (
    "evaluation", "all evaluate", "checkpoint", "first step", "garbage", "uneven", "steps", "suspended", "compilation",
)  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(int(os.environ.get("DRAWS", "8"))))
def test_a_healthy_run_that_pauses(seed: int, nursery: Nursery, tmp_path: Path) -> None:
    """Evaluations, checkpoints, slow steps, garbage collections, and a suspended job are no hang."""
    chance, log = random.Random(f"healthy {seed}"), tmp_path / "log"
    kind, size = HEALTHY[seed % len(HEALTHY)], chance.randint(2, 4)
    started = watch(log, "--on", "hang,end")
    ranks = nursery.start("healthy", log, "steps" if kind == "suspended" else kind, seed, ranks=size)
    if kind == "suspended":
        processes.wait_for(lambda: len([*log.glob("*/*/*.npy*")]) == size, LIMIT_SECONDS)
        ranks.kill(*range(size), signal_=signal.SIGSTOP)
        time.sleep(8)  # longer than a hang
        ranks.kill(*range(size), signal_=signal.SIGCONT)
    assert ranks.wait(LIMIT_SECONDS) == [0] * size
    assert ended(started)[:2] == (AS_EXPECTED, []), kind


def test_there_is_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path / "log"), "--once"]) == FAILED
    assert main(["watch", str(tmp_path / "log"), "--wait", "0.1", "--interval", "0.1"]) == FAILED
    assert "no log within 0.1 s (--wait)" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["ddp", "zero1", "zero3", "pipeline"])
def test_tensorboard_follows_a_training(scheme: str, nursery: Nursery, tmp_path: Path) -> None:
    """Each step is written once, with the values of the report of the whole run."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log, events = tmp_path / "log", tmp_path / "events"
    ranks = nursery.start("delayed", log, scheme, 1, "backward", 30, "5,9", ranks=2)
    processes.wait_for(lambda: any(log.glob("*/*/*.jsonl")), 60)
    assert main(["metrics", str(log), "--tensorboard", str(events), "--follow", "--interval", "0.2"]) == AS_EXPECTED
    ranks.wait()
    read = accumulator.EventAccumulator(str(events), size_guidance={"tensors": 0}).Reload()  # 0: all of them
    times = open_run(log).table("step_times").set_index("step")
    for name, column in (("step", "ns"), ("computation", "computation_ns"), ("waiting", "waiting_ns")):
        found = [(event.step, event.tensor_proto.float_val[0]) for event in read.Tensors(f"commtrace/{name}_seconds")]
        assert [step for step, _ in found] == times.index.to_list(), "once"
        assert dict(found) == pytest.approx((times[column] / 1e9).to_dict())
    assert times.loc[[5, 9], "slowest_rank"].tolist() == [1, 1]
