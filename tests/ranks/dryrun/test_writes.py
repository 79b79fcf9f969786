"""Dry runs of programs that save do not change the user's files: in private layers, and where writes are refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Final

import processes
import pytest
from writing_programs import make_tree, tree_hash

pytest.importorskip("torch")

from commtrace.cli import main
from commtrace.dryrun.isolation.policy import can_be_private, can_refuse
from commtrace.reading.table_reader import Row
from commtrace.run import open_run

LIMIT_SECONDS: Final = 240
PROGRAM: Final = processes.PROGRAMS / "user_saves.py"
QUICK: Final = ("torch_save", "distributed", "pretrained", "memory_map", "child")


def needs(mode: str) -> None:
    """Skip the test if the kernel cannot isolate a rank in this way."""
    if mode == "private" and (problem := can_be_private()):
        pytest.skip(f"no private layers here: {problem}")
    if mode == "refuse" and not can_refuse():
        pytest.skip("this kernel has no Landlock")


def dry_run(folder: Path, mode: str, *arguments: str, ranks: str = "all", **variables: object) -> processes.Result:
    """Dry-run the program in an unchanged folder of the user; fail if a file in it changes."""
    make_tree(folder / "work")
    before = tree_hash(folder / "work")
    command = [sys.executable, "-m", "commtrace.cli", "dryrun", "--world-size", "2", "--ranks", ranks]
    command += ["--writes", mode, "--out", str(folder / "log"), sys.executable, str(PROGRAM), str(folder / "work")]
    (folder / "temporary").mkdir()
    result = processes.run(
        [*command, *arguments], cwd=folder, limit=LIMIT_SECONDS, TMPDIR=folder / "temporary", **variables
    )
    assert tree_hash(folder / "work") == before, result.err
    assert not [*(folder / "temporary").glob("commtrace-dryrun-?????*")]
    return result


def written(folder: Path) -> dict[int, list[Row]]:
    """Return what each rank would have written."""
    rows = [process.tables for process in open_run(folder / "log").processes]
    return {tables.process["rank"]: tables.writes for tables in rows}


@pytest.mark.long
def test_programs_save_and_load_in_a_private_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both ranks load what they saved, and neither sees a file of the other. The report lists the files."""
    needs("private")
    result = dry_run(tmp_path, "private", *QUICK)
    assert result.status == 0, result.err
    saved = [line.removesuffix(": saved") for line in result.out.splitlines() if line.endswith(": saved")]
    assert saved == [*QUICK]
    rows = written(tmp_path)
    work = f"{tmp_path / 'work'}/"
    for rank, its_rows in rows.items():
        changes = {row["path"].removeprefix(work): row["change"] for row in its_rows if row["path"].startswith(work)}
        assert changes == {
            "model_state_dict.pt": "created",
            f"distributed/__{rank}_0.distcp": "created",
            "distributed/.metadata": "created",
            "checkpoint-2/config.json": "created",
            "checkpoint-2/pytorch_model.bin": "created",
            "old": "deleted",
            "data": "changed",
            "file": "deleted",
            "moved": "created",
            f"of-{rank}": "created",
        }
    sizes = {row["path"].removeprefix(work): row["bytes"] for row in rows[0]}
    assert sizes["model_state_dict.pt"] > 4 * 2 * 256 * 512
    assert sizes["file"] is None
    assert main(["report", str(tmp_path / "log"), "--width", "300"]) == 0
    assert f"- {work}file: deleted, by rank 0-1\n" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("name", ["torch_save", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in QUICK[1:])])
def test_a_refused_write_stops_the_rank_and_keeps_its_calls(name: str, tmp_path: Path) -> None:
    needs("refuse")
    result = dry_run(tmp_path, "refuse", name, ranks="0")
    assert result.status == 2
    assert "its writes were refused" in result.err
    if name != "child":
        assert "lets the program change files only in the temporary directory" in result.err
    (process,) = open_run(tmp_path / "log").processes
    assert process.tables.process["failure"] == "exited with status 1"
    assert process.tables.end is None


