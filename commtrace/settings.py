"""Settings of recording and their defaults, read from environment variables, which every launcher can forward."""

from __future__ import annotations

import os

from commtrace.errors import SettingsError
from commtrace.rank_ranges import rank_ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

DEFAULT_DIRECTORY = "commtrace-logs"
KEPT_PER_SECOND = 1024
"""Number of kept records for which there is room, per second of `keep_seconds`."""


class Settings:
    """Settings of recording. The variable COMMTRACE_NAME sets the field `name`; COMMTRACE itself sets the directory.

    Immutable. Not a dataclass: importing dataclasses would cost every process five milliseconds.
    """

    directory: str
    """Absolute path of the log (programs change directory). COMMTRACE=1: `commtrace-logs` in the current directory."""

    recorder: str = "auto"
    """The recorder: "native" (C++, from a wheel or `commtrace build`), "python", or "auto": native if there is one."""

    ranks: str = ""
    """Ranks that are recorded, such as "0-7,64" or "0-1016:8" (every eighth); empty: all."""

    mode: str = "events"
    """Contents of the log: "events" (a record of each call) or "summary" (counts, sizes and histograms of times)."""

    summary_bytes: int = 10_000_000
    """Maximum size of the summary of one process per day, in bytes."""

    steps: str = ""
    """Steps that are recorded, such as "0-99,1000-999999999:1000"; empty: all. Start-up is always recorded."""

    keep_seconds: float = 30.0
    """Seconds of calls that a process keeps in memory if not all records go to the log.

    Each second takes 96 KiB of memory, room for 1,024 calls; at a higher rate, the calls cover less time.
    """

    sites: bool = True
    """Whether to record the call site of every call."""

    device_times: bool = False
    """Whether to time calls on a device (native recorder), with two events in the program's stream for each call."""

    ring_records: int = 16384
    """Number of records (96 bytes each) that a process holds in memory; beyond it, calls are only counted.

    Each write to the log scans all of them: a million take tens of milliseconds, 16,384 a fiftieth of a millisecond.
    """

    drain_ms: int = 500
    """Milliseconds between writes to the log. A write takes about half a millisecond, with the interpreter's lock."""

    max_bytes: int = 1 << 30
    """Bytes of records that one process keeps on disk; the oldest are removed and counted. 1 GiB holds 11 million."""

    segment_min_bytes: int = 1 << 20
    """Bytes of the first segment of a process; each later one is twice as large."""

    segment_max_bytes: int = 64 << 20
    """Bytes of the largest segment."""

    shm: str = "/dev/shm"
    """Memory-backed folder of the ring, which survives a killed process. If it lacks space, private memory is used."""

    stall_seconds: float = 5.0
    """Seconds without progress after which a process writes the Python stacks of its threads to the log; 0: never.

    Progress is the begin of a call, or the return from the one that the process is in.
    """

    stall_factor: float = 2.0
    """The pause must also be this many times as long as the longest one before it."""

    exit_seconds: float = 10.0
    """Timeout in seconds for writing the last records when a process exits."""

    simulated: str = ""
    """Set by `commtrace dryrun` for the ranks that it simulates: their run and a folder that they share."""

    def __init__(self, directory: str, **values: object) -> None:
        """Set fields by name; others keep their defaults. Raises TypeError for an unknown name."""
        for name in values:
            if name not in FIELDS:
                raise TypeError(f"{name}: no such setting")
        self.__dict__.update(values, directory=directory)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: settings cannot change while tracing is on")

    @property
    def kept_records(self) -> int:
        """Number of records, of any step, that are kept in memory; 0 if all records go to the log."""
        return int(self.keep_seconds * KEPT_PER_SECOND) if self.steps or self.mode == "summary" else 0

    def as_dict(self) -> dict[str, object]:
        """Return all settings by name, for the log."""
        return {name: getattr(self, name) for name in FIELDS}


FIELDS: dict[str, str] = dict(Settings.__annotations__)
"""Setting -> name of its type."""

