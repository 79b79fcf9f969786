"""What a log says of an exception: its type, its message without data, and the lines that it passed.

A message may contain values of tensors, paths, or secrets. Only text that is not data is kept:

* If Python code raised the exception, the parts of the message that are string constants of the code in its traceback.
* If C or C++ code did, words of letters, without what is quoted or in brackets, and without numbers.

An ellipsis replaces everything else.
"""

from __future__ import annotations

import dis
import functools
import re
import traceback
from types import CodeType, FrameType, TracebackType
from typing import Any, Final

from commtrace.library_frames import is_library, is_of_commtrace

from .interrupts import signal_of_handler

MAX_MESSAGE: Final = 200
"""Characters of a message that are kept."""
MAX_LINES: Final = 8
"""Lines of a traceback that are kept: the innermost ones."""
ELLIPSIS: Final = "..."

_MIN_CONSTANT: Final = 4
_MAX_MESSAGE_READ: Final = 2000
_WORD: Final = re.compile(r"[A-Za-z]{1,16}[.,:;!?]?")
_QUOTED: Final = re.compile(
    r"""'[^']*(?:'|$)|"[^"]*(?:"|$)|`[^`]*(?:`|$)|\[[^\]]*(?:\]|$)|\{[^}]*(?:\}|$)|\([^)]*(?:\)|$)|<[^>]*(?:>|$)"""
)
_SECRET: Final = re.compile(r"(?i)pass|secret|token|credential|\bkeys?\b|api|auth|login|user|cookie|bearer")
_CONTRACTION: Final = re.compile(r"(?<=[A-Za-z])'(?=[a-z]{1,2}\b)")  # "can't" is not a quotation mark


def describe(error: BaseException) -> dict[str, Any]:
    """Return the facts about an exception that a log keeps.

    Returns:
        `type` (with its module, unless that is builtins), `message` ("": none that is not data), `signal` (number of
        the signal whose handler, one of the program, raised it; None if no handler did), `lines` (innermost
        first: file, line, function) and `at`, the index of the innermost line outside of installed libraries. An
        exception of a data-loader worker also has `worker`: the type, and the last line in the worker.
    """
    trace = traceback.walk_tb(error.__traceback__)
    lines = [(frame, line) for frame, line in trace if not is_of_commtrace(frame.f_code.co_filename)][::-1]
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    own = (at for at, (frame, _) in enumerate(lines) if not is_library(frame.f_code.co_filename))
    at = next(own, 0)
    kept = lines[:MAX_LINES] if at < MAX_LINES else [*lines[: MAX_LINES - 1], lines[at]]
    facts: dict[str, Any] = {
        "type": _printable(module + kind.__qualname__),
        "message": _message(error),
        "signal": _signal_of(error),
        "lines": [
            {"file": frame.f_code.co_filename, "line": number, "function": frame.f_code.co_name}
            for frame, number in kept
        ],
        "at": min(at, len(kept) - 1) if kept else 0,
    }
    worker = next(filter(None, (_worker(frame) for frame, _ in lines[:2])), None)
    if worker is not None:
        facts["worker"] = worker
    return facts


def _signal_of(error: BaseException) -> int | None:
    handlers = signal_of_handler()
    found = (handlers.get(frame.f_code) for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((number for number in found if number is not None), None)


def _printable(text: str) -> str:
    return re.sub(r"[^\w.<>]", "", text)[:100]


def _message(error: BaseException) -> str:
    """Return the message of an exception without data."""
    try:
        text = str(error)[:_MAX_MESSAGE_READ].strip()
    except Exception:
        return ""
    text = text.splitlines()[0] if text else ""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    by_python = _raised_by_python(error.__traceback__)
    kept = _constants_in(text, frames) if by_python else _words_in(text)
    return kept[:MAX_MESSAGE]


def _raised_by_python(trace: TracebackType | None) -> bool:
    """Return whether the innermost frame executed `raise`: no C code raised the exception."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return True
    instruction = trace.tb_frame.f_code.co_code[trace.tb_lasti] if trace.tb_lasti >= 0 else 0
    return dis.opname[instruction] in ("RAISE_VARARGS", "RERAISE")


def _constants_in(text: str, frames: list[FrameType]) -> str:
    """Return a message with an ellipsis for everything that is no string constant of the code that was running."""
    constants = {part for frame in frames[-4:] for part in _string_constants(frame.f_code)}
    is_kept = [False] * len(text)
    for part in sorted(constants, key=len, reverse=True):
        begin = text.find(part)
        while begin >= 0:
            is_kept[begin : begin + len(part)] = [True] * len(part)
            begin = text.find(part, begin + len(part))
    runs = "".join(letter if kept else "\0" for letter, kept in zip(text, is_kept, strict=True))
    return _joined(runs)


@functools.lru_cache(256)
def _string_constants(code: CodeType) -> frozenset[str]:
    """Return the string constants of code: literal texts, and the parts of f-strings and format strings."""
    found: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, str) and constant != code.co_name:
            pieces = re.split(r"\{[^}]*\}|%[-+ #0-9.]*[a-zA-Z]", constant)
            found |= {piece for line in pieces for piece in line.splitlines() if len(piece.strip()) >= _MIN_CONSTANT}
    return frozenset(found)


def _words_in(text: str) -> str:
    """Return the words of a message of C or C++ code."""
    text = _QUOTED.sub(" \0 ", _CONTRACTION.sub("\N{RIGHT SINGLE QUOTATION MARK}", text))
    if match := _SECRET.search(text):
        text = text[: match.start()] + " \0"
    words = [
        word if _WORD.fullmatch(word.replace("\N{RIGHT SINGLE QUOTATION MARK}", "")) else "\0" for word in text.split()
    ]
    return _joined(" ".join(words).replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))


def _joined(text: str) -> str:
    """Return a text with an ellipsis for each part of NUL characters; "" if it has no words."""
    text = re.sub(r"(?:\s*\0+)+", f" {ELLIPSIS}", text).strip()
    return text if re.search(r"[A-Za-z]{2}", text) else ""


_TRACEBACK_LINE: Final = re.compile(r'  File "([^"\n]+)", line (\d+), in (\S+)')


def _worker(frame: FrameType) -> dict[str, Any] | None:
    """Return what a frame of torch that raises an exception of a data-loader worker says about its origin."""
    wrapper = frame.f_locals.get("self") if frame.f_code.co_name == "reraise" else None
    if type(wrapper).__name__ != "ExceptionWrapper":
        return None
    kind, text = getattr(wrapper, "exc_type", None), str(getattr(wrapper, "exc_msg", ""))
    places = [(file, int(line), function) for file, line, function in _TRACEBACK_LINE.findall(text)][::-1]
    place = next((place for place in places if not is_library(place[0])), next(iter(places), None))
    facts: dict[str, Any] = {"type": _printable(getattr(kind, "__qualname__", ""))}
    return facts if place is None else {**facts, **dict(zip(("file", "line", "function"), place, strict=True))}
