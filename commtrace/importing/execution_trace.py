"""Execution traces: what torch.profiler's ExecutionTraceObserver writes, one JSON file per rank (`.json`, `.json.gz`).

An execution trace has the operators of a process as nodes, with their tensors, and no times. It is read as a Kineto
trace whose times are numbers of nodes: nodes are numbered as they begin, so a node lasts from its own number to the
largest number below it. Where a Kineto trace of the same process is imported, the execution trace completes it: Kineto
records neither the element types of lists of tensors nor the shapes of lists of lists.

Schemas 1.0.1 (flat nodes, until PyTorch 2.1), 1.0.2 and 1.0.3 (nodes of Chakra) and 1.1.0 and 1.1.1 (with the
attributes of communication calls).
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from .events import MOST_RANKS, Event, ImportedProcess, NotKnown
from .file_names import rank_in_name
from .json_stream import JsonArray, natural
from .kineto_calls import KinetoCalls
from .kineto_context import Context
from .kineto_trace import ANNOTATION, COMMS, OPERATOR, HostEvent, KinetoTrace, TraceClock, is_operator
from .operation_names import element_type, operation_of

_SCHEMA: Final = re.compile(rb'"schema"\s*:\s*"\d+\.\d+\.\d+')
_PID: Final = re.compile(rb'"pid"\s*:\s*(\d{1,10})\b')
_GROUPS: Final = "process_group:init"
_OWN: Final = "[pytorch|"
_USER_SCOPE: Final = 7
"""`at::RecordScope::USER_SCOPE`: an annotation of the program or of a library."""
_TENSOR: Final = re.compile(r"Tensor\(([^)]*)\)")
_LARGEST: Final = 1 << 52
_ROOTED: Final = ("broadcast", "reduce", "gather", "scatter", "send", "recv")
_RECORD_FUNCTION: Final = "Record function id"

_ATTRIBUTES: Final = {
    "collective_name": "Collective name", "dtype": "dtype", "in_msg_nelems": "In msg nelems",
    "out_msg_nelems": "Out msg nelems", "in_split_size": "In split size", "out_split_size": "Out split size",
    "pg_name": "Process Group Name", "pg_desc": "Process Group Description", "pg_size": "Group size",
    "global_rank_start": "Global rank start", "global_rank_stride": "Global rank stride",
}  # fmt: skip
"""Attributes of `record_param_comms` -> arguments of the same event in a Kineto trace."""


def is_execution_trace(path: Path, head: bytes) -> bool:
    """Return whether a file with these first bytes is an execution trace."""
    return _SCHEMA.search(head) is not None and b'"nodes"' in head


def process_id(head: bytes) -> int | None:
    """Return the process id in the first bytes of an execution trace; None if they have none."""
    match = _PID.search(head)
    return None if match is None else int(match[1])


def events(path: Path) -> Iterator[Event]:
    """Yield the process of an execution trace, its calls without times, and what is not known.

    Raises:
        ImportFileError: The file is not an execution trace, or cannot be read.
    """
    source = ExecutionTrace(path)
    trace = KinetoTrace(source).read()
    clock = TraceClock(trace)
    rank = source.rank if source.rank is not None else rank_in_name(path)
    yield ImportedProcess(
        rank=rank,
        world_size=source.world_size,
        pid=natural(source.members.get("pid"), _LARGEST),
        tool="torch.profiler.ExecutionTraceObserver",
        clock_is_wall=False,
        has_times=False,
    )
    context = Context(trace, clock)
    calls = KinetoCalls(trace, clock, context, rank)
    for call in calls.calls():
        yield replace(call, t_begin=0, t_return=0)
    yield NotKnown("when its calls were made and how long they took: execution traces have no times")
    yield NotKnown("its call sites: execution traces have no stacks")
    yield from calls.facts_not_known()
    if not len(context.steps):
        yield NotKnown("its steps: the trace has no ProfilerStep annotations")
    yield from trace.problems()


class ExecutionTrace:
    """An execution trace, read as the events of a Kineto trace; the microseconds are numbers of nodes.

    Attributes:
        members: The members of the file beside its nodes; `distributedInfo` has the groups as Kineto states them.
        rank: The rank, if calls show it; else None.
        world_size: Ranks of the job; None: not known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._nodes = JsonArray(path, "nodes")
        self.members: dict[str, Any] = {}
        self.rank: int | None = None
        self.world_size: int | None = None
        self._name_of_backend: dict[int, str] = {}
        """Names of groups by the number of their backend, which schema 1.0.2 states with calls."""

    @property
    def problem(self) -> str:
        """Why the file was not read to its end, or ""."""
        return self._nodes.problem

    @cached_property
    def stated_rank(self) -> int | None:
        """The rank in the name of the file, else the one that its calls show. Raises ImportFileError."""
        rank = rank_in_name(self.path)
        if rank is None:
            for _ in self.batches():
                pass
        return self.rank if rank is None else rank

    def batches(self) -> Iterator[list[Any]]:
        """Yield the events in a list, when all nodes have been read. Raises ImportFileError."""
        numbers, parents = array("q"), array("q")
        nodes: list[_Node] = []
        for batch in self._nodes.batches():
            for item in batch:
                node = _Node(item)
                numbers.append(node.number)
                parents.append(node.parent)
                if _GROUPS in node.name:
                    self._add_groups(node)
                elif not node.name.startswith(_OWN):
                    nodes.append(node)
        ends = _last_below(numbers, parents)
        self.members |= {name: value for name, value in self._nodes.members.items() if name not in self.members}
        events = [node.event(ends.get(node.number, node.number), self._name_of_backend) for node in nodes]
        self._find_rank(nodes, events)
        yield events

    def _add_groups(self, node: _Node) -> None:
        """Add the groups that exist when the trace begins. A group of all ranks is stated without its ranks."""
        try:
            rows = json.loads(str(node.inputs[0]))
        except (ValueError, IndexError, RecursionError):
            return
        groups = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        for group in groups:
            name, backend, size = str(group.get("pg_name", "")), group.get("backend_id"), group.get("group_size")
            if isinstance(backend, int):
                self._name_of_backend[backend] = name
            if not group.get("ranks") and (ranks := natural(size, MOST_RANKS)):
                self.world_size = ranks
                group["ranks"] = [*range(ranks)]
        self.members["distributedInfo"] = {"pg_config": groups}

    def _find_rank(self, nodes: Sequence[_Node], events: Sequence[Mapping[str, Any]]) -> None:
        """Find the rank from this rank's position in groups with a known start and stride."""
        ranks = set()
        for node, event in zip(nodes, events, strict=True):
            if node.name != COMMS:
                continue
            args, position = event["args"], node.position
            start, stride, size = (natural(args.get(_ATTRIBUTES[name]), MOST_RANKS) for name in (
                "global_rank_start", "global_rank_stride", "pg_size",
            ))  # fmt: skip
            rooted = operation_of(str(args.get("Collective name") or "")) in ("", *_ROOTED)
            if position is None or start is None or stride is None or size is None or rooted or position >= size:
                continue
            ranks.add(start + stride * position)
        self.rank = next(iter(ranks)) if len(ranks) == 1 else None


