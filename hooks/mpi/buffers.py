"""Bytes and element type of mpi4py's message arguments, in every form that mpi4py accepts.

A message is a buffer, or a list or tuple of a buffer, a count (and a displacement) and a datatype. Without a count,
mpi4py sends what the buffer holds, divided by the number of ranks in a collective with a share for each rank.
Nothing here reads the data, copies device memory, or keeps a buffer alive.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import index
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from mpi4py import MPI


class Element(NamedTuple):
    """A datatype: bytes sent per element, bytes from one element to the next, and its name."""

    size: int
    extent: int
    name: str | None


class Block(NamedTuple):
    """What is sent to, or received from, one rank: bytes and element type."""

    nbytes: int
    dtype: str | None


class Blocks(NamedTuple):
    """The shares of all ranks, in bytes, and the element type."""

    nbytes: list[int]
    dtype: str | None


# PEP 3118 format -> numpy's name of the type, which is torch's as well.
_FORMATS: Final = {letter: np.dtype(letter).name for letter in "?bBhHiIlLqQefdgFDG"}
_FORMATS.update((f"Z{letter.lower()}", _FORMATS[letter]) for letter in "FDG")

predefined: Final[dict[int, tuple[Any, Element]]] = {}
"""The datatypes that mpi4py names, by the id of their object, kept so that the id is not reused."""


def simple(message: Any, blocks: int = 1) -> Block:
    """Return one rank's share of a message with `blocks` equal shares.

    For a message that mpi4py rejects, return no bytes or raise an exception.
    """
    if type(message) is np.ndarray:
        return Block(message.nbytes // blocks, _numpy_name(message.dtype))
    if not isinstance(message, (list, tuple)):
        nbytes, _, name = _describe(message)
        return Block(nbytes // blocks, name)
    buffer, count, displacement, datatype = _unpack(message)
    element, entries = _elements(buffer, count, datatype)
    if count is None:
        count = (entries - index(displacement or 0)) // blocks
    return Block(index(count) * element.size, element.name)


def vector(message: Any, blocks: int) -> Blocks:
    """Return the shares of a message with a count for each of `blocks` ranks."""
    buffer, counts, _, datatype = (
        _unpack(message, several=True) if isinstance(message, (list, tuple)) else (message, None, None, None)
    )
    element, entries = _elements(buffer, counts, datatype)
    if counts is None:
        shares = [entries // blocks + (entries % blocks > i) for i in range(blocks)]
    elif hasattr(counts, "__index__") and not getattr(counts, "shape", ()):
        shares = [index(counts)] * blocks
    else:
        shares = [int(count) for count in counts]
    return Blocks([count * element.size for count in shares], element.name)


def vector_of_types(message: Any, blocks: int) -> Blocks:
    """Return the shares of a message with a count and a datatype for each of `blocks` ranks."""
    _, *layout, datatypes = message  # layout: nothing, or counts and displacements, which may be one tuple, or None
    counts = (layout[0] if len(layout) == 1 else layout)[0] if layout else None
    if counts is None:
        counts = [1] * blocks
    elements = [element_of(datatype) for datatype in datatypes]
    names = {element.name for element in elements}
    nbytes = [int(count) * element.size for count, element in zip(counts, elements, strict=False)]
    return Blocks(nbytes, names.pop() if len(names) == 1 else None)


def element_of(datatype: Any) -> Element:
    """Return the element of a datatype, or of a string that mpi4py accepts in its place."""
    known = predefined.get(id(datatype))
    if known is not None:
        return known[1]
    if isinstance(datatype, str):
        return element_of(MPI._typedict[datatype])
    return Element(datatype.Get_size(), datatype.Get_extent()[1], _type_name(datatype))


def fill_predefined() -> None:
    """Fill `predefined` once MPI is initialized: these datatypes are never freed.

    An MPI that was built without Fortran has names for Fortran's datatypes, but refuses to describe them.
    """
    with _errors_returned():
        for datatype in vars(MPI).values():
            if isinstance(datatype, MPI.Datatype) and datatype != MPI.DATATYPE_NULL:
                with suppress(MPI.Exception):
                    predefined[id(datatype)] = datatype, element_of(datatype)


@contextmanager
def _errors_returned() -> Iterator[None]:
    """Have MPI return errors of calls without a communicator, even if the program wants to be aborted by its own."""
    handlers = [(comm, comm.Get_errhandler()) for comm in (MPI.COMM_WORLD, MPI.COMM_SELF)]
    for comm, _ in handlers:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    try:
        yield
    finally:
        for comm, handler in handlers:
            comm.Set_errhandler(handler)
            handler.Free()


def _type_name(datatype: Any) -> str:
    """Return numpy's name of the type if numpy has it, else MPI's without its prefix; "derived" for a derived type."""
    typestr = datatype.typestr if hasattr(datatype, "typestr") else _typestr(datatype)
    if typestr[:1] in "biufc" and typestr[1:].isdigit():
        with suppress(TypeError):  # "i16" of mpi4py 4.0
            return str(np.dtype(typestr).name)
    if not datatype.is_predefined:
        return "derived"
    return str(datatype.Get_name()).removeprefix("MPI_").lower()


def _typestr(datatype: Any) -> str:
    """Return numpy's code of a type as `typestr` of mpi4py 4.0 and later; "" if it has none."""
    for code in (code for code, known in MPI._typedict.items() if known == datatype):
        with suppress(TypeError):
            return np.dtype(code).str[1:]
    return ""


