"""Rank identity, and names of runs."""

from __future__ import annotations

import os
import re
import time

import pytest

from commtrace import identity, launchers
from commtrace.identity import RankIdentity

NAME = r"\d{8}-\d{6}-[0-9a-f]{6}"


@pytest.fixture(autouse=True)
def first_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_recordings", 0)
    for name in [name for name in os.environ if re.match("SLURM|PMI|OMPI|TORCHELASTIC|RANK|WORLD|LOCAL", name)]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("environ", "rank", "world", "local"),
    [
        ({}, 0, None, None),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, 3, 8, 1),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 2, 4, 0),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "2"}, 5, 6, 2),
        ({"RANK": "", "PMI_RANK": "7", "PMI_SIZE": "9"}, 7, 9, None),
        ({"RANK": "x"}, 0, None, None),
    ],
)
def test_what_launchers_say(environ: dict[str, str], rank: int, world: int | None, local: int | None) -> None:
    assert identity.rank_from_environment(environ) == RankIdentity(rank, world)
    assert launchers.launcher_value("local_rank", environ) == local


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, ""),
        ({"TORCHELASTIC_RUN_ID": "none"}, "torchelastic-0"),
        ({"TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "2"}, "torchelastic-job7-2"),
        ({"TORCHELASTIC_RUN_ID": "a1b2c3d4-1111-2222-3333-444444444444"}, "torchelastic-a1b2c3d4-0"),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_ID": "3"}, "slurm-7.3"),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_RESTART_COUNT": "1"}, "slurm-7.0-restart1"),
        ({"SLURM_JOB_ID": "7"}, ""),  # a batch script, not a task of srun
        ({"PMIX_NAMESPACE": "prterun-5"}, "pmix-prterun-5"),
    ],
)
def test_what_launchers_call_a_run(environ: dict[str, str], name: str) -> None:
    assert identity.launcher_run_name(environ) == name


def test_all_members_of_a_run_agree() -> None:
    proposals: list[str] = []

    def agree(proposal: str) -> str:
        proposals.append(proposal)
        return proposals[0]

    names = []
    for rank in range(3):
        identity._recordings = 0  # as in another process
        names.append(identity.agree_on_run(RankIdentity(rank, 3, agree)))
    assert len(set(names)) == 1
    assert len(set(proposals)) == 3
    assert re.fullmatch(NAME, names[0])


def test_the_launchers_name_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job/7 ü")
    assert re.fullmatch("torchelastic-job_7__-0-" + NAME, identity.agree_on_run(RankIdentity(0, 1)))


def test_without_a_store_a_launchers_own_name_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert identity.agree_on_run(RankIdentity(0, 2)) == "slurm-7.0"
    assert identity.agree_on_run(RankIdentity(0, 2)) == "slurm-7.0-2", "a second recording is a second run"
    identity.reset_after_fork()
    assert identity.agree_on_run(RankIdentity(0, 2)) == "slurm-7.0"


def test_names_are_fit_for_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "../node 1/x")
    assert identity.host() == "_node_1_x"
    monkeypatch.setattr("socket.gethostname", lambda: "..")
    assert identity.host() == "host"


def test_a_moment_on_both_clocks() -> None:
    before = time.monotonic_ns(), time.time_ns()
    readings = identity.clock_readings()
    assert before[0] <= readings["mono_ns"] <= time.monotonic_ns()
    assert before[1] <= readings["unix_ns"] <= time.time_ns()


def test_versions_and_host_facts() -> None:
    assert set(identity.versions()) >= {"python", "commtrace"}
    assert re.fullmatch(r"[0-9a-f-]{36}|", identity.boot_id())