class _Node:
    """A node of an execution trace, of any schema; fields that it lacks or that have a wrong type are empty."""

    def __init__(self, item: Any) -> None:
        row: Mapping[str, Any] = item if isinstance(item, dict) else {}
        attributes = row.get("attrs")
        self.attributes: dict[str, Any] = {
            str(attribute.get("name")): attribute.get("value")
            for attribute in (attributes if isinstance(attributes, list) else ())
            if isinstance(attribute, dict)
        }
        self.name = str(row.get("name", ""))
        self.number = natural(row.get("id"), _LARGEST) or 0
        self.parent = natural(row.get("ctrl_deps", row.get("parent")), _LARGEST) or 0
        self.thread = natural(self.attributes.get("tid", row.get("tid")), _LARGEST) or 0
        self.scope = self.attributes.get("scope", row.get("scope"))
        self.record_function = self.attributes.get("rf_id", row.get("rf_id"))
        inputs, outputs = row.get("inputs"), row.get("outputs")
        self.inputs = _list(inputs.get("values") if isinstance(inputs, dict) else inputs)
        self.outputs = _list(outputs.get("values") if isinstance(outputs, dict) else outputs)
        self.types = [
            str(text) for text in _list(inputs.get("types") if isinstance(inputs, dict) else row.get("input_types"))
        ]

    @property
    def position(self) -> int | None:
        """This rank's position in the group of a `record_param_comms`, or its root; None where it is not stated."""
        at = self._place_of_name()
        return None if at is None else natural(self.inputs[at - 1], MOST_RANKS)

    def event(self, last: int, name_of_backend: Mapping[int, str]) -> dict[str, Any]:
        """Return the event of a Kineto trace that this node is.

        Args:
            last: The largest number of this node and those below it.
            name_of_backend: Names of groups by the number of their backend.
        """
        arguments: dict[str, Any] = {}
        if self.name == COMMS:
            arguments = self._comms_arguments(name_of_backend)
        elif is_operator(self.name):
            arguments = self._operator_arguments()
        return {
            "cat": ANNOTATION if self.scope == _USER_SCOPE else OPERATOR, "name": self.name,
            "ts": self.number, "dur": last - self.number + 0.5, "pid": 0, "tid": self.thread,
            "args": {**arguments, _RECORD_FUNCTION: self.record_function},
        }  # fmt: skip

    def _operator_arguments(self) -> dict[str, Any]:
        """Return the arguments of an operator as Kineto has them; a tensor's shape is its number of elements."""
        texts = [
            "" if value == "<None>" or _TENSOR.search(kind) or kind == "Object" else str(value)
            for value, kind in zip(self.inputs, self.types, strict=False)
        ]
        return {
            "Input Dims": [_shapes(value) if _TENSOR.search(kind) else []
                           for value, kind in zip(self.inputs, self.types, strict=False)],
            "Input type": [_kineto_type(kind) for kind in self.types],
            "Concrete Inputs": texts,
        }  # fmt: skip

    def _comms_arguments(self, name_of_backend: Mapping[int, str]) -> dict[str, Any]:
        """Return the arguments of a `record_param_comms` as Kineto has them.

        Its inputs are the tensors (none of a barrier or a wait), the number of the call, the group (its name and
        description; the number of its backend until schema 1.0.2), this rank's position in it or the root, the name of
        the operation, the splits of input and output, and since 1.0.3 the group's first rank, stride and size.
        """
        stated = {
            name: self.attributes[attribute]
            for attribute, name in _ATTRIBUTES.items()
            if self.attributes.get(attribute) is not None
        }
        at = self._place_of_name()
        if at is None:
            return stated
        group = self.inputs[at - 2]
        pair = [str(part) for part in group] if isinstance(group, list) else []
        if isinstance(group, int) and group in name_of_backend:
            pair = [name_of_backend[group]]
        tensors = (_flat(self.inputs[0]) if at > 3 else []), _flat(self.outputs[0]) if self.outputs else []
        names = {element_type(match)[0] for kind in self.types[:1] for match in _TENSOR.findall(kind)}
        sizes = self.inputs[at + 3 : at + 6]
        found: dict[str, Any] = {
            "Collective name": self.inputs[at],
            **dict(zip(("Process Group Name", "Process Group Description"), pair, strict=False)),
            **dict(zip(("In split size", "Out split size"), self.inputs[at + 1 : at + 3], strict=False)),
            **(dict(zip(("Global rank start", "Global rank stride", "Group size"), sizes, strict=True))
               if len(sizes) == 3 else {}),
            **({"dtype": next(iter(names))} if len(names) == 1 else {}),
            **{f"{name} msg nelems": sum(elements) for name, elements in zip(("In", "Out"), tensors, strict=True)
               if elements},
        }  # fmt: skip
        return {**stated, **found}

    def _place_of_name(self) -> int | None:
        """Return where the inputs of a `record_param_comms` have the name of its operation; None if they do not."""
        for at, (value, kind) in enumerate(zip(self.inputs, self.types, strict=False)):
            if kind == "String" and isinstance(value, str):
                return at if at >= 3 else None
        return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _elements(tensor: Any) -> int | None:
    """Return the number of elements of a tensor: (tensor, storage, offset, elements, bytes of one, device)."""
    is_tensor = isinstance(tensor, list) and len(tensor) == 6 and isinstance(tensor[5], str)
    return natural(tensor[3], _LARGEST) if is_tensor else None


