"""Building the native recorder, and recording without it. test_recorders.py and test_stress.py test its records."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import processes
import recorders

from commtrace.errors import CommtraceError
from commtrace.hooks.native import libraries


@pytest.mark.long
def test_without_a_library_the_python_recorder_records(tmp_path: Path) -> None:
    code = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
dist.all_reduce(torch.ones(3))
import time; time.sleep(0.5)
"""
    for recorder, message in (("native", "commtrace build"), ("auto", "")):
        log = tmp_path / recorder
        empty = tmp_path / "empty"
        result = processes.python(code, COMMTRACE=log, COMMTRACE_RECORDER=recorder, XDG_CACHE_HOME=empty)
        assert result.status == 0
        assert message in result.err
        assert processes.read_one(log).tables["process"][0]["recorder"] == "python"


def test_either_recorder_may_follow_the_other(tmp_path: Path) -> None:
    recorders.needs("native")
    order = ["native", "python", "native", "python", "python", "native", "native"]
    code = f"""
import os, commtrace, torch, torch.distributed as dist
from commtrace.network.process_exit import wait_for_threads
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
for number, recorder in enumerate({order}):
    os.environ["COMMTRACE_RECORDER"] = recorder
    commtrace.start(os.path.join({str(tmp_path)!r}, str(number)))
    for _ in range(number + 1):
        dist.all_reduce(tensor)
    commtrace.stop()
    dist.all_reduce(tensor)
wait_for_threads()
"""
    result = processes.python(code)
    assert result.status == 0, result.err
    for number, recorder in enumerate(order):
        log = processes.read_one(tmp_path / str(number))
        assert log.tables["process"][0]["recorder"] == recorder
        assert len(log.records) == number + 1


@pytest.mark.parametrize("recorder", recorders.RECORDERS)
def test_a_call_site_is_looked_up_once(recorder: str, tmp_path: Path) -> None:
    """However many sites a program has: in a cache that forgets, each step would look some up again."""
    recorders.needs(recorder)
    sites = 800
    calls = "\n".join("    dist.all_reduce(tensor)" for _ in range(sites))
    code = f"""
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
tensor = torch.ones(3)
for _ in range(5):
{calls}
"""
    assert processes.python(code, COMMTRACE=tmp_path / "log", COMMTRACE_RECORDER=recorder).status == 0
    stats = processes.read_one(tmp_path / "log").stats
    assert (stats["calls"], stats["first_calls"]) == (5 * sites, sites)


def test_without_a_compiler_one_line_says_what_is_missing(tmp_path: Path) -> None:
    result = processes.run(
        [sys.executable, "-m", "commtrace.cli", "build"], PATH=tmp_path, XDG_CACHE_HOME=tmp_path, CXX="c++"
    )
    assert result.status != 0
    assert "no C++ compiler (c++)" in result.err
    assert "Traceback" not in result.err


def test_a_cache_that_may_not_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorders.needs("native")
    (tmp_path / "commtrace").write_text("a file, where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CommtraceError, match=r"set XDG_CACHE_HOME") as failed:
        libraries.TORCH.build()
    assert str(tmp_path / "commtrace") in str(failed.value)


def test_another_torch_or_python_has_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import platform

    import torch

    paths = {libraries.TORCH.path()}
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "9.9.9")
        paths.add(libraries.TORCH.path())
    with monkeypatch.context() as other:
        other.setattr(platform, "python_version", lambda: "3.99.0")
        paths.add(libraries.TORCH.path())
    assert len(paths) == 3
    assert libraries.TORCH.path() in paths


def test_a_broken_library_is_not_used_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    libraries.TORCH.path().parent.mkdir(parents=True)
    libraries.TORCH.path().write_bytes(b"\x7fELF, and no more")
    code = "import torch; import torch.distributed"
    result = processes.python(code, COMMTRACE=tmp_path / "log", COMMTRACE_RECORDER="auto", XDG_CACHE_HOME=tmp_path)
    assert result.status == 0
    assert "the native recorder cannot be used" in result.err
