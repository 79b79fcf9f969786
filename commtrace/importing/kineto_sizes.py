"""Sizes, groups and peers of calls, from the arguments that Kineto records of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

from commtrace.operations import MESSAGES, OPERATIONS
from commtrace.rank_ranges import format_ranks
from commtrace.schema import Flag

from .events import MOST_RANKS, ImportedGroup
from .operation_names import element_type

TAG: Final = "commtrace tag"
"""Argument of `record_param_comms` of a message, which only `commtrace export` writes. `Rank` is then its peer's."""
CUT: Final = "..."
_LARGEST: Final = 1 << 50


class StatedSize(NamedTuple):
    """Payload of a call and this rank's own share of it, in bytes; None: not known."""

    payload: int | None = None
    local: int | None = None
    flags: int = 0
    dtype: str = ""


def comms_size(op: str, args: Mapping[str, Any], ranks: int, position: int) -> StatedSize:
    """Return the size of a call from the arguments of `record_param_comms`.

    Args:
        op: The operation.
        args: The arguments.
        ranks: Number of ranks of the group; 0: not known.
        position: Position of this rank in the group; -1: not known.
    """
    dtype, width = element_type(str(args.get("dtype") or ""))
    sent, received = (_bytes(args.get(f"{name} msg nelems"), width) for name in ("In", "Out"))
    splits = [_numbers(args.get(f"{name} split size")) for name in ("In", "Out")]
    return size_of(op, sent, received, splits, ranks, position, dtype)


def shape_size(op: str, args: Mapping[str, Any], ranks: int, position: int) -> StatedSize:
    """Return the size of a call from the shapes of a `c10d::` operator's arguments (`record_shapes=True`)."""
    shapes, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list) or not shapes or not types:
        return StatedSize(0, 0) if op == "barrier" else StatedSize()
    # The output is the first argument of operators with two tensors, and the input the second.
    name = next((str(name) for name in types[:2] if element_type(str(name))[1]), "")
    dtype, width = element_type(name)
    tensors = [_elements(shape) for shape in shapes[:2]]
    # On ranks other than the root, one of two lists of tensors is empty, and its type is not known.
    two = op in ("gather", "scatter") or (len(types) > 1 and types[1] not in ("", "Scalar", "ScalarList"))
    received = _bytes(tensors[0], width)
    sent = _bytes(tensors[1], width) if two else received
    concrete = args.get("Concrete Inputs")
    lists = (
        [text for text in concrete if isinstance(text, str) and text.startswith("[")]
        if isinstance(concrete, list)
        else []
    )
    splits = [_numbers(text) for text in reversed(lists[:2])] if op == "all_to_all" and len(lists) > 1 else [[], []]
    return size_of(op, sent, received, splits, ranks, position, dtype)


def size_of(
    op: str, sent: int | None, received: int | None, splits: Sequence[list[int] | None], ranks: int, position: int,
    dtype: str,
) -> StatedSize:  # fmt: skip
    """Return the size of a call by the convention of nccl-tests (`commtrace.operations`).

    Args:
        op: The operation.
        sent: Bytes of the input; None: not known.
        received: Bytes of the output.
        splits: Rows for and from each rank, of an all_to_all; None: not known; empty: equal.
        ranks: Number of ranks of the group; 0: not known.
        position: Position of this rank in the group; -1: not known.
        dtype: Type of the elements.
    """
    if op == "barrier":
        return StatedSize(0, 0, dtype=dtype)
    if op in ("all_reduce", "broadcast", "reduce", "send", "recv"):
        return StatedSize(received if sent is None or (op == "recv" and not sent) else sent, 0, dtype=dtype)
    if op == "all_gather":
        return StatedSize(received, sent, dtype=dtype)
    if op == "reduce_scatter":
        return StatedSize(sent, received, dtype=dtype)
    if op == "all_to_all":
        uneven = any(len({*lengths}) > 1 for lengths in splits if lengths)
        return StatedSize(sent, _own_split(sent, splits[0], ranks, position), Flag.UNEVEN if uneven else 0, dtype)
    if op in ("gather", "scatter"):
        own, every = (sent, received) if op == "gather" else (received, sent)
        return StatedSize(every or (own * ranks if own is not None and ranks else None), own, dtype=dtype)
    if op in OPERATIONS:
        return StatedSize(sent, 0, dtype=dtype)
    return StatedSize(dtype=dtype)


def lengths_of(op: str, payload: int, local: int) -> tuple[int, int]:
    """Return the bytes of the input and the output of a call, as `record_param_comms` states them: see `size_of`.

    Args:
        op: The operation.
        payload: Its payload.
        local: This rank's own share of it.
    """
    sent = local if op in ("all_gather", "gather") else payload
    return sent, local if op in ("reduce_scatter", "scatter") else payload


def _own_split(sent: int | None, splits: list[int] | None, ranks: int, position: int) -> int | None:
    """Return the bytes that a rank sends to itself in an all_to_all; None where not known."""
    if sent is None or splits is None or not ranks:
        return None
    if not splits:
        return sent // ranks
    if not 0 <= position < len(splits) or len(splits) != ranks:
        return None
    rows = sum(splits)
    return sent // rows * splits[position] if rows else 0