def _shapes(value: Any, depth: int = 3) -> Any:
    """Return the shapes of a tensor or of the tensors in lists, each as its number of elements."""
    elements = _elements(value)
    if elements is not None:
        return [elements]
    return [_shapes(item, depth - 1) for item in value] if isinstance(value, list) and depth else []


def _flat(value: Any, depth: int = 3) -> list[int]:
    """Return the numbers of elements of a tensor or of the tensors in lists."""
    elements = _elements(value)
    if elements is not None:
        return [elements]
    items = value if isinstance(value, list) and depth else []
    return [number for item in items for number in _flat(item, depth - 1)]


def _kineto_type(kind: str) -> str:
    """Return Kineto's name of the type of an argument; of tensors, that of their elements, if it is one."""
    names = {*_TENSOR.findall(kind)}
    if names:
        return names.pop() if len(names) == 1 else ""
    if kind.startswith("GenericList"):
        return "ScalarList"
    return "" if kind in ("Object", "None") else "Scalar"


def _last_below(numbers: Sequence[int], parents: Sequence[int]) -> dict[int, int]:
    """Return the largest number of a node and those below it, by the number of the node."""
    number, parent = np.array(numbers, np.int64), np.array(parents, np.int64)
    order = np.argsort(-number, kind="stable")
    last: dict[int, int] = {}
    for own, above in zip(number[order].tolist(), parent[order].tolist(), strict=True):
        end = last.setdefault(own, own)
        if above < own:
            last[above] = max(last.get(above, above), end)
    return last


