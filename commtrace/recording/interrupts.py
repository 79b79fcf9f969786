"""Exceptions that signal handlers of the program raise while commtrace's code runs.

A handler runs between any two instructions of the main thread. If it raises (to limit the time of a call, for example),
the exception passes through the code that was running. It must reach the program and not count as a hook error.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
import traceback
from types import CodeType
from typing import Any


def reraise_if_from_signal_handler() -> None:
    """Re-raise the current exception if a signal handler of the program raised it. Call this in an `except`."""
    error = sys.exc_info()[1]
    if error is not None and threading.current_thread() is threading.main_thread():
        handlers = signal_of_handler()
        if handlers and any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise error


def signal_of_handler() -> dict[CodeType, int]:
    """Return the number of the signal that each handler in Python handles, by the handler's code."""
    codes = ((_code(signal.getsignal(number)), int(number)) for number in signal.valid_signals())
    return {code: number for code, number in codes if code is not None}


def _code(handler: Any) -> CodeType | None:
    """Return the code of a signal handler: a function, a method, a partial, or an object with `__call__`."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__"):
        function = vars(type(handler)).get("__call__")
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
