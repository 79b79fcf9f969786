"""Notices: lines of the program that need what a dry run does not have, each reported once.

Reads by DeepSpeed and torch themselves (has a gradient overflowed? what is its norm?) are not reported: the dry run
continues as if the values were zero.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType
from typing import Any, Final

from commtrace.errors import warn
from commtrace.hook_table import PACKAGE
from commtrace.library_frames import path_below_packages
from commtrace.recording.session import session

_STDLIB: Final = sysconfig.get_paths()["stdlib"] + os.sep
# The hooks are in sys.modules: `commtrace.startup` imports them before it makes the process a simulated rank.
_OWN: Final = tuple(
    os.path.dirname(file or "") + os.sep for file in (os.path.dirname(__file__), sys.modules[PACKAGE].__file__)
)

# Files of torch that read values for their caller; the rest of torch reads them for itself.
_FORWARDING_FILES: Final = (
    "_compile.py", "_jit_internal.py", "_ops.py", "_tensor.py", "_tensor_str.py", "functional.py", "overrides.py",
    "serialization.py", "utils/_contextlib.py", "utils/_device.py", "utils/_python_dispatch.py",
)  # fmt: skip

_seen: set[tuple[str, int, str]] = set()
_rows: list[dict[str, Any]] = []
_recorded = 0


def add_notice(what: str, *, also_libraries: bool = False) -> None:
    """Report, in the log and on stderr, that the program needs what a dry run does not have.

    Args:
        what: What is missing, and what the dry run does instead.
        also_libraries: Whether calls by torch and DeepSpeed are reported too, with the program's line that led to them.
    """
    frame = _calling_frame(also_libraries)
    if frame is None:
        return
    file, line = frame.f_code.co_filename, frame.f_lineno
    if (file, line, what) in _seen:
        return
    _seen.add((file, line, what))
    function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # since Python 3.11
    _rows.append({"file": file, "line": line, "function": function, "what": what})
    warn(f"dry run: {file}:{line} ({function}): {what}")
    record_notices()


def record_notices() -> None:
    """Add the notices to the log if the process already has one."""
    global _recorded
    recorder = session.recorder
    if recorder is not None:
        while _recorded < len(_rows):
            _recorded += 1
            recorder.tables.add("notices", **_rows[_recorded - 1])


def _calling_frame(also_libraries: bool) -> FrameType | None:
    """Return the innermost frame that reads for itself; None if in torch or DeepSpeed, unless `also_libraries`."""
    torch, forwarding = _folder("torch"), tuple(_folder("torch") + file for file in _FORWARDING_FILES)
    libraries = (torch, _folder("deepspeed"))
    if also_libraries:
        forwarding += libraries
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", _folder("numpy"), *forwarding, *_OWN)) and not _is_stdlib(file):
            return None if file.startswith(libraries) else frame
        frame = frame.f_back
    return None


def _is_stdlib(file: str) -> bool:
    return file.startswith(_STDLIB) and path_below_packages(file) is None


def _folder(library: str) -> str:
    file = getattr(sys.modules.get(library), "__file__", None)
    return os.path.dirname(file) + os.sep if file else "\0"  # no path begins with it