def _unpack(message: Sequence[Any], *, several: bool = False) -> tuple[Any, Any, Any, Any]:
    """Return (buffer, count, displacement, datatype) as mpi4py reads a list; None for what is left out."""
    displacement = datatype = None
    if len(message) == 4:
        buffer, count, displacement, datatype = message
        return buffer, count, displacement, datatype
    if len(message) == 2:
        buffer, count = message
        if isinstance(count, (MPI.Datatype, str)):
            count, datatype = None, count
    else:
        buffer, count, datatype = message
    if isinstance(count, tuple if several else (tuple, list)):  # a vector's counts may be a list
        count, displacement = count
    return buffer, count, displacement, datatype


def _elements(buffer: Any, count: Any, datatype: Any) -> tuple[Element, int]:
    """Return the element type and, if the count is left out, how many elements the buffer holds."""
    if datatype is not None and count is not None:
        return element_of(datatype), 0
    nbytes, itemsize, name = _describe(buffer)
    element = Element(itemsize, itemsize, name) if datatype is None else element_of(datatype)
    return element, nbytes // element.extent if element.extent > 0 else 0


def _describe(buffer: Any) -> tuple[int, int, str | None]:
    """Return (bytes, bytes of an item, element type) of a buffer in any form that mpi4py accepts."""
    if buffer is None or isinstance(buffer, int):  # None, and MPI's constants: BOTTOM, IN_PLACE
        return 0, 1, None
    try:
        with memoryview(buffer) as view:
            return view.nbytes, view.itemsize, _format_name(view.format)
    except TypeError:
        return _describe_device_buffer(buffer)


def _describe_device_buffer(buffer: Any) -> tuple[int, int, str | None]:
    """Describe an owner of device memory, by its attributes if it has them, because an export may wait for a stream."""
    dtype = getattr(buffer, "dtype", None)
    itemsize = getattr(dtype, "itemsize", None)
    nbytes = getattr(buffer, "nbytes", None)
    if isinstance(itemsize, int) and isinstance(nbytes, int):
        return nbytes, itemsize, str(dtype).rpartition(".")[2]
    interface = getattr(buffer, "__cuda_array_interface__", None)
    if interface is None:
        return _describe_dlpack(buffer)
    dtype = np.dtype(interface["typestr"])
    return math.prod(interface["shape"]) * dtype.itemsize, dtype.itemsize, dtype.name


class _DLTensor(ctypes.Structure):
    """The first fields of a DLPack capsule's struct (dmlc/dlpack, dlpack.h)."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    ]


_NAME, _VERSIONED_NAME = b"dltensor", b"dltensor_versioned"
_BEFORE_VERSIONED_TENSOR: Final = 32
"""Bytes of DLManagedTensorVersioned before its tensor: two numbers of the version, two pointers, flags."""
_CODES: Final = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_ON_HOST: Final = 1

_pointer, _has_name = ctypes.PyDLL(None).PyCapsule_GetPointer, ctypes.PyDLL(None).PyCapsule_IsValid
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_has_name.argtypes = _pointer.argtypes


def _describe_dlpack(buffer: Any) -> tuple[int, int, str | None]:
    """Describe a buffer that supports DLPack only. As in mpi4py, the export waits for no stream."""
    on_host = buffer.__dlpack_device__()[0] == _ON_HOST
    capsule = buffer.__dlpack__() if on_host else buffer.__dlpack__(stream=-1)
    versioned = _has_name(capsule, _VERSIONED_NAME)
    address = _pointer(capsule, _VERSIONED_NAME if versioned else _NAME)
    # The capsule's destructor releases the export.
    tensor = _DLTensor.from_address(address + (_BEFORE_VERSIONED_TENSOR if versioned else 0))
    itemsize = tensor.bits * tensor.lanes // 8
    kind = _CODES.get(tensor.code)
    name = None if kind is None else "bool" if kind == "bool" else f"{kind}{tensor.bits}"
    return math.prod(tensor.shape[: tensor.ndim]) * itemsize, itemsize, name


@functools.cache
def _numpy_name(dtype: Any) -> str:
    return str(dtype.name)


def _format_name(text: str | None) -> str | None:
    return "uint8" if text is None else _FORMATS.get(text.lstrip("@=<>!"), text)
