"""Pickles of strangers: only containers, numbers and texts are read, in memory that their length bounds.

A pickle is a program. To refuse classes keeps it from running code, not from asking for 64 GB: the unpickler allocates
a list up to the largest index that a pickle gives an object, and a buffer of any length that it states. So all
operators are looked at before any is run.

Lists may still contain each other, or one list many times: what is read of them must not be written out as text.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from typing import Any, Final

_OPERATORS: Final = {opcode.name: opcode for opcode in pickletools.opcodes}
_NAMES: Final = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
# Those that torch and Python write of protocols 2 to 5, but for classes, functions, sets, byte arrays and buffers.
_FIXED: Final = (
    "PROTO", "FRAME", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "BINFLOAT", "EMPTY_LIST",
    "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "SETITEM", "SETITEMS",
    "BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET",
)  # fmt: skip
# Their argument is a number of so many bytes; but for the index of LONG_BINPUT, so many bytes follow it.
_COUNTED: Final = {
    "LONG1": 1, "LONG4": 4, "SHORT_BINUNICODE": 1, "BINUNICODE": 4, "BINUNICODE8": 8, "SHORT_BINBYTES": 1,
    "BINBYTES": 4, "BINBYTES8": 8, "LONG_BINPUT": 4,
}  # fmt: skip


def _code(name: str) -> bytes:
    return _OPERATORS[name].code.encode("latin-1")


def _fixed() -> re.Pattern[bytes]:
    """Return a pattern of 1 to 100 operators of `_FIXED` in turn: matching keeps a state for each."""
    by_length: dict[int, bytes] = {}
    for name in _FIXED:
        argument = _OPERATORS[name].arg
        length = 0 if argument is None else argument.n
        by_length[length] = by_length.get(length, b"") + re.escape(_code(name))
    each = [b"[%b].{%d}" % (codes, length) for length, codes in by_length.items()]
    each.append(b"%b..[\0-\x0f]\0" % re.escape(_code("LONG_BINPUT")))  # the first million need no look
    return re.compile(b"(?:%b){1,100}" % b"|".join(each), re.DOTALL)


_RUN: Final = _fixed()
_NUMBER_BYTES: Final = {_code(name)[0]: length for name, length in _COUNTED.items()}
_PUT, _STOP = _code("LONG_BINPUT")[0], _code("STOP")[0]


def load(data: bytes) -> Any:
    """Return the containers, numbers and texts of a pickle.

    Raises:
        pickle.UnpicklingError: It is damaged, or has anything else.
    """
    _check_operators(data)
    try:
        return pickle.Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # damaged pickles raise nearly anything
        raise pickle.UnpicklingError(f"damaged pickle: {type(error).__name__}: {error}") from error


def _check_operators(data: bytes) -> None:
    """Check that a pickle has plain operators only, and that no length or index in it is larger than itself."""
    at, end = 0, len(data)
    while at < end:
        code = data[at]
        size = _NUMBER_BYTES.get(code)
        if size is not None:
            number = int.from_bytes(data[at + 1 : at + 1 + size], "little")
            if number >= end:
                raise pickle.UnpicklingError(f"damaged pickle: {number:,} at byte {at:,} is more than its length")
            at += 1 + size + (0 if code == _PUT else number)
        elif (run := _RUN.match(data, at)) is not None:
            at = run.end()
        elif code == _STOP:
            return
        else:
            name = _NAMES.get(code, hex(code))
            raise pickle.UnpicklingError(f"it has more than containers, numbers and texts ({name} at byte {at:,})")
    raise pickle.UnpicklingError("damaged pickle: it is cut off")
