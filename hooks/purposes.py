"""Purposes: why a library makes a call, kept per thread while the library is in one of its entry points.

A hook wraps an entry point and marks the calls in it (`Marked`; wrappers: `marking` and others). Both recorders read
the mark of the calling thread, and make it part of the call's row of the sites table (`CallSites.number`). Marks nest,
and the innermost one counts. An entry point that serves many others (a tensor is redistributed) marks only where
nothing else has (`unclaimed`).

A function that runs often and seldom communicates is not wrapped: its code has a purpose (`mark_code`), which the
recorders find among the frames that lead to a call, where nothing marks it (`CallSites.find`).
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, Protocol

from commtrace.patching import Patches, Wrapper
from commtrace.schema import Purpose

from .recorder_setup import count_fault

_UNMARKED: Final = 0

_facts: list[dict[str, Any]] = [{}]
_numbers: dict[tuple[object, ...], int] = {}
"""Number by the purpose's value (an Enum's hash is a function in Python), and the facts that go with it."""
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


class NumbersBy(dict[Any, int]):
    """`number(purpose, fact=value)` by the value of the fact, "" for None: for what is marked many times in a step."""

    def __init__(self, purpose: Purpose, fact: str) -> None:
        super().__init__()
        self._purpose, self._fact = purpose, fact

    def __missing__(self, value: str | int | None) -> int:
        self[value] = known = number(self._purpose, **{self._fact: "" if value is None else value})
        return known


def facts(purpose: int) -> dict[str, Any]:
    """Return what is known of a purpose by its number: its name, and facts such as the module."""
    return _facts[purpose]


# The purposes that the recorders find themselves, with the numbers that hooks/native/callsites.h has, too.
OBJECTS: Final = number(Purpose.OBJECTS)
GRADIENTS: Final = number(Purpose.GRADIENTS)
USED_PARAMETERS: Final = number(Purpose.USED_PARAMETERS)
RECOMPUTED: Final = number(Purpose.ACTIVATIONS_RECOMPUTED)
ACTIVATIONS: Final = number(Purpose.ACTIVATIONS)

BARRIER: Final = number(Purpose.BARRIER)
"""Purpose of a barrier if a library calls it for no other reason. A program's barrier is its own."""


codes: dict[int, tuple[CodeType, int]] = {}
"""Purposes of functions by the id of their code, which is kept so that the id stays valid: hashing a code reads it."""


def mark_code(patches: Patches, code: CodeType | None, purpose: int) -> None:
    """Give the functions with this code a purpose until the patches are undone. None: another version has no such."""
    if code is not None:
        codes[id(code)] = code, purpose
        patches.on_undo(codes.pop, id(code), None)


def code_of(function: Any) -> CodeType | None:
    """Return the code of a function, also within wrappers, which share theirs; None if it has none."""
    return getattr(inspect.unwrap(function), "__code__", None)


def of_code(code: CodeType) -> int:
    """Return the purpose of the calls of functions with this code; 0: they have none."""
    return codes.get(id(code), (code, _UNMARKED))[1]


KeyPart = str | int | tuple[int | str, ...]
"""What decides a purpose: an attribute of a function's first argument, by its name; another argument, by its position;
or, as (position, name, ...), a tuple that is an attribute of an argument. Its items are told apart by their types, and
by those of their attributes that are named here."""

FORWARD_PURPOSE: Final = "commtrace_forward"
"""Attribute of contexts of autograd functions: the number of the purpose that `read` returned in their forward pass."""


class Marking(NamedTuple):
    """How a wrapper marks the calls of a function."""

    purpose: int = 0
    """Number of their purpose."""
    read: Callable[..., int] | None = None
    """Returns it from the arguments of the call instead. 0 leaves the mark as it is."""
    key: tuple[KeyPart, ...] | None = None
    """What decides the result of `read`, besides whether autograd runs in this thread. Results are then kept with these
    values, which must be names, numbers or states, and no parts of a model. A negative result is not kept: `~result` is
    the purpose of that call."""
    of_caller: bool = False
    """Whether `read` gets, before the arguments, the first argument of the function that calls; None if it has none."""
    unclaimed: bool = False
    """Whether calls are marked only where nothing else has. `read` is then called only there."""
    in_module: bool = False
    """Whether the frames above decide the result of `read`, too: the innermost module that is being called, whether an
    optimizer steps or a forward pass is repeated; outside of modules, the `FORWARD_PURPOSE` of autograd functions."""

    def wrapper(self) -> Wrapper:
        """Return the wrapper."""
        return lambda original: _wrapped(original, self)


