"""Every setting, its meaning, its default. All come from the environment, so that every launcher passes them on."""

from __future__ import annotations

import os

from commtrace.errors import SettingsError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEFAULT_DIRECTORY = "commtrace-logs"


class Settings:
    """How to record. A field `name` is set by the variable COMMTRACE_NAME; the directory by COMMTRACE itself.

    Frozen. Not a dataclass, which would cost every process that never communicates five milliseconds of imports.
    """

    directory: str
    """Where the log goes, absolute (programs change directory). COMMTRACE=1: `commtrace-logs` in the current one."""

    recorder: str = "auto"
    """Which recorder: "native" (in C++, made by `commtrace build`), "python", or "auto": native where it is built."""

    sites: bool = True
    """Record the line of code of every call (COMMTRACE_SITES=0: do not)."""

    device_times: bool = False
    """Take the times of calls on a device (native recorder): two events in the program's stream for each call."""

    ring_records: int = 16384
    """Records that a process holds before they are written (96 bytes each). When it is full, calls are only counted."""

    drain_ms: int = 100
    """Milliseconds between writes to the log."""

    max_bytes: int = 1 << 30
    """Bytes of records that one process keeps on disk; the oldest go first, and are counted. 1 GiB is 11 million."""

    segment_min_bytes: int = 1 << 20
    """Size of a process's first segment; each one is twice as long as the one before ..."""

    segment_max_bytes: int = 64 << 20
    """... up to this."""

    shm: str = "/dev/shm"
    """Memory-backed folder for the ring, which survives a killed process. Without room there, private memory serves."""

    exit_seconds: float = 10.0
    """How long a process may wait, when it ends, for its last records to be written."""

    simulated: str = ""
    """Set by `commtrace dryrun` for the ranks that it simulates: their run, and a folder that they share."""

    def __init__(self, directory: str, **values: object) -> None:
        """Raises TypeError for a name that is no setting."""
        for name in values:
            if name not in FIELDS:
                raise TypeError(f"{name}: no such setting")
        self.__dict__.update(values, directory=directory)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: settings stay as they are while tracing is on")

    def as_dict(self) -> dict[str, object]:
        """All settings by name, for the log."""
        return {name: getattr(self, name) for name in FIELDS}


FIELDS: dict[str, str] = dict(Settings.__annotations__)
"""Name -> type, as it is written above."""

_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_CHOICES = {"recorder": ("auto", "native", "python")}
# Least and most that make sense; the ring has to fit into memory.
_LIMITS = {
    "ring_records": (16, 1 << 24),
    "drain_ms": (1, 60_000),
    "segment_min_bytes": (4096, 1 << 40),
    "segment_max_bytes": (4096, 1 << 40),
    "max_bytes": (8192, 1 << 60),
    "exit_seconds": (0, 86_400),
}


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
    known = {f"COMMTRACE_{name.upper()}": name for name in FIELDS if name != "directory"}
    values: dict[str, object] = {}
    for variable, text in environ.items():
        if variable.startswith("COMMTRACE_") and text != "":
            if variable not in known:
                raise SettingsError(f"{variable}={text}: no such setting; there are {', '.join(sorted(known))}")
            values[known[variable]] = _value(variable, known[variable], text)
    settings = Settings(_absolute(directory), **values)
    _check_directory(settings.directory)
    return settings


def _absolute(directory: str | os.PathLike[str]) -> str:
    try:
        return os.path.abspath(os.path.expanduser(directory))
    except FileNotFoundError:
        message = f"COMMTRACE={os.fspath(directory)}: the working directory is gone; give an absolute path"
        raise SettingsError(message) from None


def _check_directory(directory: str) -> None:
    """What is there already, of the directory or above it, must be a directory that may be written to."""
    here = directory
    while not os.path.lexists(here) and here != os.path.dirname(here):
        here = os.path.dirname(here)
    if not os.path.isdir(here):
        raise SettingsError(f"COMMTRACE={directory}: {here} is not a directory; name a directory")
    if not os.access(here, os.W_OK | os.X_OK):
        raise SettingsError(f"COMMTRACE={directory}: {here} may not be written to; name a directory that may")


def _value(variable: str, name: str, text: str) -> object:
    kind = FIELDS[name]
    if kind == "str":
        return _chosen(variable, name, text)
    if kind == "bool":
        return _boolean(variable, text)
    if kind == "float":
        number: float = _number(variable, text, float, "a number of seconds, such as 10")
    else:
        number = _number(variable, text, _size, "a whole number, such as 4096, 64k, 16m or 1g")
    least, most = _LIMITS[name]
    if not least <= number <= most:
        raise SettingsError(f"{variable}={text}: out of range; give a number from {least} to {most}")
    return number


def _chosen(variable: str, name: str, text: str) -> str:
    choices = _CHOICES.get(name)
    if choices is not None and text not in choices:
        raise SettingsError(f"{variable}={text}: not understood; give one of {', '.join(choices)}")
    return text


def _boolean(variable: str, text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise SettingsError(f"{variable}={text}: not understood; give 1 or 0")


def _size(text: str) -> int:
    stem = text.lower().removesuffix("ib").removesuffix("b")
    unit = _UNITS.get(stem[-1:], 1)
    return int(stem[:-1] if unit > 1 else stem) * unit


def _number(variable: str, text: str, read: Callable[[str], float], like: str) -> float:
    try:
        return read(text)
    except ValueError:
        raise SettingsError(f"{variable}={text}: not understood; give {like}") from None