@pytest.mark.exhaustive
def test_a_program_that_continues_after_refused_writes(tmp_path: Path) -> None:
    needs("refuse")
    result = dry_run(tmp_path, "refuse", *QUICK, "modes", "--tolerate")
    assert result.status == 0, result.err
    lines = [line.split(": ") for line in result.out.splitlines()]
    errors = {line[0]: line[1] for line in lines if line[0] in (*QUICK, "modes")}
    assert errors == {
        "torch_save": "RefusedWriteError",
        "distributed": "CheckpointException",
        "pretrained": "RefusedWriteError",
        "memory_map": "RefusedWriteError",
        "child": "CalledProcessError",
        "modes": "RefusedWriteError",
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["private", "refuse"])
@pytest.mark.parametrize(
    ("name", "library"),
    [("deepspeed", "deepspeed"), ("safetensors", "safetensors"), ("tensorboard", "tensorboard"), ("modes", "torch")],
)
def test_libraries_that_save(name: str, library: str, mode: str, tmp_path: Path) -> None:
    """DeepSpeed's checkpoint and its file `latest`, a writer in Rust, TensorBoard's events, modes and times."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    needs(mode)
    result = dry_run(tmp_path, mode, name)
    assert result.status == (0 if mode == "private" else 2), result.err


@pytest.mark.long
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """The private layer is on a disk of 4 MiB."""
    needs("private")
    script = (
        f"mkdir {tmp_path}/disk && mount -t tmpfs -o size=4m tmpfs {tmp_path}/disk && export TMPDIR={tmp_path}/disk && "
        f"{sys.executable} -m commtrace.cli dryrun --world-size 2 --out {tmp_path}/log "
        f"sh -c 'head -c 8000000 /dev/zero > {tmp_path}/file'"
    )
    result = processes.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script])
    if "mount: " in result.err or "unshare: " in result.err:
        pytest.skip("needs a user namespace")
    assert result.status == 2, result.err
    assert "No space left on device" in result.err
    assert f"the disk of {tmp_path}/disk, which holds what it wrote, is full" in result.err
    assert not (tmp_path / "file").exists()


def test_a_dry_run_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """Its ranks end with it; the next dry run removes its temporary folder."""
    needs("private")
    (tmp_path / "temporary").mkdir()
    make_tree(tmp_path / "work")
    before = tree_hash(tmp_path / "work")
    options = [sys.executable, "-m", "commtrace.cli", "dryrun", "--world-size", "2", "--out", str(tmp_path / "log")]
    variables = processes.environment(TMPDIR=tmp_path / "temporary", COMMTRACE_SHM=tmp_path / "temporary")
    script = "echo x > work/file; echo started $$; exec sleep 600"
    killed = subprocess.Popen(
        [*options, "sh", "-c", script], env=variables, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    pid = killed.stdout.readline().split()[1]
    killed.kill()
    killed.communicate(timeout=20)
    processes.wait_for(lambda: not Path(f"/proc/{pid}/root").exists())
    assert tree_hash(tmp_path / "work") == before
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert [*(tmp_path / "temporary").iterdir()]
    processes.run([*options, "true"], cwd=tmp_path, TMPDIR=tmp_path / "temporary", COMMTRACE_SHM=tmp_path / "temporary")
    assert not [*(tmp_path / "temporary").iterdir()]


@pytest.mark.long
def test_loggers_are_switched_off_and_uploads_refused(tmp_path: Path) -> None:
    """A bucket is on another host; a server on this machine may be written to."""
    script = (
        "import http.client, os, sys\n"
        "import torch\n"
        "print(os.environ['WANDB_MODE'], os.environ.get('MLFLOW_TRACKING_URI'))\n"
        "class Host(http.client.HTTPConnection):\n"
        "    def connect(self):\n        self.sock = open(os.devnull, 'r+b', buffering=0)\n"
        "        self.sock.sendall = self.sock.write\n"
        "hub = 'hub.example.org'\n"
        "for host, method, path in [('bucket.example.org', 'PUT', '/x'), (hub, 'POST', '/api/x/commit/main'),\n"
        "                           (hub, 'POST', '/api/paths-info'), ('localhost', 'PUT', '/x')]:\n"
        "    try:\n        Host(host).request(method, path)\n"
        "    except PermissionError as error:\n        print(host, method, type(error).__name__)\n"
        "    else:\n        print(host, method, path, 'was sent')\n"
    )
    (tmp_path / "send.py").write_text(script)
    command = [sys.executable, "-m", "commtrace.cli", "dryrun", "--world-size", "2", "--out", str(tmp_path / "log")]
    tracking = "http://mlflow.example.org"
    result = processes.run([*command, sys.executable, "send.py"], cwd=tmp_path, MLFLOW_TRACKING_URI=tracking)
    assert result.out.splitlines() == [
        "disabled None",
        "bucket.example.org PUT RefusedRequestError",
        "hub.example.org POST RefusedRequestError",
        "hub.example.org POST /api/paths-info was sent",
        "localhost PUT /x was sent",
    ], result.err


PREPARING: Final = """
import sys
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write("made once, for all ranks")
dist.barrier()
print(open(sys.argv[1]).read())
"""


@pytest.mark.exhaustive
def test_a_file_that_another_rank_writes_is_named(tmp_path: Path) -> None:
    needs("private")
    (tmp_path / "prepare.py").write_text(PREPARING)
    command = [sys.executable, "-m", "commtrace.cli", "dryrun", "--world-size", "2", "--ranks", "all"]
    command += ["--out", str(tmp_path / "log"), sys.executable, str(tmp_path / "prepare.py"), str(tmp_path / "index")]
    result = processes.run(command, cwd=tmp_path, limit=LIMIT_SECONDS)
    assert result.status == 2
    assert (
        f"(rank 0 wrote {tmp_path / 'index'}, which other ranks of a dry run do not see: let a real run" in result.err
    )
    assert not (tmp_path / "index").exists()
