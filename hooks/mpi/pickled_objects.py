"""How large the objects are that mpi4py pickles: seen where it calls its pickler, so that nothing is pickled twice.

mpi4py keeps the functions that pickle and unpickle in `MPI.pickle`, where a program may put its own ones. Ours stand
around whichever are there, and note the size of what passes while a call is under way. They are put in with the first
call that pickles, through the same door as a program's own: its `__init__`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from commtrace.hooks.recorder_setup import fault

from .extension_types import ExtensionPatches, namespace
from .tracer import pickling

_patches = ExtensionPatches()


class _Noting:
    """Stands for a function that pickles or unpickles."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


class _Dumps(_Noting):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        data = self.function(*args, **kwargs)
        objects = pickling()
        if objects is not None:
            try:
                objects.dumped.append(len(data))
            except Exception:
                fault()
        return data


class _Loads(_Noting):
    def __call__(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        objects = pickling()
        if objects is not None:
            try:
                objects.loaded.append(len(data))
            except Exception:
                fault()
        return self.function(data, *args, **kwargs)


def install() -> None:
    """Stand around the functions of `MPI.pickle`, and around those that the program gives it from here on."""
    initialize = namespace(MPI.Pickle)["__init__"]
    protocol = namespace(MPI.Pickle)["PROTOCOL"]
    default = MPI.Pickle().PROTOCOL

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if self is MPI.pickle:
            _wrap(initialize)

    def set_protocol(self: Any, value: Any) -> None:
        dumps = _functions()[0] if self is MPI.pickle else None
        if value is None and isinstance(dumps, _Dumps) and dumps.function is _functions_of(MPI.Pickle())[0]:
            value = default  # as mpi4py has it for its own pickler, which ours stands for
        protocol.__set__(self, value)

    __init__.__doc__, __init__.__qualname__ = initialize.__doc__, "Pickle.__init__"
    _patches.put(MPI.Pickle, "__init__", __init__)
    _patches.put(MPI.Pickle, "PROTOCOL", property(protocol.__get__, set_protocol, None, protocol.__doc__))
    _wrap(initialize)


def uninstall() -> None:
    """Put the functions back."""
    if not _patches:
        return
    _patches.undo()
    dumps, loads, protocol, threshold = _functions()
    own = [each.function if isinstance(each, _Noting) else each for each in (dumps, loads)]
    namespace(MPI.Pickle)["__init__"](MPI.pickle, *own, protocol, threshold)


def _wrap(initialize: Callable[..., None]) -> None:
    dumps, loads, protocol, threshold = _functions()
    initialize(MPI.pickle, _Dumps(dumps), _Loads(loads), protocol, threshold)


def _functions() -> tuple[Any, Any, Any, Any]:
    return _functions_of(MPI.pickle)


def _functions_of(pickle: Any) -> tuple[Any, Any, Any, Any]:
    """(dumps, loads, protocol, threshold), which it keeps to itself. Raises RuntimeError where they cannot be had."""
    kept = [each for each in gc.get_referents(pickle) if each is not type(pickle)]
    protocol, threshold = pickle.PROTOCOL, pickle.THRESHOLD
    functions = [each for each in kept if callable(each)]
    if len(functions) != 2:
        raise RuntimeError("mpi4py keeps its pickler in a way that is not known")
    return functions[0], functions[1], protocol, threshold
