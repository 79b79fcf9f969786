"""Signals that end a command, also if what they interrupt swallows the exception that they raise.

Python raises KeyboardInterrupt wherever the main thread is. In a destructor, in the callback of a weak reference, or in
a function in C that asks for an attribute, the exception is dropped, and a command that goes on until it is
interrupted would go on. Its loop therefore calls `check`.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

_received: Final[list[int]] = []


@contextlib.contextmanager
def remembered(*numbers: int) -> Iterator[None]:
    """Remember these signals while the block runs, and raise for each: KeyboardInterrupt for SIGINT, else SystemExit.

    Nothing is changed outside the main thread, or for a signal that the process ignores.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
    heeded = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    for number in heeded:
        signal.signal(number, _note)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])
        _received.clear()


def check() -> None:
    """Raise for a signal that has arrived."""
    if _received:
        _end(_received[0])


def _note(number: int, _: FrameType | None) -> None:
    _received.append(number)
    _end(number)


def _end(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)
