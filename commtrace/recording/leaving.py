"""How this process leaves its program: an uncaught exception of the main thread, or none.

Nothing that belongs to the program is replaced, neither `sys.excepthook` nor `threading.excepthook`: when the main
thread has finished, the interpreter still has the exception that it printed (`sys.last_value`). The row `leaving` is
written then, before the exit handlers, which may take long or never return. Processes of multiprocessing leave through
its finalizers, while the exception is being raised. A program that aborts its MPI job says so itself: the launcher then
kills all processes, in any order.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Final

from commtrace import identity
from commtrace.current_step import progress

from .exception_facts import describe
from .table_lines import TableLines

MAX_THREAD_EXCEPTIONS: Final = 16
"""Exceptions of threads that one process records."""
_FIRST: Final = 1_000_000
"""Priority of the finalizer of multiprocessing: before those of the program."""


class Leaving:
    """Writer of the rows `leaving` and `thread_exceptions` of one recorder."""

    def __init__(self, tables: TableLines, on_leave: Callable[[], object]) -> None:
        """Register with the interpreter.

        Args:
            tables: Where the rows are added.
            on_leave: Called when the process leaves its program, before the row is added.
        """
        self._tables, self._on_leave = tables, on_leave
        self._pid = os.getpid()
        self._is_over = False
        self._thread_exceptions = 0
        register: Callable[[Callable[[], None]], None] | None = getattr(threading, "_register_atexit", None)
        util, process = sys.modules.get("multiprocessing.util"), sys.modules.get("multiprocessing.process")
        try:
            if util is not None and process is not None and process.parent_process() is not None:
                util.Finalize(None, _if_alive(self._leave_multiprocessing), exitpriority=_FIRST)
            elif register is not None:
                register(_if_alive(self.leave))
        except RuntimeError:
            pass  # the interpreter is already shutting down; `end` calls `leave`

    def end(self) -> None:
        """Add no more rows: the log is being closed."""
        self._is_over = True

    def leave(self) -> None:
        """Add the row `leaving`, unless it was added. Never raises."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self._add(error if isinstance(error, BaseException) and _ended_main_thread(error) else None)

    def abort(self, status: int) -> None:
        """Add the row before the program aborts its job, which ends this process and the others. Never raises."""
        self._add(sys.exc_info()[1], status & 0xFF, aborts=True)

    def _leave_multiprocessing(self) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, SystemExit):
            self._add(error)
            return
        status = _status(error)
        # torch.multiprocessing ends a process whose function raised an exception with sys.exit(1).
        self._add(error.__context__ if status else None, status)

    def _add(self, error: BaseException | None, status: int | None = None, **facts: bool) -> None:
        if self._is_over or self._pid != os.getpid():
            return
        self._is_over = True
        try:
            self._on_leave()
        except Exception:
            pass  # only the order of the ends of processes is lost
        try:
            self._tables.add(
                "leaving", **identity.clock_readings(), step=progress.step, status=status,
                exception=None if error is None else describe(error), **facts,
            )  # fmt: skip
        except Exception:
            pass  # an exception whose attributes raise

    def thread_raised(self, error: BaseException) -> None:
        """Add the row `thread_exceptions` for an exception that ended a thread. Never raises."""
        if self._is_over or self._pid != os.getpid() or self._thread_exceptions >= MAX_THREAD_EXCEPTIONS:
            return
        self._thread_exceptions += 1
        try:
            self._tables.add(
                "thread_exceptions", **identity.clock_readings(), step=progress.step, exception=describe(error)
            )
        except Exception:
            pass  # as in `_add`


def _if_alive(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a method while its object exists: registering the method would keep its memory."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    return call


def _status(error: SystemExit) -> int:
    """Return the exit status of a process that ends by this exception."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _ended_main_thread(error: BaseException) -> bool:
    """Return whether an exception that the interpreter printed ended the main module.

    An interactive console prints exceptions, too, and C code may print those that it cannot pass on.
    """
    trace: TracebackType | None = error.__traceback__
    if trace is None:
        return False
    outermost = trace.tb_frame
    return outermost.f_back is None and outermost.f_code.co_name in ("<module>", "_run_module_as_main", "_run_code")
