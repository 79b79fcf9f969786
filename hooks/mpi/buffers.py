"""How many bytes a message of mpi4py holds, and of what: every form of buffer that mpi4py takes, by its own rules.

A message is a buffer, or a list or tuple of a buffer, a count (with a displacement, perhaps) and a datatype. Where the
count is left out, mpi4py takes what the buffer holds; of a collective with a share for each rank, divided by the ranks.
Nothing here touches the data, takes a device's memory across, or holds on to a buffer.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from operator import index
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from mpi4py import MPI


class Element(NamedTuple):
    """A datatype: bytes that travel for each, bytes from one to the next, and its name."""

    size: int
    extent: int
    name: str | None


class Block(NamedTuple):
    """What goes to, or comes from, one rank: bytes and element type."""

    nbytes: int
    dtype: str | None


class Blocks(NamedTuple):
    """The shares of all ranks, in bytes, and the element type."""

    nbytes: list[int]
    dtype: str | None


NOTHING: Final = Block(0, None)

# PEP 3118 formats by their letter, and the kinds of numpy's type strings: to numpy's names, which are torch's too.
_FORMATS: Final = {
    "?": "bool", "b": "int8", "B": "uint8", "h": "int16", "H": "uint16", "i": "int32", "I": "uint32",
    "l": f"int{8 * np.dtype('l').itemsize}", "L": f"uint{8 * np.dtype('l').itemsize}", "q": "int64", "Q": "uint64",
    "e": "float16", "f": "float32", "d": "float64", "g": np.dtype("g").name, "Zf": "complex64", "Zd": "complex128",
    "Zg": np.dtype("G").name, "F": "complex64", "D": "complex128", "G": np.dtype("G").name,
}  # fmt: skip
_KINDS: Final = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}

_names: dict[Any, str] = {}  # of numpy's types
_predefined: dict[
    int, tuple[Any, Element]
] = {}  # by id of mpi4py's own object, which is kept so that its id stays its own


def simple(message: Any, blocks: int = 1) -> Block:
    """The share of one rank, of a message with `blocks` equal ones; of a buffer without a count, a `blocks`-th of it.

    What mpi4py will refuse counts as nothing, or raises.
    """
    if type(message) is np.ndarray:
        return Block(message.nbytes // blocks, _numpy_name(message.dtype))
    if not isinstance(message, (list, tuple)):
        return _whole(message, blocks)
    buffer, count, displacement, datatype = _parts(message)
    if datatype is None:
        nbytes, itemsize, name = _described(buffer)
        if count is not None:
            return Block(index(count) * itemsize, name)
        return Block((nbytes - index(displacement or 0) * itemsize) // blocks, name)
    element = element_of(datatype)
    if count is None:
        count = _entries(buffer, element, displacement) // blocks
    return Block(index(count) * element.size, element.name)


def vector(message: Any, blocks: int) -> Blocks:
    """The shares of a message with a count for each of `blocks` ranks."""
    if isinstance(message, (list, tuple)):
        buffer, counts, _, datatype = _parts(message, several=True)
    else:
        buffer, counts, datatype = message, None, None
    if datatype is None:
        nbytes, itemsize, name = _described(buffer)
        element = Element(itemsize, itemsize, name)
    else:
        element = element_of(datatype)
        nbytes = 0 if counts is not None else _described(buffer)[0]
    if counts is None:
        entries = nbytes // element.extent if element.extent > 0 else 0
        shares = [entries // blocks + (entries % blocks > i) for i in range(blocks)]
    elif hasattr(counts, "__index__") and not getattr(counts, "shape", ()):
        shares = [index(counts)] * blocks
    else:
        shares = [int(count) for count in counts]
    return Blocks([count * element.size for count in shares], element.name)


def vector_of_types(message: Any, blocks: int) -> Blocks:
    """As `vector`, with a datatype for each rank."""
    _, counts, _, datatypes = (message[0], None, None, message[1]) if len(message) == 2 else _four(message)
    elements = [element_of(datatype) for datatype in datatypes]
    shares = [1] * blocks if counts is None else [int(count) for count in counts]
    names = {element.name for element in elements}
    total = [count * element.size for count, element in zip(shares, elements, strict=False)]
    return Blocks(total, names.pop() if len(names) == 1 else None)


def element_of(datatype: Any) -> Element:
    """A datatype, or what mpi4py takes for one's name."""
    known = _predefined.get(id(datatype))
    if known is not None:
        return known[1]
    if isinstance(datatype, str):
        datatype = MPI._typedict[datatype]
        return element_of(datatype)
    return _measured(datatype)


def _measured(datatype: Any) -> Element:
    return Element(datatype.Get_size(), datatype.Get_extent()[1], _type_name(datatype))


