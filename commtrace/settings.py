"""Every setting, with its meaning and its default. All come from the environment, so that every launcher passes them on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from commtrace.errors import SettingsError

DEFAULT_DIRECTORY = "commtrace-logs"


@dataclass(frozen=True)
class Settings:
    """How to record. A field `name` is set by the variable COMMTRACE_NAME; the directory by COMMTRACE itself."""

    directory: str
    """Where the log goes, absolute (programs change directory). COMMTRACE=1: `commtrace-logs` in the working directory."""

    sites: bool = True
    """Record the line of code of every call (COMMTRACE_SITES=0: do not; saves about a microsecond a call)."""

    ring_records: int = 16384
    """Records that a process holds before they are written (96 bytes each). When it is full, new calls are counted only."""

    drain_ms: int = 100
    """Milliseconds between writes to the log."""

    max_bytes: int = 1 << 30
    """Bytes of records that one process keeps on disk; the oldest are removed first, and counted. 1 GiB: 11 million calls."""

    segment_min_bytes: int = 1 << 20
    """Size of a process's first segment; each one is twice as long as the one before ..."""

    segment_max_bytes: int = 64 << 20
    """... up to this."""

    shm: str = "/dev/shm"
    """Memory-backed folder for the ring, which survives a killed process. Where it has no room, private memory is used."""

    exit_seconds: float = 10.0
    """How long a process may wait, when it ends, for its last records to be written."""


# What a value of each type looks like, for messages, and how it is read.
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_LEAST = {"ring_records": 16, "drain_ms": 1, "segment_min_bytes": 4096, "segment_max_bytes": 4096, "max_bytes": 8192}


def from_environment(environ: Mapping[str, str]) -> Settings | None:
    """Settings that the environment asks for; None where COMMTRACE is unset, empty or "0".

    Raises SettingsError, one line that names variable, value and mend.
    """
    target = environ.get("COMMTRACE", "")
    if target in ("", "0"):
        return None
    return for_directory(DEFAULT_DIRECTORY if target == "1" else target, environ)


def for_directory(directory: str | os.PathLike[str], environ: Mapping[str, str]) -> Settings:
    """As `from_environment`, with the directory given by the program."""
    known = {f"COMMTRACE_{name.upper()}": name for name in Settings.__dataclass_fields__ if name != "directory"}
    values: dict[str, object] = {}
    for variable, text in environ.items():
        if variable.startswith("COMMTRACE_") and text != "":
            if variable not in known:
                raise SettingsError(f"{variable}={text}: no such setting; there are {', '.join(sorted(known))}")
            values[known[variable]] = _value(variable, known[variable], text)
    settings = Settings(os.path.abspath(os.path.expanduser(directory)), **values)  # type: ignore[arg-type]
    if os.path.exists(settings.directory) and not os.path.isdir(settings.directory):
        raise SettingsError(f"COMMTRACE={settings.directory}: that is a file; name a directory")
    return settings


def _value(variable: str, name: str, text: str) -> object:
    kind = Settings.__dataclass_fields__[name].type
    if kind == "str":
        return text
    if kind == "bool":
        return _boolean(variable, text)
    if kind == "float":
        return _number(variable, text, float, "a number of seconds, such as 10")
    number = _number(variable, text, _size, "a whole number, such as 4096, 64k, 16m or 1g")
    if number < _LEAST.get(name, 1):
        raise SettingsError(f"{variable}={text}: too small; the least is {_LEAST.get(name, 1)}")
    return number


def _boolean(variable: str, text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise SettingsError(f"{variable}={text}: say 1 or 0")


def _size(text: str) -> int:
    stem = text.lower().removesuffix("ib").removesuffix("b")
    unit = _UNITS.get(stem[-1:], 1)
    return int(stem[:-1] if unit > 1 else stem) * unit


def _number(variable: str, text: str, read: type[float] | object, like: str) -> float | int:
    try:
        number: float | int = read(text)  # type: ignore[operator]
    except ValueError:
        raise SettingsError(f"{variable}={text}: not understood; give {like}") from None
    if not 0 <= number < 1 << 62:
        raise SettingsError(f"{variable}={text}: out of range; give {like}")
    return number
