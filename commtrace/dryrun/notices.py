"""What a dry run cannot give, with the line of the program that asked for it, each once.

DeepSpeed and torch ask for numbers themselves (has a gradient overflowed? how long is it?): a dry run goes on as with
zeros, and these are not worth a line. What the program itself asks for is.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType
from typing import Any, Final

from commtrace.recording.log_writer import warn
from commtrace.recording.session import session

_STANDARD: Final = sysconfig.get_paths()["stdlib"] + os.sep
# `commtrace.startup` has imported the hooks before it makes the process a simulated rank.
_OWN: Final = tuple(
    os.path.dirname(file or "") + os.sep for file in (__file__, sys.modules["commtrace.hooks"].__file__)
)
_ROOTS: Final = ("/site-packages/", "/dist-packages/")

# Files of torch that do what their caller says; the rest of torch asks for itself.
_PASSING_ON: Final = (
    "_compile.py", "_jit_internal.py", "_ops.py", "_tensor.py", "_tensor_str.py", "functional.py", "overrides.py",
    "serialization.py", "utils/_contextlib.py", "utils/_device.py", "utils/_python_dispatch.py",
)  # fmt: skip

_seen: set[tuple[str, int, str]] = set()
_rows: list[dict[str, Any]] = []
_told = 0


def add_notice(what: str, *, led_to: bool = False) -> None:
    """The program asks for something that is not there; `what` says it, and what is done in place of it.

    `led_to`: also where torch or DeepSpeed asks, as the line of the program has it do.
    """
    frame = _asking(led_to)
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
    """What the log does not have yet goes there, as soon as there is one."""
    global _told
    recorder = session.recorder
    if recorder is not None:
        while _told < len(_rows):
            _told += 1
            recorder.tables.add("notices", **_rows[_told - 1])


def _asking(led_to: bool) -> FrameType | None:
    """The innermost frame that does not just pass a request on; None where that is torch's own, or DeepSpeed's.

    Those are passed over as well where it is the program's line that is wanted.
    """
    torch, passing = _folder("torch"), tuple(_folder("torch") + file for file in _PASSING_ON)
    libraries = (torch, _folder("deepspeed"))
    if led_to:
        passing += libraries
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", _folder("numpy"), *passing, *_OWN)) and not _is_standard(file):
            return None if file.startswith(libraries) else frame
        frame = frame.f_back
    return None


def _is_standard(file: str) -> bool:
    return file.startswith(_STANDARD) and not any(root in file for root in _ROOTS)


def _folder(library: str) -> str:
    file = getattr(sys.modules.get(library), "__file__", None)
    return os.path.dirname(file) + os.sep if file else "\0"  # nothing begins with that
