"""Exceptions that end threads of the program, for the row `thread_exceptions` of its log.

Imported at the start of every process: it imports nothing that takes time.
"""

from __future__ import annotations

import sys
import threading

from .session import session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def follow_threads() -> Callable[[], None]:
    """Record exceptions that end threads which start from now on; `threading.excepthook` is called as before.

    Returns:
        A function that reverts this. It does nothing if this version of Python has no such place.
    """
    make: Any = getattr(threading, "_make_invoke_excepthook", None)
    if make is None:
        return lambda: None

    def make_invoke_excepthook() -> Callable[[Any], None]:
        invoke = make()

        def invoke_excepthook(thread: Any) -> None:
            error = sys.exc_info()[1]
            if error is not None and not isinstance(error, SystemExit):
                recorder = session.recorder
                if recorder is not None:
                    recorder.leaving.thread_raised(error)
            del error
            invoke(thread)

        return invoke_excepthook

    threading._make_invoke_excepthook = make_invoke_excepthook  # type: ignore[attr-defined]

    def undo() -> None:
        if threading._make_invoke_excepthook is make_invoke_excepthook:  # type: ignore[attr-defined]
            threading._make_invoke_excepthook = make  # type: ignore[attr-defined]

    return undo
