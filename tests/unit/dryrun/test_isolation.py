"""What a process changes in isolation does not reach the user's files: in private layers and where writes are refused.

Private layers are tested with the rights that the tests have, and without the right to mount (a user namespace).
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import processes
import pytest
from writing_programs import PYTHON, SHELL, make_tree, tree_hash

from commtrace.dryrun.isolation.file_changes import FileChange, file_changes
from commtrace.dryrun.isolation.policy import Isolation, Writes, can_be_private, can_refuse

PROGRAMS: Final = {
    **{name: [sys.executable, "-S", "-c", code] for name, code in PYTHON.items()},
    **{name: ["/bin/sh", "-c", code] for name, code in SHELL.items()},
}
WITHOUT_RIGHTS: Final = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "--ambient-caps=-all", "--")
MODES: Final = ("private", "unprivileged", "refuse")


@pytest.fixture(scope="module")
def private_problem() -> str:
    """Why there are no private layers on this machine, or ""."""
    return can_be_private()


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, private_problem: str) -> str:
    """How the program is isolated."""
    name: str = request.param
    if name == "refuse" and not can_refuse():
        pytest.skip("this kernel has no Landlock")
    if name != "refuse" and private_problem:
        pytest.skip(f"no private layers here: {private_problem}")
    if name == "unprivileged" and (os.geteuid() or not shutil.which("setpriv")):
        pytest.skip("the tests have no rights to give up")
    return name


_number: Final = itertools.count()


def isolated(mode: str, work: Path, command: Sequence[str], **variables: str) -> tuple[int, str, list[FileChange]]:
    """Run a command in isolation, in the directory `work`. Return its status, output and changes."""
    folder = work.parent / f"run-{next(_number)}"
    shm = Path("/dev/shm", f"commtrace-test-{os.getpid()}-{next(_number)}")
    writes = Writes.REFUSE if mode == "refuse" else Writes.PRIVATE
    isolation = Isolation(writes, folder / "layer", shm / "layer", [folder, shm], [folder / "shared"])
    isolation.make_folders()
    started = [*(WITHOUT_RIGHTS if mode == "unprivileged" else ()), *isolation.command(command)]
    try:
        done = subprocess.run(
            started,
            cwd=work,
            env={**os.environ, **isolation.environment(), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout, file_changes(folder / "layer")
    finally:
        isolation.remove_folders()
        shutil.rmtree(shm)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A directory of the user."""
    folder = tmp_path / "work"
    make_tree(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_changes_a_file(name: str, mode: str, work: Path) -> None:
    if mode == "refuse" and name == "change the mode":
        pytest.skip("Landlock does not cover it: the rank refuses it (tests/ranks/dryrun/test_writes.py)")
    before = tree_hash(work)
    status, output, changes = isolated(mode, work, PROGRAMS[name])
    assert tree_hash(work) == before
    assert not Path("/dev/shm/commtrace-test-file").exists() or mode == "refuse"
    Path("/dev/shm/commtrace-test-file").unlink(missing_ok=True)
    if mode == "refuse":
        assert status or name == "shared memory", output
    elif mode == "unprivileged" and name in ("rename a directory", "child process"):
        assert not status or "Invalid cross-device link" in output  # `mv` copies; the rank's `os.rename` does so too
    else:
        assert not status, output
        assert changes


def test_the_changes_are_listed(work: Path, private_problem: str) -> None:
    if private_problem:
        pytest.skip(f"no private layers here: {private_problem}")
    script = (
        "echo more >> file; rm -r old; mkdir old; echo new > old/new; mkdir empty; rm runs.db; echo x > gone; rm gone; "
        "echo x > /dev/shm/commtrace-test-file; exec 3<>file"
    )
    _, output, changes = isolated("private", work, ["/bin/sh", "-c", script])
    assert not output
    assert changes == sorted(
        [
            FileChange("/dev/shm/commtrace-test-file", "created", 2),
            FileChange(str(work / "empty"), "created", None),
            FileChange(str(work / "file"), "changed", 13),
            FileChange(str(work / "old/new"), "created", 4),
            FileChange(str(work / "old/weights"), "deleted", None),
            FileChange(str(work / "runs.db"), "deleted", None),
        ]
    )


def test_a_file_that_was_only_opened_is_not_listed(work: Path, private_problem: str) -> None:
    if private_problem:
        pytest.skip(f"no private layers here: {private_problem}")
    assert isolated("private", work, ["/bin/sh", "-c", "exec 3<>file"]) == (0, "", [])


def test_directories_of_another_owner_may_be_above(mode: str, work: Path) -> None:
    """In a user namespace, the kernel does not copy them into the layer."""
    if mode != "unprivileged":
        pytest.skip("concerns user namespaces")
    (work / "group").mkdir()
    os.chown(work / "group", 1234, 1234)
    mine = work / "group" / "mine"
    make_tree(mine)
    before = tree_hash(mine)
    status, output, changes = isolated(mode, mine, ["/bin/sh", "-c", "echo x > old/new; rm file"])
    assert not status, output
    assert [(Path(change.path).name, change.change) for change in changes] == [("file", "deleted"), ("new", "created")]
    assert tree_hash(mine) == before


def test_a_process_sees_its_own_files_and_not_those_of_another(mode: str, work: Path) -> None:
    folder = "$TMPDIR" if mode == "refuse" else "."
    write = f"ls {folder}; echo $0 > {folder}/of-$0; cat {folder}/of-$0"
    outputs = [isolated(mode, work, ["/bin/sh", "-c", write, name])[1].splitlines() for name in ("0", "1")]
    existing = [] if mode == "refuse" else ["data", "file", "old", "runs.db"]
    assert outputs == [[*existing, "0"], [*existing, "1"]]


def test_the_folders_of_the_dry_run_are_hidden_and_the_shared_ones_are_real(work: Path, private_problem: str) -> None:
    if private_problem:
        pytest.skip(f"no private layers here: {private_problem}")
    folder = work.parent / "dry-run"
    isolation = Isolation(Writes.PRIVATE, folder / "layer", folder / "shm", [folder], [folder / "messages"])
    isolation.make_folders()
    (folder / "secret").touch()
    subprocess.run(
        isolation.command(["/bin/sh", "-c", f"ls {folder} > {folder}/messages/seen"]), check=True, timeout=60
    )
    assert (folder / "messages" / "seen").read_text() == "messages\n"


def in_another_process(code: str) -> subprocess.Popen[str]:
    """Start Python code that uses this module."""
    paths = [str(Path(__file__).parent), str(Path(processes.__file__).parent)]
    imports = "import sys; sys.path[:0] = sys.argv[1:]\nfrom pathlib import Path\nfrom test_isolation import isolated\n"
    return subprocess.Popen([sys.executable, "-c", imports + code, *paths], stdout=subprocess.PIPE, text=True)


@pytest.mark.long
def test_a_read_only_file_system_stays_read_only(work: Path, private_problem: str) -> None:
    if private_problem or os.geteuid():
        pytest.skip("needs the right to mount")
    reader = in_another_process(
        "from commtrace.dryrun.isolation import system_calls\n"
        "system_calls.unshare(system_calls.CLONE_NEWNS)\n"
        "system_calls.mount('', '/', flags=system_calls.MS_REC | system_calls.MS_PRIVATE)\n"
        f"work = Path({str(work)!r})\n"
        "system_calls.bind(str(work), str(work), read_only=True)\n"
        "print(isolated('private', work, ['/bin/sh', '-c', 'echo x > new']))\n"
    )
    assert "Read-only file system" in reader.communicate(timeout=60)[0]


def test_a_program_ends_with_the_dry_run(mode: str, work: Path) -> None:
    """After kill -9 of its parent, the program ends, its files are as before, and nothing stays mounted."""
    before = tree_hash(work)
    script = f"echo x > file; exec sleep {600 + os.getpid()}"
    parent = in_another_process(f"isolated({mode!r}, Path({str(work)!r}), ['/bin/sh', '-c', {script!r}])")
    try:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        processes.wait_for(lambda: any(_sleeps(pid) for pid in children.read_text().split()))
        (child,) = children.read_text().split()
        parent.kill()
        parent.communicate()
        processes.wait_for(lambda: not _sleeps(child))
    finally:
        parent.kill()
        for shm in Path("/dev/shm").glob(f"commtrace-test-{parent.pid}-*"):
            shutil.rmtree(shm)
    assert tree_hash(work) == before
    mounts = Path("/proc/mounts").read_text().splitlines()
    own = (str(work.parent), f"commtrace-test-{parent.pid}-")
    assert not [line for line in mounts if any(name in line for name in own)]


def _sleeps(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0] == "sleep"
    except OSError:
        return False