class Store(Protocol):
    """Where the marks of all threads are: here, or in a recorder that cannot read them here."""

    def current(self) -> int:
        """Return the calling thread's mark."""

    def exchange(self, purpose: int, /) -> int:
        """Set the calling thread's mark, and return the one before."""

    def wrapped(self, original: Callable[..., Any], marking: Marking, /) -> Callable[..., Any]:
        """Return a function that marks the calls of another one, as `Marking` says."""


class ThreadLocalStore(threading.local):
    """A store in Python."""

    purpose = _UNMARKED

    def current(self) -> int:
        """Return the calling thread's mark."""
        return self.purpose

    def exchange(self, purpose: int, /) -> int:
        """Set the calling thread's mark, and return the one before."""
        before, self.purpose = self.purpose, purpose
        return before

    def wrapped(self, original: Callable[..., Any], marking: Marking, /) -> Callable[..., Any]:
        """Return a function that marks the calls of another one, as `Marking` says. It keeps no results of `read`."""
        purpose, read, of_caller, unclaimed = marking.purpose, marking.read, marking.of_caller, marking.unclaimed

        def replacement(*args: Any, **kwargs: Any) -> Any:
            if unclaimed and _current():
                return original(*args, **kwargs)
            marked = purpose
            if read is not None:
                caller = (_own_argument(sys._getframe(1)),) if of_caller else ()
                marked = read(*caller, *args, **kwargs)
                marked = ~marked if marked < 0 else marked
            if not marked:
                return original(*args, **kwargs)
            before = _exchange(marked)  # not `Marked`: this runs many times in a step
            try:
                return original(*args, **kwargs)
            finally:
                _exchange(before)

        return replacement


def _own_argument(frame: FrameType) -> Any:
    """Return the first argument of the function that runs in a frame; None if it has none."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


_here = ThreadLocalStore()
_current: Callable[[], int] = _here.current
_exchange: Callable[[int], int] = _here.exchange
_wrapped: Callable[..., Callable[..., Any]] = _here.wrapped


def keep_in(store: Store) -> None:
    """Keep marks in a store from now on. The calling thread's mark goes with it, and those of others end.

    So do those of functions that an earlier store has wrapped, unless that is a store in Python.
    """
    global _current, _exchange, _wrapped
    purpose = current()
    _current, _exchange, _wrapped = store.current, store.exchange, store.wrapped
    _exchange(purpose)


def keep_here() -> None:
    """Keep marks here again."""
    keep_in(ThreadLocalStore())


def current() -> int:
    """Return the number of the calling thread's purpose; 0: none is known."""
    return _current()


def mark(purpose: int) -> int:
    """Mark the calls of this thread from now on, and return the mark before. Only within a `Marked`, which ends it."""
    return _exchange(purpose)


def unclaimed() -> bool:
    """Return whether nothing marks the calls of this thread."""
    return _current() == _UNMARKED


class Marked:
    """Context manager that marks the calls of this thread in a `with` block."""

    __slots__ = ("_before", "_purpose")

    def __init__(self, purpose: int) -> None:
        """Mark with a purpose, by its number."""
        self._purpose, self._before = purpose, _UNMARKED

    def __enter__(self) -> None:
        self._before = _exchange(self._purpose)

    def __exit__(self, *_: object) -> None:
        _exchange(self._before)


def marking(purpose: Purpose) -> Wrapper:
    """Return a wrapper that marks the calls of a function."""
    return Marking(number(purpose)).wrapper()


def marking_unclaimed(purpose: Purpose) -> Wrapper:
    """Return a wrapper that marks the calls of a function where nothing else does."""
    return Marking(number(purpose), unclaimed=True).wrapper()


def marking_each(read: Callable[..., int], *, of_caller: bool = False) -> Wrapper:
    """Return a wrapper that marks the calls of a function with `read(arguments)`; 0 leaves the mark as it is."""
    return Marking(read=_counting_faults(read), of_caller=of_caller).wrapper()


def marking_by(*key: KeyPart, read: Callable[..., int], of_caller: bool = False) -> Wrapper:
    """Return a wrapper that marks the calls of a function with `read(arguments)`, which `key` decides (`Marking`)."""
    return Marking(read=_counting_faults(read), key=key, of_caller=of_caller).wrapper()


def marking_in_modules(*key: KeyPart, read: Callable[..., int]) -> Wrapper:
    """Return a wrapper that marks a function's calls where nothing else does, by `key` and by the frames above.

    `read` notes the purpose of a module in the contexts of autograd functions within it (`FORWARD_PURPOSE`).
    """
    return Marking(read=_counting_faults(read), key=key, unclaimed=True, in_module=True).wrapper()


def _counting_faults(read: Callable[..., int]) -> Callable[..., int]:
    """Return a function that counts errors, and then leaves the mark of this call as it is."""

    def counting(*args: Any, **kwargs: Any) -> int:
        try:
            return read(*args, **kwargs)
        except Exception:
            count_fault()
            return ~_UNMARKED

    return counting
