"""How real processes are set up, in their logs: `commtrace diff` names what was changed, and no secret is written."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mpi_launch
import pytest
from processes import PROGRAMS, run
from secrets_list import SECRETS

pytest.importorskip("torch")

from commtrace.analyses.compare.recorded_calls import read_calls
from commtrace.analyses.compare.two_runs import compare_calls
from commtrace.analyses.grouping import rows_of
from commtrace.run import open_run

Differences = list[tuple[str, str, str]]

CGROUPS = Path("/sys/fs/cgroup")
LOOPBACK = (
    "ip link set lo up mtu 65536 && ip link add eth7 type veth peer name eth8 && ip addr add 10.7.0.1/24 dev eth7"
)
NCCL = 'const char version[] = "NCCL version 2.{}.5+cuda12.4";'
UCX = 'const char *ucp_get_version_string(void) {{ return "1.{}.0"; }}'
SECRET_VALUES = {value for value in SECRETS.values() if len(value) > 5}


def run_cases(folder: Path, cases: dict[str, dict[str, Any]]) -> dict[str, Path]:
    """Run the cases, each traced into a log; return the logs."""
    arguments = [json.dumps({**case, "log": str(folder / name)}) for name, case in cases.items()]
    result = run([sys.executable, PROGRAMS / "set_up.py", *arguments], limit=600, GLOO_SOCKET_IFNAME="lo")
    assert result.status == 0, result.err[-4000:]
    return {name: folder / name for name in cases}


def differences(a: Path, b: Path) -> Differences:
    """Return name, difference (first value -> second) and ranks of the settings that differ between two logs."""
    verdict = compare_calls(*(read_calls(open_run(path)) for path in (a, b)))
    assert verdict.equal
    return [(row.name, f"{row.a} -> {row.b}", row.ranks) for row in rows_of(verdict.settings)]


def library(folder: Path, name: str, source: str) -> str:
    """Build a library that has the name and the version of a real one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "code.c").write_text(source)
    path = str(folder / name)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", path, str(folder / "code.c")], check=True)
    return path


@contextlib.contextmanager
def limited(controller: str, name: str, value: str) -> Iterator[str]:
    """Make a control group of version 1 with a limit."""
    folder = CGROUPS / controller / f"commtrace-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / name).write_text(value)
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield str(folder)
    finally:
        folder.rmdir()


@pytest.mark.long
def test_equal_runs_have_no_differences_and_a_variable_is_named(tmp_path: Path) -> None:
    always_different = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/a1", "NCCL_COMM_ID": "10.0.0.1:4001"}
    cases: dict[str, dict[str, Any]] = {
        "a": {"variables": {**SECRETS, **always_different}},
        "b": {"variables": {**SECRETS, **{name: value + "2" for name, value in always_different.items()}}},
        "c": {"variables": {**SECRETS, "NCCL_ALGO": "Tree"}},
        "d": {"variables": SECRETS, "variables_of_rank_1": {"NCCL_PROTO": "LL"}},
    }
    logs = run_cases(tmp_path, cases)
    assert differences(logs["a"], logs["b"]) == []
    assert differences(logs["a"], logs["c"]) == [("NCCL_ALGO", "- -> Tree", "")]
    assert differences(logs["a"], logs["d"]) == [("NCCL_PROTO", "- -> LL", "1")]
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"NCCL_API_KEY" in written
    assert [value for value in SECRET_VALUES if value.encode() in written] == []
    table = open_run(logs["d"]).table("setup").set_index(["name", "ranks"])
    assert table.loc[("NCCL_PROTO", "1"), "deviates"]
    assert table.loc[("interface listened on", "0-1"), "value"] == "lo"
    assert table["deviates"].sum() == 2
    groups = open_run(logs["a"]).table("communicators")
    assert groups[["backend", "size", "groups", "ranks"]].to_numpy().tolist() == [["cpu:gloo,cuda:gloo", 2, 1, "0-1"]]
    assert (groups["create_ns"] > 0).all()