def complete(trace: KinetoTrace, source: ExecutionTrace) -> str:
    """Add to a trace what the execution trace of the same process states of its calls and groups.

    Events belong together by the number of their record function, or by their order in traces without it (until
    PyTorch 2.1), if the names of all are equal.

    Returns:
        Why nothing could be added, or "".

    Raises:
        ImportFileError: The file is not an execution trace, or cannot be read.
    """
    other = KinetoTrace(source).read()
    own, others = (sorted(filter(_states_sizes, one.host), key=lambda event: event.begin) for one in (trace, other))
    by_number = {event.args.get(_RECORD_FUNCTION): event for event in others}
    if any(_RECORD_FUNCTION in event.args for event in own):
        pairs = [(event, by_number.get(event.args.get(_RECORD_FUNCTION))) for event in own]
    elif len(own) == len(others):
        pairs = [*zip(own, others, strict=True)]
    else:
        return "it has other calls than the trace"
    known = [(event, stated) for event, stated in pairs if stated is not None]
    if not known or any(event.name != stated.name for event, stated in known):
        return "it has other calls than the trace"
    for event, stated in known:
        event.args.update(stated.args)
    trace.members["distributedInfo"] = {**other.distributed_info, **trace.distributed_info}
    return ""


def _states_sizes(event: HostEvent) -> bool:
    return event.name == COMMS or is_operator(event.name)
