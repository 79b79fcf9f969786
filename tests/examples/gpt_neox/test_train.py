"""Complete trainings: real processes, real collectives and losses that fall."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("yaml")

import trainings
from ports import free_port
from processes import ROOT

from commtrace.launchers import find_process
from commtrace.network.process_exit import wait_for_threads
from examples.gpt_neox import LaunchError

MODULE = "examples.gpt_neox.train"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", MODULE)
TIMEOUT_S = 90

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with one thread per process, without a launcher's variables."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI", "SLURM_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "COMMTRACE"):
        inherited.pop(name, None)
    # Use the CPU even on machines with a GPU: NCCL refuses two processes on one GPU.
    return {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **changes}


class Command:
    """Child process in its own process group, so that a stuck launcher can be killed with all its ranks."""

    def __init__(self, arguments: tuple[str, ...], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env=env,
            # -m searches the working directory first, and a checkout has a directory of the same name.
            cwd=tempfile.gettempdir(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self) -> tuple[int, str]:
        """Return exit status and output; fail after the timeout."""
        try:
            output, _ = self.process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            output, _ = self.process.communicate()
            pytest.fail(f"not finished after {TIMEOUT_S} s:\n{output}")
        return self.process.returncode, output


def torchrun(*arguments: str, env: dict[str, str]) -> list[float]:
    """Train the tiny model on two ranks under torchrun, and return rank 0's losses."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "losses.json"
        command = (*TORCHRUN, "tiny", *arguments, "--losses-out", str(path))
        status, output = Command(command, env).finish()
        assert status == 0, output
        return read_losses(path)


def forked(*arguments: str, ranks: int = 2) -> tuple[list[float], str]:
    """Train in forked ranks, which have all imports already, and return rank 0's losses and the output."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "losses.json"
        options = ("tiny", *arguments, "--losses-out", path)
        started = trainings.parent().start("gpt_neox", Path(folder) / "log", *options, ranks=ranks, traced=False)
        statuses = started.wait(TIMEOUT_S)
        output = "".join(started.output(rank) for rank in range(ranks))
        assert statuses == [0] * ranks, output
        return read_losses(path), output


@functools.cache
def alone() -> list[float]:
    """Train with DDP and micro-batches of 4 in one process without a launcher, and return its losses."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "losses.json"
        command = ("-m", MODULE, "tiny", "--engine", "ddp", "--micro-batch", "4", "--losses-out", str(path))
        status, output = Command(command, environment()).finish()
        assert status == 0, output
        return read_losses(path)


def read_losses(path: Path) -> list[float]:
    return [float.fromhex(loss) for loss in json.loads(path.read_text())["losses"]]


@functools.cache
def plain_ddp() -> list[float]:
    return forked("--engine", "ddp")[0]


@pytest.mark.long
def test_ddp_loss_falls() -> None:
    losses = plain_ddp()
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 1


@pytest.mark.long
@needs_deepspeed
@pytest.mark.parametrize("stage", "0123")
def test_zero_trains_as_ddp_does(stage: str) -> None:
    assert forked("--zero-stage", stage)[0] == pytest.approx(plain_ddp(), rel=1e-4)


@pytest.mark.exhaustive
def test_a_batch_in_two_halves_is_the_same_training() -> None:
    """The same rows give the same losses when accumulated and recomputed."""
    halves = ("--micro-batch", "2", "--gradient-accumulation", "2", "--checkpoint", "reentrant")
    losses, _ = forked("--engine", "ddp", *halves, ranks=1)
    assert losses == pytest.approx(alone(), rel=1e-4)


ACCUMULATED = ("--gradient-accumulation", "2", "--checkpoint", "non-reentrant")


@functools.cache
def accumulated_zero_2() -> list[float]:
    return forked("--zero-stage", "2", *ACCUMULATED)[0]


@pytest.mark.long
@needs_deepspeed
def test_accumulation_is_the_same_for_ddp_and_zero() -> None:
    assert forked("--engine", "ddp", *ACCUMULATED)[0] == pytest.approx(accumulated_zero_2(), rel=1e-4)


@needs_deepspeed
@pytest.mark.exhaustive
def test_no_compiler_is_needed_and_the_same_command_gives_the_same_bits(tmp_path: Path) -> None:
    """With an empty PATH nothing can be compiled; the missing cache directory shows that nothing was tried."""
    extensions = tmp_path / "extensions"
    without_compiler = environment(PATH=str(tmp_path), TORCH_EXTENSIONS_DIR=str(extensions))
    assert torchrun("--zero-stage", "2", *ACCUMULATED, env=without_compiler) == accumulated_zero_2()
    assert not extensions.exists()


@pytest.mark.long
@needs_deepspeed
def test_fp16_files_train_in_bf16_without_a_gpu() -> None:
    options = ("--train-iters", "2", "--micro-batch", "1", "--seq-length", "16", "--precision", "fp16")
    _, output = forked(*options)
    assert output.count("fp16 needs a GPU; training in bf16") == 1


@pytest.mark.exhaustive
def test_mpirun_s_variables_are_enough(tmp_path: Path) -> None:
    path, port = tmp_path / "losses.json", str(free_port())
    ranks = []
    for rank in ("0", "1"):
        names = {"RANK": rank, "LOCAL_RANK": rank, "SIZE": "2", "LOCAL_SIZE": "2"}
        env = environment(**{f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}, MASTER_PORT=port)
        ranks.append(Command(("-m", MODULE, "tiny", "--engine", "ddp", "--losses-out", str(path)), env))
    for command in ranks:
        status, output = command.finish()
        assert status == 0, output
    assert read_losses(path) == plain_ddp()


def test_a_process_that_nobody_launched_is_the_only_one() -> None:
    assert len(alone()) == 8


@pytest.mark.long
def test_what_is_impossible_is_said_before_anything_starts() -> None:
    status, output = Command(("-m", MODULE, "nowhere.yml"), environment()).finish()
    assert status == 2
    assert output.startswith("gpt_neox: error: nowhere.yml: no such file")
    assert "Traceback" not in output


@pytest.mark.long
@needs_deepspeed
def test_deepspeed_s_own_complaints_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "given.yml"
    path.write_text("zero_optimization: {buckets: 3}", encoding="utf-8")
    status, output = Command(("-m", MODULE, "tiny", str(path)), environment()).finish()
    assert status == 2
    assert "given.yml: zero_optimization: DeepSpeed does not accept" in output
    assert "buckets" in output


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
def test_the_end_waits_for_busy_threads_but_not_for_ever() -> None:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            hashlib.sha256(bytes(10_000_000))  # releases the GIL, as gloo's threads do

    thread = threading.Thread(target=spin)
    thread.start()
    threading.Timer(0.3, stop.set).start()
    begin = time.monotonic()
    wait_for_threads()
    assert stop.is_set()
    assert time.monotonic() - begin < 5
    thread.join()


def test_launchers_are_translated() -> None:
    slurm = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77"}
    environ = {**slurm, "MASTER_ADDR": "node1"}
    process = find_process(environ)
    assert (process.rank, process.world_size, process.local_rank) == (3, 4, 1)
    assert 20000 <= int(environ["MASTER_PORT"]) < 30000
    with pytest.raises(LaunchError, match="MASTER_ADDR"):
        find_process(dict(slurm))


def test_a_batch_script_outside_srun_is_one_process() -> None:
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    assert find_process(environ).world_size == 1
    assert 10_000 <= int(environ["MASTER_PORT"]) < 32_768, "the kernel gives higher ports to outgoing connections"