@pytest.mark.exhaustive
def test_the_setting_that_was_changed_is_named(tmp_path: Path) -> None:
    if shutil.which("cc") is None or shutil.which("ip") is None or os.geteuid():
        pytest.skip("needs a C compiler, ip, and root")
    old, new = tmp_path / "old", tmp_path / "new"
    nccl, new_nccl = (library(path, "libnccl.so.2", NCCL.format(minor)) for path, minor in ((old, 21), (new, 27)))
    ucx, new_ucx = (library(path, "libucp.so.0", UCX.format(minor)) for path, minor in ((old, 15), (new, 18)))
    copy = tmp_path / "copy" / "libnccl.so.2"
    copy.parent.mkdir()
    shutil.copy(nccl, copy)
    variables = {"UCX_TLS": "tcp,self"}
    base: dict[str, Any] = {"libraries": [nccl, ucx], "variables": variables, "network": LOOPBACK}
    up = f"{LOOPBACK} && ip link set eth7 up && ip link set eth8 up"
    memory_limit, cpu_limit = ("memory", "memory.limit_in_bytes", str(4 << 30)), ("cpu", "cpu.cfs_quota_us", "150000")
    with limited(*memory_limit) as memory, limited(*cpu_limit) as cpu:
        changes: dict[str, tuple[dict[str, Any], Differences]] = {
            "equal": ({}, []),
            "copied": ({"libraries": [str(copy), ucx]}, []),
            "nccl": (
                {"libraries": [new_nccl, ucx]},
                [("library NCCL", f"2.21.5+cuda12.4 ({nccl}) -> 2.27.5+cuda12.4 ({new_nccl})", "")],
            ),
            "ucx": ({"libraries": [nccl, new_ucx]}, [("library UCX", f"1.15.0 ({ucx}) -> 1.18.0 ({new_ucx})", "")]),
            "no_ucx": ({"libraries": [nccl]}, [("library UCX", f"1.15.0 ({ucx}) -> -", "")]),
            "variable": ({"variables": {"UCX_TLS": "sm,self"}}, [("UCX_TLS", "tcp,self -> sm,self", "")]),
            "unset": ({"variables": {}}, [("UCX_TLS", "tcp,self -> -", "")]),
            "one_rank": ({"variables_of_rank_1": {"FI_PROVIDER": "tcp"}}, [("FI_PROVIDER", "- -> tcp", "1")]),
            "threads": ({"threads": 3}, [("threads of torch", "1 -> 3", "")]),
            "omp": (
                {"variables": {**variables, "OMP_NUM_THREADS": "2"}, "threads": 2},
                [("OMP_NUM_THREADS", "1 -> 2", "")],
            ),
            "cores": ({"cores": [0]}, [("cores", "0-1 (2) -> 0", "")]),
            "memory": ({"cgroup": [memory]}, [("memory limit", "- -> 4.00 GiB", "")]),
            "cpu": ({"cgroup": [cpu]}, [("processor limit", "- -> 1.5 cores", "")]),
            "mtu": (
                {"network": LOOPBACK.replace("65536", "9000")},
                [("interface lo", "up, MTU 65536 -> up, MTU 9000", "")],
            ),
            "up": ({"network": up}, [("interface eth7", "down, MTU 1500 -> up, MTU 1500", "")]),
        }
        used = {**base, "network": up, "variables": {**variables, "GLOO_SOCKET_IFNAME": "eth7"}}
        cases = {"base": base, "used": used, **{name: {**base, **change} for name, (change, _) in changes.items()}}
        logs = run_cases(tmp_path / "logs", cases)
    assert {name: differences(logs["base"], logs[name]) for name in changes} == {
        name: expected for name, (_, expected) in changes.items()
    }
    assert differences(logs["up"], logs["used"]) == [("GLOO_SOCKET_IFNAME", "lo -> eth7", "")]
    settings = open_run(logs["used"]).table("setup").set_index("name")["value"]
    assert settings["interface listened on"] == "eth7"


@pytest.mark.exhaustive
def test_a_library_that_LD_LIBRARY_PATH_chooses(tmp_path: Path) -> None:  # noqa: N802
    program = tmp_path / "program.py"
    program.write_text(
        "import ctypes\nctypes.CDLL('libnccl.so.2')\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Dup().Barrier()\n"
    )
    files = {}
    for name, version in (("a", 21), ("b", 27)):
        source = f'const char version[] = "NCCL version 2.{version}.3+cuda12.4";'
        files[name] = library(tmp_path / name, "libnccl.so.2", source)
    logs = {}
    for mpi in mpi_launch.NAMES:
        mpi_launch.needs(mpi)
        for name, log in (("a", "a1"), ("a", "a2"), ("b", "b")):
            logs[mpi, log] = tmp_path / f"log-{mpi}-{log}"
            mpi_launch.succeeds(mpi, program, ranks=2, log=logs[mpi, log], LD_LIBRARY_PATH=tmp_path / name)
        assert differences(logs[mpi, "a1"], logs[mpi, "a2"]) == []
        text = f"2.21.3+cuda12.4 ({files['a']}) -> 2.27.3+cuda12.4 ({files['b']})"
        assert differences(logs[mpi, "a1"], logs[mpi, "b"]) == [("library NCCL", text, "")]
    libraries = {
        mpi: [*open_run(logs[mpi, "a1"]).table("setup").query("kind == 'library'")["name"]] for mpi in mpi_launch.NAMES
    }
    assert libraries["openmpi"][:2] == ["library NCCL", "library Open MPI"]
    assert libraries["mpich"][:2] == ["library MPICH", "library NCCL"]
    groups = open_run(logs["mpich", "a1"]).table("communicators")
    assert groups["create_ns"].notna().any()
