"""Distinguishing exceptions of the program's signal handlers from faults of commtrace."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from commtrace.recording.interrupts import reraise_if_from_signal_handler


class AlarmError(Exception):
    """The exception that handlers raise."""


class Handlers:
    """Signal handlers of the kinds that programs have."""

    def method(self, *_: object) -> None:
        raise AlarmError

    @staticmethod
    def static(*_: object) -> None:
        raise AlarmError

    def __call__(self, *_: object) -> None:
        self.method()


def function(*_: object) -> None:
    raise AlarmError


KINDS: dict[str, Callable[..., Any]] = {
    "function": function,
    "method": Handlers().method,
    "static method": Handlers.static,
    "object": Handlers(),
    "partial": functools.partial(functools.partial(function, 1), 2),
    "lambda": lambda *_: function(),
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def guarded(work: Callable[[], object]) -> Exception | None:
    """Do something, and return the exception that it has raised, unless that is a signal handler's."""
    try:
        work()
    except Exception as error:
        reraise_if_from_signal_handler()
        return error
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_a_handlers_exception_goes_on(kind: str) -> None:
    signal.signal(signal.SIGUSR1, KINDS[kind])
    with pytest.raises(AlarmError):
        guarded(lambda: signal.raise_signal(signal.SIGUSR1))


def test_a_fault_of_ours_does_not() -> None:
    signal.signal(signal.SIGUSR1, KINDS["method"])
    assert isinstance(guarded(lambda: int("x")), ValueError)
    reraise_if_from_signal_handler()  # nor does it raise where no exception is handled


def test_in_another_thread_there_are_no_handlers() -> None:
    signal.signal(signal.SIGUSR1, function)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            guarded(function)
        except AlarmError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert raised == []