def learn_predefined() -> None:
    """The datatypes that mpi4py names, once MPI has been initialized: they are never freed."""
    for name in dir(MPI):
        datatype = getattr(MPI, name)
        if isinstance(datatype, MPI.Datatype) and datatype != MPI.DATATYPE_NULL:
            _predefined[id(datatype)] = datatype, _measured(datatype)


def predefined() -> list[tuple[Any, Element]]:
    """What `learn_predefined` has found."""
    return list(_predefined.values())


def _type_name(datatype: Any) -> str:
    """Numpy's name where numpy has such a type, MPI's (without its prefix) where not; a derived one is "derived"."""
    kind = datatype.typestr
    if kind[:1] in _KINDS and kind[1:].isdigit():
        return "bool" if kind[0] == "b" else f"{_KINDS[kind[0]]}{8 * int(kind[1:])}"
    if not datatype.is_predefined:
        return "derived"
    return str(datatype.Get_name()).removeprefix("MPI_").lower()


def _parts(message: Sequence[Any], *, several: bool = False) -> tuple[Any, Any, Any, Any]:
    """(buffer, count, displacement, datatype), as mpi4py takes a list apart; None for what is left out."""
    size = len(message)
    buffer = count = displacement = datatype = None
    if size == 2:
        buffer, count = message
        if isinstance(count, (MPI.Datatype, str)):
            count, datatype = None, count
    elif size == 3:
        buffer, count, datatype = message
    else:
        return _four(message)
    pairs = tuple if several else (tuple, list)  # a list of counts is what a vector has
    if isinstance(count, pairs):
        count, displacement = count
    return buffer, count, displacement, datatype


def _four(message: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    if len(message) == 3:
        buffer, (count, displacement), datatype = message
        return buffer, count, displacement, datatype
    buffer, count, displacement, datatype = message
    return buffer, count, displacement, datatype


def _entries(buffer: Any, element: Element, displacement: Any) -> int:
    nbytes = _described(buffer)[0]
    return (nbytes // element.extent if element.extent > 0 else 0) - index(displacement or 0)


def _whole(buffer: Any, blocks: int) -> Block:
    nbytes, _, name = _described(buffer)
    return Block(nbytes // blocks, name)


def _described(buffer: Any) -> tuple[int, int, str | None]:
    """(bytes, bytes of an item, element type) of a buffer in any of the forms that mpi4py takes."""
    if buffer is None or isinstance(buffer, int):  # None, and MPI's constants: BOTTOM, IN_PLACE
        return 0, 1, None
    try:
        with memoryview(buffer) as view:
            return view.nbytes, view.itemsize, _format_name(view.format)
    except TypeError:
        return _on_device(buffer)


def _on_device(buffer: Any) -> tuple[int, int, str | None]:
    """What DLPack or CUDA's array interface is for. Its owner's attributes, as an export may wait for a stream."""
    dtype = getattr(buffer, "dtype", None)
    itemsize = getattr(dtype, "itemsize", None)
    nbytes = getattr(buffer, "nbytes", None)
    if isinstance(itemsize, int) and isinstance(nbytes, int):
        return nbytes, itemsize, str(dtype).rpartition(".")[2]
    interface = getattr(buffer, "__cuda_array_interface__", None)
    if interface is None:
        return _exported(buffer)
    dtype = np.dtype(interface["typestr"])
    entries = 1
    for length in interface["shape"]:
        entries *= length
    return entries * dtype.itemsize, dtype.itemsize, dtype.name


class _DLTensor(ctypes.Structure):
    """The beginning of what a DLPack capsule holds (dmlc/dlpack, dlpack.h)."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    ]


_CODES: Final = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_ON_HOST: Final = 1

_pointer = ctypes.PyDLL(None).PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _exported(buffer: Any) -> tuple[int, int, str | None]:
    """As DLPack tells, of an owner that tells nothing else. As mpi4py asks for it: waiting for no stream."""
    on_host = buffer.__dlpack_device__()[0] == _ON_HOST
    capsule = buffer.__dlpack__() if on_host else buffer.__dlpack__(stream=-1)
    tensor = _DLTensor.from_address(_pointer(capsule, b"dltensor"))  # unnamed still: its end frees what was exported
    itemsize = tensor.bits * tensor.lanes // 8
    kind = _CODES.get(tensor.code)
    name = None if kind is None else "bool" if kind == "bool" else f"{kind}{tensor.bits}"
    return math.prod(tensor.shape[axis] for axis in range(tensor.ndim)) * itemsize, itemsize, name


def _numpy_name(dtype: Any) -> str:
    name = _names.get(dtype)
    if name is None:
        name = _names[dtype] = str(dtype.name)
    return name


def _format_name(text: str | None) -> str | None:
    if text is None:
        return "uint8"
    return _FORMATS.get(text.lstrip("@=<>!"), text)
