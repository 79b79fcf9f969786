"""Table of the formats that can be imported. A new format is a module with a generator of events, and a row here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from commtrace.errors import ImportFileError

from . import deepspeed_comms, execution_trace, flight_recorder, kineto, mpip, nccl_inspector
from .events import Event
from .json_stream import read_head

HEAD: Final = 1 << 16
"""Number of first bytes of a file by which its format is told."""
_TAR: Final = b"ustar"
_TAR_AT: Final = 257
"""What a tar archive has, and where."""


class Format(NamedTuple):
    """A format of another tool's files.

    Attributes:
        name: Its name for `--format`.
        about: What writes it, for help and documentation.
        matches: Returns whether a file has this format, given its path and first (decompressed) bytes.
        events: Yields the events of a file. Raises ImportFileError.
        survey: Reads all files of a run before their events, and those that complete them, and returns what yields the
            events of one; None: each file says all about its own process. Raises ImportFileError.
        completes: Name of the format whose files, if there are any, this format's files complete: they are then not
            imported themselves, as both record the same calls.
    """

    name: str
    about: str
    matches: Callable[[Path, bytes], bool]
    events: Callable[[Path], Iterator[Event]]
    survey: Callable[[Sequence[Path], Sequence[Path]], Callable[[Path], Iterator[Event]]] | None = None
    completes: str = ""


FORMATS: Final[Sequence[Format]] = (
    Format(
        "flight-recorder",
        "dumps of PyTorch's NCCL flight recorder: pickle or JSON",
        flight_recorder.is_flight_recorder,
        flight_recorder.events,
    ),
    Format(
        "nccl-inspector",
        "JSON lines of the NCCL or RCCL Inspector: .log, .jsonl, also with .gz",
        nccl_inspector.is_inspector,
        nccl_inspector.events,
        nccl_inspector.survey,
    ),
    Format(
        "deepspeed-comms",
        "DeepSpeed's CommsLogger: the output of log_summary(), and its dictionaries as JSON",
        deepspeed_comms.is_comms_logger,
        deepspeed_comms.events,
    ),
    Format("mpip", "reports of mpiP: .mpiP", mpip.is_mpip, mpip.events),
    Format(
        "execution-trace",
        "execution traces of torch.profiler's ExecutionTraceObserver: .json, .json.gz",
        execution_trace.is_execution_trace,
        execution_trace.events,
        completes="kineto",
    ),
    Format("kineto", "traces of torch.profiler: .json, .json.gz", kineto.is_kineto, kineto.events, kineto.survey),
)
"""The formats; the first that matches a file is used."""


def format_named(name: str) -> Format:
    """Return the format with a name. Raises StopIteration if there is none."""
    return next(known for known in FORMATS if known.name == name)


def format_of(path: Path) -> Format | None:
    """Return the format of a file; None if it is none of these, an archive of files, or cannot be read."""
    try:
        head = read_head(path, HEAD)
    except OSError:
        return None
    if head[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
        return None
    return next((known for known in FORMATS if known.matches(path, head)), None)


def find_files(paths: Sequence[Path], named: Format | None = None) -> list[tuple[Path, Format]]:
    """Return the files to import with their formats: those given, and those in directories that have a known format.

    Args:
        paths: Files and directories.
        named: The format: of directories, the files that have it, or if none seems to, all; None: any.

    Raises:
        ImportFileError: A file does not exist or has no known format, a directory has none that has, or the files
            are of several formats: they may record the same calls, which would count twice.
    """
    files: list[tuple[Path, Format]] = []
    for path in paths:
        if path.is_dir():
            below = sorted(file for file in path.rglob("*") if file.is_file())
            told = [(file, known) for file in below if (known := format_of(file)) is not None]
            found = told
            if named is not None:
                found = [(file, known) for file, known in told if known is named] or [(file, named) for file in below]
            if not found:
                raise ImportFileError(f"{path}: no file in it has a known format ({_names()})")
            files += found
            continue
        if not path.is_file():
            raise ImportFileError(f"{path}: no such file")
        known = named or format_of(path)
        if known is None:
            raise ImportFileError(f"{path}: its format is not known; --format names it: {_names()}")
        files.append((path, known))
    first_of = {known.name: path for path, known in reversed(files)}
    if len({known.name for _, known in files if known.completes not in first_of}) > 1:
        found_in = ", ".join(f"{name} ({path.name})" for name, path in first_of.items())
        raise ImportFileError(
            f"{paths[0]}: files of several formats, which may record the same calls: {found_in}; import those of one "
            "with --format"
        )
    return files


def _names() -> str:
    return ", ".join(known.name for known in FORMATS)
