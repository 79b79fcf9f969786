"""Purposes: why a library makes a call, kept per thread while the library is in one of its entry points.

A hook wraps an entry point and marks the calls in it (`Marked`). Both recorders read the mark of the calling thread,
and make it part of the call's row of the sites table (`CallSites.number`). Marks nest, and the innermost one counts. An
entry point that serves many others (a tensor is redistributed) marks only where nothing else has (`unclaimed`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from commtrace.patching import Wrapper
from commtrace.schema import Purpose

from .recorder_setup import count_fault

_UNMARKED: Final = 0

_facts: list[dict[str, Any]] = [{}]
_numbers: dict[tuple[object, ...], int] = {}
"""Number by the purpose's value (an Enum's hash is a function in Python), and the facts that go with it."""
_in_modules: dict[tuple[str, str], int] = {}
_lock = threading.Lock()


def number(purpose: Purpose, /, **facts: str | int) -> int:
    """Return the number, in this process, of a purpose and the facts that go with it, such as the module."""
    key = purpose._value_, *facts.items()
    known = _numbers.get(key)
    if known is None:
        with _lock:
            known = _numbers.setdefault(key, len(_facts))
            if known == len(_facts):
                _facts.append({"name": purpose.value, **facts})
    return known


def number_in_module(purpose: Purpose, module: str) -> int:
    """Return `number(purpose, module=module)`, which FSDP2 needs several times for each unit and step."""
    key = purpose._value_, module
    known = _in_modules.get(key)
    if known is None:
        known = _in_modules[key] = number(purpose, module=module)
    return known


def facts(purpose: int) -> dict[str, Any]:
    """Return what is known of a purpose by its number: its name, and facts such as the module."""
    return _facts[purpose]


# The purposes that the recorders find themselves, with the numbers that hooks/native/recording_kernels.h has, too.
OBJECTS: Final = number(Purpose.OBJECTS)
GRADIENTS: Final = number(Purpose.GRADIENTS)
USED_PARAMETERS: Final = number(Purpose.USED_PARAMETERS)
_RECOMPUTED: Final = number(Purpose.ACTIVATIONS_RECOMPUTED)

BARRIER: Final = number(Purpose.BARRIER)
"""Purpose of a barrier if a library calls it for no other reason. A program's barrier is its own."""


class _Thread(threading.local):
    """Marks of one thread."""

    purpose = _UNMARKED
    recomputing = False


_thread: Final = _Thread()
_mirrors: list[Callable[[int], object]] = []


def mirror(set_purpose: Callable[[int], object]) -> Callable[[], None]:
    """Pass each mark on to a recorder that cannot read it here. Return a function that ends this."""
    _mirrors.append(set_purpose)
    set_purpose(_thread.purpose)
    return lambda: _mirrors.remove(set_purpose)


def current() -> int:
    """Return the number of the calling thread's purpose; 0: none is known."""
    return _thread.purpose


def recomputing() -> bool:
    """Return whether the calling thread recomputes activations in a backward pass."""
    return _thread.recomputing


def mark(purpose: int) -> None:
    """Mark the calls of this thread from now on. Only within a `Marked`, which ends it."""
    _thread.purpose = purpose
    for set_purpose in _mirrors:
        set_purpose(purpose)


def unclaimed() -> bool:
    """Return whether no mark of this thread says more than that activations are recomputed."""
    return _thread.purpose in (_UNMARKED, _RECOMPUTED)


class Marked:
    """Context manager that marks the calls of this thread in a `with` block."""

    __slots__ = ("_before", "_purpose")

    def __init__(self, purpose: int) -> None:
        """Mark with a purpose, by its number."""
        self._purpose, self._before = purpose, _UNMARKED

    def __enter__(self) -> None:
        self._before = _thread.purpose
        mark(self._purpose)

    def __exit__(self, *_: object) -> None:
        mark(self._before)


class Recomputing(Marked):
    """Context manager in which this thread recomputes activations."""

    __slots__ = ("_outer",)

    def __init__(self) -> None:
        super().__init__(_RECOMPUTED)
        self._outer = False

    def __enter__(self) -> None:
        super().__enter__()
        self._outer, _thread.recomputing = _thread.recomputing, True

    def __exit__(self, *_: object) -> None:
        _thread.recomputing = self._outer
        super().__exit__()


def marking(purpose: Purpose) -> Wrapper:
    """Return a wrapper that marks the calls of a function."""
    marked = number(purpose)
    return marking_each(lambda *_, **__: marked)


def marking_each(read: Callable[..., int]) -> Wrapper:
    """Return a wrapper that marks the calls of a function with `read(arguments)`; 0 leaves the mark as it is.

    It runs several times per unit and step of FSDP, so it does in place what `Marked` does.
    """

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            try:
                purpose = read(*args, **kwargs)
            except Exception:
                count_fault()
                purpose = _UNMARKED
            before = _thread.purpose
            if not purpose or purpose == before:
                return original(*args, **kwargs)
            mark(purpose)
            try:
                return original(*args, **kwargs)
            finally:
                mark(before)

        return replacement

    return wrapper
