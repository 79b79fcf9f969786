"""Execution traces for tests, in the schemas that torch.profiler's ExecutionTraceObserver has written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

FLAT, PLAIN, ATTRIBUTED = "1.0.1", "1.0.2-chakra.0.0.4", "1.1.1-chakra.0.0.4"
_WIDTHS = {"float": 4, "c10::BFloat16": 2, "long int": 8}
_USER_SCOPE = 7


class ExecutionTraceFactory:
    """Nodes of one process, numbered as they begin; the observer writes a node when it ends, parents after children.

    Args:
        schema: Version of the file's format.
        ranks: Ranks of the job's only group; None: the file does not have it.
        rank: This rank.
    """

    def __init__(self, schema: str = ATTRIBUTED, ranks: int | None = 2, rank: int = 0, pid: int = 100) -> None:
        self.schema, self._ranks, self._rank, self._pid = schema, ranks, rank, pid
        self._nodes: list[dict[str, Any]] = []
        self._number = 2
        self._open: dict[int, list[int]] = {1: [2], 2: [2]}
        """Numbers of the nodes that have begun and not ended, by thread."""
        self._write("[pytorch|profiler|execution_trace|thread]", 2, 1, [], [], scope=_USER_SCOPE)
        if ranks is not None:
            group: dict[str, Any] = {"pg_name": "0", "backend_config": "cuda:nccl", "ranks": [], "group_size": ranks}
            group |= {"backend_id": 77} if schema == PLAIN else {"pg_desc": "default_pg"}
            self._write("## process_group:init ##", self._next(), 2, [json.dumps([group])], ["String"], _USER_SCOPE)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _write(
        self, name: str, number: int, parent: int, inputs: list[Any], types: list[str], scope: int = 0, tid: int = 1,
        outputs: list[Any] | None = None, attributes: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        values = {"rf_id": number, "scope": scope, "tid": tid, **(attributes or {})}
        shapes: list[Any] = [[] for _ in inputs]
        if self.schema == FLAT:
            node = {"name": name, "id": number, "parent": parent, "inputs": inputs, "input_shapes": shapes,
                    "input_types": types, "outputs": outputs or [], **values}  # fmt: skip
        else:
            node = {"id": number, "name": name, "ctrl_deps": parent,
                    "inputs": {"values": inputs, "shapes": shapes, "types": types},
                    "outputs": {"values": outputs or []},
                    "attrs": [{"name": key, "type": "", "value": value} for key, value in values.items()]}  # fmt: skip
        self._nodes.append(node)

    def tensor(self, elements: int, kind: str = "float") -> list[Any]:
        """Return a tensor: its id, its storage's, offset, elements, bytes of one, device."""
        return [self._next(), self._next(), 0, elements, _WIDTHS[kind], "cuda:0"]

    def begin(self, tid: int = 1) -> ExecutionTraceFactory:
        """Begin a node, below which the following nodes of its thread are; `end` writes it."""
        self._open[tid].append(self._next())
        return self

    def end(
        self, name: str, scope: int = _USER_SCOPE, tid: int = 1, inputs: Sequence[Any] = (), types: Sequence[str] = ()
    ) -> ExecutionTraceFactory:
        """Write the node that began last: an annotation, or with scope 0 a function with its arguments."""
        number = self._open[tid].pop()
        self._write(name, number, self._open[tid][-1], [*inputs], [*types], scope, tid)
        return self

    def call(
        self, operator: str, name: str, inputs: list[Any], types: list[str], *, sent: list[Any], received: list[Any],
        splits: tuple[list[int], list[int]] = ([], []), tid: int = 1,
    ) -> ExecutionTraceFactory:  # fmt: skip
        """Write an operator of c10d and the `record_param_comms` below it.

        Args:
            operator: Name of the operator.
            name: Name of the operation.
            inputs: Its arguments.
            types: Their types.
            sent: Tensors of the input.
            received: Tensors of the output.
            splits: Rows for and from each rank.
            tid: Number of the thread.
        """
        outer, inner = self._next(), self._next()
        group: Any = {FLAT: 0, PLAIN: 77}.get(self.schema, ["0", "default_pg"])
        world = [] if self.schema in (FLAT, PLAIN) else [0, 1, self._ranks]
        attributes = {"collective_name": name, "pg_name": "0"} if self.schema == ATTRIBUTED else {}
        kind = next(kind for kind in types if "Tensor(" in kind)
        self._write(
            "record_param_comms", inner, outer, [sent, 1, group, self._rank, name, *splits, *world],
            [kind, "Int", "Tuple[String,String]", "Int", "String", "GenericList[]", "GenericList[]", *["Int"] * 3],
            tid=tid, outputs=[received], attributes=attributes,
        )  # fmt: skip
        self._write(operator, outer, self._open[tid][-1], inputs, types, tid=tid)
        return self

    def all_reduce(self, elements: int, kind: str = "float", tid: int = 1) -> ExecutionTraceFactory:
        """Write an all_reduce of one tensor."""
        tensors = [self.tensor(elements, kind)]
        types = [f"GenericList[Tensor({kind})]", "Object", "Object", "Int"]
        return self.call("c10d::allreduce_", "allreduce", [tensors, "<Object>", "<Object>", -1], types,
                         sent=tensors, received=tensors, tid=tid)  # fmt: skip

    def all_gather_of_lists(self, elements: int) -> ExecutionTraceFactory:
        """Write an all_gather whose output is a list of a tensor for each rank."""
        own, every = self.tensor(elements), [[self.tensor(elements) for _ in range(self._ranks or 2)]]
        lists = ",".join(["Tensor(float)"] * (self._ranks or 2))
        types = [f"GenericList[GenericList[{lists}]]", "GenericList[Tensor(float)]", "Object", "Int"]
        return self.call("c10d::allgather_", "all_gather", [every, [own], "<Object>", -1], types,
                         sent=[own], received=every)  # fmt: skip

    def text(self) -> str:
        """Return the file."""
        head = {"schema": self.schema, "pid": self._pid, "time": "2026-01-01 00:00:00", "start_ts": 1}
        return json.dumps({**head, "nodes": self._nodes, "finish_ts": 2})
