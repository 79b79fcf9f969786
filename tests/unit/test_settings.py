"""Settings from environment variables, and one error line for invalid values."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commtrace import settings
from commtrace.errors import SettingsError
from commtrace.settings import Settings


@pytest.mark.parametrize("environ", [{}, {"COMMTRACE": ""}, {"COMMTRACE": "0"}, {"COMMTRACE_SITES": "nonsense"}])
def test_off(environ: dict[str, str]) -> None:
    assert settings.from_environment(environ) is None


def test_one_means_the_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parsed = settings.from_environment({"COMMTRACE": "1"})
    assert parsed is not None
    assert parsed.directory == str(tmp_path / "commtrace-logs")


def test_a_directory_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for given, meant in (("a/../b", "b"), ("~/c", "home/c"), (str(tmp_path / "d"), "d")):
        assert settings.for_directory(given, {}).directory == str(tmp_path / meant)
    assert settings.for_directory(tmp_path, {}).directory == str(tmp_path)


def test_every_setting_has_a_variable(tmp_path: Path) -> None:
    given = {
        "COMMTRACE": str(tmp_path),
        "COMMTRACE_RECORDER": "python",
        "COMMTRACE_RANKS": "0-7,1024",
        "COMMTRACE_MODE": "summary",
        "COMMTRACE_SUMMARY_BYTES": "1m",
        "COMMTRACE_STEPS": "0-99,1000-9999:1000",
        "COMMTRACE_KEEP_SECONDS": "60",
        "COMMTRACE_SITES": "no",
        "COMMTRACE_DEVICE_TIMES": "yes",
        "COMMTRACE_RING_RECORDS": "64k",
        "COMMTRACE_DRAIN_MS": "5",
        "COMMTRACE_MAX_BYTES": "2GiB",
        "COMMTRACE_SEGMENT_MIN_BYTES": "8KB",
        "COMMTRACE_SEGMENT_MAX_BYTES": "1m",
        "COMMTRACE_SHM": "/tmp",
        "COMMTRACE_STALL_SECONDS": "0.5",
        "COMMTRACE_STALL_FACTOR": "3",
        "COMMTRACE_EXIT_SECONDS": "2.5",
        "COMMTRACE_SIMULATED": "0:run:/tmp",
    }
    parsed = settings.from_environment({**given, "HOME": "/", "OTHER": "x"})
    assert parsed is not None
    assert parsed.as_dict() == {
        "directory": str(tmp_path),
        "recorder": "python",
        "ranks": "0-7,1024",
        "mode": "summary",
        "summary_bytes": 1 << 20,
        "steps": "0-99,1000-9999:1000",
        "keep_seconds": 60.0,
        "sites": False,
        "device_times": True,
        "ring_records": 65536,
        "drain_ms": 5,
        "max_bytes": 2 << 30,
        "segment_min_bytes": 8192,
        "segment_max_bytes": 1 << 20,
        "shm": "/tmp",
        "stall_seconds": 0.5,
        "stall_factor": 3.0,
        "exit_seconds": 2.5,
        "simulated": "0:run:/tmp",
    }
    assert len(given) == len(settings.FIELDS)


def test_an_empty_variable_is_not_said(tmp_path: Path) -> None:
    assert settings.for_directory(tmp_path, {"COMMTRACE_DRAIN_MS": ""}).drain_ms == 500


@pytest.mark.parametrize(
    ("variable", "value", "fix"),
    [
        ("COMMTRACE_RING_RECORDS", "many", "give a whole number"),
        ("COMMTRACE_RING_RECORDS", "1.5", "give a whole number"),
        ("COMMTRACE_RING_RECORDS", "k", "give a whole number"),
        ("COMMTRACE_RING_RECORDS", "8", "from 16 to"),
        ("COMMTRACE_RING_RECORDS", "-1", "from 16 to"),
        ("COMMTRACE_RING_RECORDS", "1t", "from 16 to"),
        ("COMMTRACE_MAX_BYTES", "4096", "from 8192 to"),
        ("COMMTRACE_DRAIN_MS", "0", "from 1 to"),
        ("COMMTRACE_EXIT_SECONDS", "soon", "give a number"),
        ("COMMTRACE_EXIT_SECONDS", "-1", "from 0 to"),
        ("COMMTRACE_EXIT_SECONDS", "nan", "from 0 to"),
        ("COMMTRACE_SITES", "maybe", "give 1 or 0"),
        *(("COMMTRACE_RANKS", ranks, "give ranks such as") for ranks in ("all", "3-1", "1-", "-1", "2:", "0-8:0", ",")),
        *(("COMMTRACE_STEPS", steps, "give steps such as") for steps in ("first", "0-9999999999", f"0-9:{1 << 31}")),
        ("COMMTRACE_MODE", "cells", "give one of events, summary"),
        ("COMMTRACE_KEEP_SECONDS", "0", "from 1 to"),
        ("COMMTRACE_SIDES", "1", "choose from COMMTRACE_DEVICE_TIMES"),
    ],
)
def test_a_wrong_value(variable: str, value: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as raised:
        settings.for_directory(tmp_path, {variable: value})
    message = str(raised.value)
    assert message.startswith(f"{variable}={value}: ")
    assert fix in message
    assert "\n" not in message


def test_directories_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "file/below/it", "link"):
        with pytest.raises(SettingsError, match="is not a directory; give a directory"):
            settings.for_directory(tmp_path / name, {})
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(SettingsError, match=f"COMMTRACE={tmp_path}/a/b: {tmp_path} is not writable"):
        settings.for_directory(tmp_path / "a/b", {})


def test_the_working_directory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SettingsError, match="COMMTRACE=logs: the working directory is gone; give an absolute path"):
        settings.for_directory("logs", {})
    assert settings.for_directory(tmp_path, {}).directory == str(tmp_path)


def test_settings_stay_as_they_are(tmp_path: Path) -> None:
    created = Settings(str(tmp_path))
    with pytest.raises(AttributeError):
        created.sites = False
    with pytest.raises(TypeError, match="sides"):
        Settings(str(tmp_path), sides=1)
