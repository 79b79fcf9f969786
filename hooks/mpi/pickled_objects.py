"""Sizes of the objects that mpi4py pickles, measured where it calls its pickler, so that nothing is pickled twice.

`MPI.pickle` holds the functions that pickle and unpickle. A program may replace them by calling
`MPI.pickle.__init__`. The hook wraps the current ones in the same way, and notes sizes during
recorded calls.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from commtrace.hooks.recorder_setup import count_fault

from .extension_types import ExtensionPatches, namespace
from .tracer import current_sizes

_patches = ExtensionPatches()


class _Measured:
    """Wrapper of a function that pickles or unpickles."""

    def __init__(self, function: Callable[..., Any], loads: bool) -> None:
        self.function = function
        self.loads = loads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        sizes = current_sizes()
        if sizes is not None:
            try:
                if self.loads:
                    sizes.loaded.append(len(args[0]))
                else:
                    sizes.dumped.append(len(result))
            except Exception:
                count_fault()
        return result


@_patches.installer
def install() -> None:
    """Wrap the functions of `MPI.pickle`, and those that the program sets from here on."""
    initialize = namespace(MPI.Pickle)["__init__"]
    protocol = namespace(MPI.Pickle)["PROTOCOL"]
    default = MPI.Pickle().PROTOCOL

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if self is MPI.pickle:
            _wrap(initialize)

    def set_protocol(self: Any, value: Any) -> None:
        dumps = _functions(self)[0] if self is MPI.pickle else None
        if value is None and isinstance(dumps, _Measured) and dumps.function is _functions(MPI.Pickle())[0]:
            value = default  # as mpi4py does for its own pickler, which is wrapped
        protocol.__set__(self, value)

    __init__.__doc__, __init__.__qualname__ = initialize.__doc__, "Pickle.__init__"
    _patches.replace(MPI.Pickle, "__init__", lambda _: __init__)
    settable = property(protocol.__get__, set_protocol, None, protocol.__doc__)
    _patches.replace(MPI.Pickle, "PROTOCOL", lambda _: settable)
    _wrap(initialize)
    _patches.on_undo(_unwrap, initialize)


uninstall = _patches.undo


def _unwrap(initialize: Callable[..., None]) -> None:
    functions, settings = _functions(MPI.pickle), _settings(MPI.pickle)
    originals = [function.function if isinstance(function, _Measured) else function for function in functions]
    initialize(MPI.pickle, *originals, *settings)


def _wrap(initialize: Callable[..., None]) -> None:
    (dumps, loads), settings = _functions(MPI.pickle), _settings(MPI.pickle)
    initialize(MPI.pickle, _Measured(dumps, loads=False), _Measured(loads, loads=True), *settings)


def _settings(pickle: Any) -> list[Any]:
    """Return the further arguments with which a pickler was made: protocol and, since mpi4py 4.0, threshold."""
    return [getattr(pickle, name) for name in ("PROTOCOL", "THRESHOLD") if hasattr(pickle, name)]


def _functions(pickle: Any) -> tuple[Any, Any]:
    """Return (dumps, loads), found through the garbage collector: mpi4py does not export them.

    Raises:
        RuntimeError: This version of mpi4py stores them in another way.
    """
    referents = [referent for referent in gc.get_referents(pickle) if referent is not type(pickle)]
    functions = [referent for referent in referents if callable(referent)]
    if len(functions) != 2:
        raise RuntimeError("this version of mpi4py stores its pickler in an unknown way")
    return functions[0], functions[1]
