"""Exit status of this process, which exists only after Python and its exit handlers have ended.

glibc calls functions registered with `on_exit` with the status, at the very end. The function here is glibc's own
`fputc`, so that no code of Python has to run: it appends one byte, the status, to the tables file. There is no such
byte if the library has no `on_exit`, or if the process ends without `exit` (`os._exit`, a signal): `peer_watch` of
another process records the status then.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_UNBUFFERED = 2  # _IONBF


def append_exit_status(path: Path) -> None:
    """Append the exit status of this process to a file when the process ends. Never raises OSError."""
    library = ctypes.CDLL(None)
    if not all(hasattr(library, name) for name in ("on_exit", "fopen", "setvbuf", "fputc")):
        return
    library.fopen.restype = ctypes.c_void_p
    library.fopen.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    library.setvbuf.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    library.on_exit.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    stream = library.fopen(os.fsencode(path), b"ae")  # append; closed in programs that this one starts
    if stream:
        library.setvbuf(stream, None, _UNBUFFERED, 0)
        library.on_exit(ctypes.cast(library.fputc, ctypes.c_void_p), stream)