_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_CHOICES = {"recorder": ("auto", "native", "python"), "mode": ("events", "summary")}
# Minimum and maximum values; the ring must fit into memory.
_LIMITS = {
    "ring_records": (16, 1 << 24),
    "drain_ms": (1, 60_000),
    "segment_min_bytes": (4096, 1 << 40),
    "segment_max_bytes": (4096, 1 << 40),
    "max_bytes": (8192, 1 << 60),
    "exit_seconds": (0, 86_400),
    "keep_seconds": (1, 3600),
    "stall_seconds": (0, 86_400),
    "stall_factor": (1, 1000),
    "summary_bytes": (100_000, 1 << 40),
}


def from_environment(environ: Mapping[str, str]) -> Settings | None:
    """Return the settings in an environment; None if COMMTRACE is unset, empty or "0".

    Raises:
        SettingsError: A variable has an invalid value; the message names the variable, the value and the fix.
    """
    target = environ.get("COMMTRACE", "")
    if target in ("", "0"):
        return None
    return for_directory(DEFAULT_DIRECTORY if target == "1" else target, environ)


def for_directory(directory: str | os.PathLike[str], environ: Mapping[str, str]) -> Settings:
    """Return the settings in an environment, for a log directory that the program passes. Raises SettingsError."""
    known = {f"COMMTRACE_{name.upper()}": name for name in FIELDS if name != "directory"}
    values: dict[str, object] = {}
    for variable, text in environ.items():
        if variable.startswith("COMMTRACE_") and text != "":
            if variable not in known:
                raise SettingsError(f"{variable}={text}: no such setting; choose from {', '.join(sorted(known))}")
            values[known[variable]] = _value(variable, known[variable], text)
    return Settings(_checked_directory(os.fspath(directory)), **values)


def _checked_directory(directory: str) -> str:
    """Return an absolute path. It, or its nearest existing parent, must be a writable directory."""
    try:
        existing = absolute = os.path.abspath(os.path.expanduser(directory))
    except FileNotFoundError:
        raise SettingsError(f"COMMTRACE={directory}: the working directory is gone; give an absolute path") from None
    while not os.path.lexists(existing) and existing != os.path.dirname(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise SettingsError(f"COMMTRACE={absolute}: {existing} is not a directory; give a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise SettingsError(f"COMMTRACE={absolute}: {existing} is not writable; give a writable directory")
    return absolute


def _check_ranges(variable: str, name: str, text: str) -> None:
    try:
        rank_ranges(text)
    except ValueError as error:
        raise SettingsError(f"{variable}={text}: {error}; give {name} such as 0-7,64 or 0-1016:8") from None


def _size(text: str) -> int:
    stem = text.lower().removesuffix("ib").removesuffix("b")
    unit = _UNITS.get(stem[-1:], 1)
    return int(stem[:-1] if unit > 1 else stem) * unit


_KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "str": (str, "text"),
    "bool": (lambda text: _BOOLEANS[text.lower()], "1 or 0"),
    "float": (float, "a number, such as 10"),
    "int": (_size, "a whole number, such as 4096, 64k, 16m or 1g"),
}
"""Type of a setting -> its parser and a description of valid values."""


def _value(variable: str, name: str, text: str) -> object:
    parse, expected = _KINDS[FIELDS[name]]
    if name in _CHOICES and text not in _CHOICES[name]:
        raise SettingsError(f"{variable}={text}: invalid value; give one of {', '.join(_CHOICES[name])}")
    try:
        value = parse(text)
    except (KeyError, ValueError):
        raise SettingsError(f"{variable}={text}: invalid value; give {expected}") from None
    if name in ("ranks", "steps"):
        _check_ranges(variable, name, text)
    minimum, maximum = _LIMITS.get(name, (value, value))
    if not minimum <= value <= maximum:
        raise SettingsError(f"{variable}={text}: out of range; give a number from {minimum} to {maximum}")
    return value
