"""Which compiled library is loaded: the one that a wheel ships for this environment, or the one that was built."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import sysconfig
from pathlib import Path

import pytest
import recorders

from commtrace.errors import CommtraceError
from commtrace.hooks.native import libraries
from commtrace.hooks.native.libraries import MPI, TORCH, NotBuiltError, TorchBuild

GCC = ("_gcc", "_libstdcpp", "_cxxabi1011")
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@pytest.mark.parametrize(
    ("build", "tag"),
    [
        (TorchBuild("2.13.0", True, ()), "-torch2.13"),
        (TorchBuild("2.13.0+cpu", True, ()), "-torch2.13"),
        (TorchBuild("2.12.1+rocm6.4", True, ()), "-torch2.12"),
        (TorchBuild("2.6.0+cu124", False, GCC), "-torch2.6-oldstrings-gcc-libstdcpp-cxxabi1011"),
        (TorchBuild("2.6.0", True, GCC), "-torch2.6-gcc-libstdcpp-cxxabi1011"),
        (TorchBuild("2.8.0a0+5228986c39.nv25.5", True, GCC), ""),
        (TorchBuild("2.16.0.dev20261120+cpu", True, ()), ""),
        (TorchBuild("2.15.0a0+git1234567", True, ()), ""),
    ],
)
def test_only_releases_have_a_tag(build: TorchBuild, tag: str) -> None:
    assert build.tag == tag


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a wheel's libraries, and make the cache empty."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(libraries, "SHIPPED", folder)
    return folder


@pytest.fixture(scope="module")
def built() -> Path:
    """Return the path of a library that was built here."""
    return recorders.built_for_mpi()


def test_what_a_wheel_ships_is_loaded_and_not_built_again(
    shipped: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shipped / f"{MPI.name}{SUFFIX}"
    shutil.copy(built, copy)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("CXX", "no-compiler")
    assert MPI.build() == copy
    assert MPI.load().__file__ == str(copy)
    assert not (tmp_path / "empty").exists()


def test_what_was_built_replaces_what_cannot_be_loaded(
    shipped: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shipped / f"{MPI.name}{SUFFIX}").write_bytes(b"\x7fELF, and no more")
    assert MPI.load().__file__ == str(built)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    with pytest.raises(ImportError):
        MPI.load()


def test_a_library_of_another_suffix_or_torch_is_not_loaded(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    for name in (f"{MPI.name}.cpython-39-x86_64-linux-gnu.so", *(f"{TORCH.name}-torch2.{n}{SUFFIX}" for n in (6, 15))):
        (shipped / name).touch()
    with pytest.raises(NotBuiltError, match="no compiled wrappers for Python"):
        MPI.load()
    newer = dataclasses.replace(TORCH, torch=lambda: TorchBuild("2.16.0", True, ()))
    with pytest.raises(NotBuiltError, match=r"releases of torch 2\.6 to 2\.15 .* not for torch 2\.16\.0") as failed:
        newer.load()
    assert str(failed.value).endswith(libraries.REMEDY)


@pytest.mark.parametrize("wrong", ["frames_agree", "layout"])
def test_a_library_for_another_python_or_log_is_refused(
    wrong: str, shipped: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = MPI.load()
    monkeypatch.setattr(module, wrong, dict)
    monkeypatch.setattr(importlib.util, "module_from_spec", lambda _: module)
    monkeypatch.setattr(module.__spec__.loader, "exec_module", lambda _: None)
    with pytest.raises(CommtraceError, match=str(built)) as failed:
        MPI._load(built)
    assert libraries.REMEDY in str(failed.value)