def _bytes(elements: Any, width: int) -> int | None:
    if type(elements) is not int or not width or not 0 <= elements * width < _LARGEST:
        return None
    return elements * width


def _elements(shape: Any) -> int | None:
    """Return the number of elements of a tensor, or of the tensors in a list; None where the shape is not known."""
    if not isinstance(shape, list):
        return None
    if shape and all(isinstance(item, list) for item in shape):
        parts = [_elements(item) for item in shape]
        return None if None in parts else sum(part for part in parts if part is not None)
    return prod(shape) if shape and all(type(length) is int and length >= 0 for length in shape) else None


def _numbers(value: Any) -> list[int] | None:
    """Return a list of numbers, or its text; None where it was cut."""
    if isinstance(value, str):
        if CUT in value:
            return None
        try:
            value = json.loads(value or "[]")
        except ValueError:
            return None
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
        return None
    return value


class TraceGroups:
    """The process groups of a trace, by the arguments of calls and by the file's `distributedInfo`."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        self.by_name: dict[str, ImportedGroup] = {}
        """The groups by name."""
        config = info.get("pg_config")
        for row in config if isinstance(config, list) else ():
            if isinstance(row, dict):
                ranks = _numbers(row.get("ranks"))
                if ranks and _possible(ranks):
                    name, description = str(row.get("pg_name", "")), str(row.get("pg_desc") or "")
                    backend = str(row.get("backend_config") or "")
                    self.by_name[name] = ImportedGroup(
                        tuple(ranks), _own_name(name, ranks), _described(description), backend
                    )

    @property
    def only(self) -> ImportedGroup | None:
        """The group of all calls, if the job has no other."""
        return next(iter(self.by_name.values())) if len(self.by_name) == 1 else None

    def of_call(self, args: Mapping[str, Any]) -> ImportedGroup | None:
        """Return the group of a call; None where it is not known.

        A list of more than 30 ranks is cut in the file. It is rebuilt from its start, stride and length.
        """
        name = str(args.get("Process Group Name", args.get("Process Group ID", "")))
        listed = self.by_name.get(name)
        ranks = _numbers(args.get("Process Group Ranks"))
        if not ranks or not _possible(ranks):
            ranks = [*listed.ranks] if listed is not None else _strided(args)
        if not ranks:
            return None
        if listed is not None and listed.ranks == tuple(ranks):
            return listed
        description = str(args.get("Process Group Description") or "")
        backend = listed.backend if listed is not None else ""
        group = ImportedGroup(tuple(ranks), _own_name(name, ranks), _described(description), backend)
        if listed is None and name:
            self.by_name[name] = group
        return group


def _own_name(name: str, ranks: Sequence[int]) -> str:
    """Return the name of a group; "" where `commtrace export` named it by its ranks, because it has none."""
    return "" if name == format_ranks(ranks) else name


def _described(description: str) -> str:
    return "" if description == "undefined" else description


def _possible(ranks: Sequence[int]) -> bool:
    return len({*ranks}) == len(ranks) and max(ranks) < MOST_RANKS


def _strided(args: Mapping[str, Any]) -> list[int]:
    start, stride, size = (args.get(name) for name in ("Global rank start", "Global rank stride", "Group size"))
    if type(start) is not int or type(stride) is not int or type(size) is not int:
        return []
    if start < 0 or size < 1 or (stride < 1 and size > 1) or start + size * max(stride, 1) >= MOST_RANKS:
        return []
    return [*range(start, start + size * max(stride, 1), max(stride, 1))][:size]


def peer_of(op: str, operator: Mapping[str, Any], comms: Mapping[str, Any], group: ImportedGroup | None) -> int:
    """Return the global rank of root, source or destination; -1 where it is not known.

    The operator's own argument, a position in the group, is preferred. `Src Rank` and `Dst Rank` of
    `record_param_comms` are wrong in groups other than the world's (pytorch#153819), and are used only there.
    """
    if group is None or op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"):
        return -1
    concrete = operator.get("Concrete Inputs")
    position = _number_in(concrete, 2 if op not in ("gather", "scatter", "reduce") else 3)
    if position is None and (op in ("broadcast", "reduce", "gather", "scatter") or TAG in comms):
        rank = comms.get("Rank")
        position = rank if type(rank) is int else None
    if position is None and group.ranks == tuple(range(len(group.ranks))):
        rank = comms.get("Dst Rank" if op == "send" else "Src Rank")
        position = int(str(rank)) if re.fullmatch(r"\d{1,7}", str(rank)) else None
    return group.ranks[position] if position is not None and 0 <= position < len(group.ranks) else -1


def tag_of(op: str, operator: Mapping[str, Any], comms: Mapping[str, Any]) -> int:
    """Return the tag of a message; -1 where it is not known."""
    tag = _number_in(operator.get("Concrete Inputs"), 3) if op in MESSAGES else None
    tag = comms.get(TAG) if tag is None else tag
    return tag if type(tag) is int and 0 <= tag < 1 << 31 else -1


def _number_in(values: Any, at: int) -> int | None:
    text = values[at] if isinstance(values, list) and len(values) > at else None
    return int(text) if isinstance(text, str) and re.fullmatch(r"-?\d{1,9}", text) else None
