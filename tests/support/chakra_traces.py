"""Reader and player of Chakra's execution traces, from the schema and the rules of simulators alone."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

COMP, SEND, RECV, COLLECTIVE = 4, 5, 6, 7
TO_ROOT, FROM_ROOT = (1, 3), (4, 5)
"""Types of collectives: reduce and gather, scatter and broadcast."""
VALUES: Final = {7: "int32_val", 9: "int64_val", 27: "bool_val", 29: "string_val"}
"""Fields of an attribute that are used: number -> name."""


@dataclass
class Node:
    """A node of a rank; times are us."""

    rank: int
    id: int = 0
    name: str = ""
    type: int = 0
    depends: list[int] = field(default_factory=list)
    start: int = 0
    duration: int = 0
    attributes: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """Name of the value's field, and value, by name of the attribute."""

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name][1]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at


def messages(path: Path) -> Iterator[bytes]:
    """Yield the messages of a file, each of which follows its length."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        length, at = _varint(data, at)
        yield data[at : at + length]
        at += length
    assert at == len(data)


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message: numbers and values."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value, at = _varint(message, at)
        if key & 7 == 2:
            yield key >> 3, message[at : at + value]
            at += value
        else:
            assert key & 7 == 0
            yield key >> 3, value


def _attribute(message: bytes) -> tuple[str, tuple[str, Any]]:
    (_, name), (number, value) = fields(message)
    return name.decode(), (VALUES[number], value.decode() if isinstance(value, bytes) else value)


def read(folder: Path) -> dict[int, list[Node]]:
    """Return the nodes of each rank, in the order of the files."""
    nodes: dict[int, list[Node]] = {}
    for path in folder.glob("trace.*.et"):
        rank = int(path.name.split(".")[1])
        metadata, *rest = messages(path)
        assert dict(fields(metadata)) == {1: b"1.0.0"}
        nodes[rank] = []
        for message in rest:
            node = Node(rank)
            for number, value in fields(message):
                if number == 10:
                    name, of = _attribute(value)
                    node.attributes[name] = of
                elif number == 5:
                    node.depends.append(value)
                else:
                    name = {1: "id", 2: "name", 3: "type", 6: "start", 7: "duration"}[number]
                    setattr(node, name, value.decode() if number == 2 else value)
            nodes[rank].append(node)
    return nodes


def operations(folder: Path, nodes: dict[int, list[Node]]) -> dict[tuple[Any, ...], list[Node]]:
    """Return the nodes of each operation: of a group by order, of messages by ranks and tag. Each has all its ranks."""
    groups = json.loads((folder / "comm_groups.json").read_text())
    found: dict[tuple[Any, ...], list[Node]] = defaultdict(list)
    for rank, own in nodes.items():
        counts: Counter[Any] = Counter()
        for node in own:
            if node.type == COMP:
                continue
            key: tuple[Any, ...] = (node["pg_name"],)
            if node.type != COLLECTIVE:
                key = (*key, node["comm_src"], node["comm_dst"], node["comm_tag"])
                assert rank == node["comm_src" if node.type == SEND else "comm_dst"]
            found[(*key, counts[key, node.type])].append(node)
            counts[key, node.type] += 1
    for key, own in found.items():
        ranks = groups[key[0]] if len(key) == 2 else key[1:3]
        assert sorted(node.rank for node in own) == sorted(ranks), key
        assert len({node["seq"] for node in own}) == 1, "in the order of the calls"
    return found


def _awaited(node: Node, operation: list[Node]) -> list[Node]:
    """Return the nodes that must be ready before a node's transfer can begin."""
    if node.type != COLLECTIVE:
        return [other for other in operation if other.type == SEND]
    if node["comm_type"] in FROM_ROOT:
        return [other for other in operation if other.rank == node["root"]]
    return [] if node["comm_type"] in TO_ROOT and node.rank != node["root"] else operation


def play(folder: Path) -> dict[int, int]:
    """Return when each step ends, us: the longest path through the nodes of all ranks.

    Operations of one group run side by side; durations alone decide.
    """
    nodes = read(folder)
    operation = {id(node): own for own in operations(folder, nodes).values() for node in own}
    todo = [node for own in nodes.values() for node in own]
    for own in nodes.values():
        assert all(depends < node.id for node in own for depends in node.depends), "in order, without circles"
        assert len({node.id for node in own}) == len(own)
    ready: dict[int, int] = {}
    end: dict[tuple[int, int], int] = {}
    while todo:
        rest = []
        for node in todo:
            if all((node.rank, depends) in end for depends in node.depends):
                begin = max((end[node.rank, depends] for depends in node.depends), default=0)
                ready[id(node)] = begin
                awaited = [] if node.type == COMP else _awaited(node, operation[id(node)])
                if all(id(other) in ready for other in awaited):
                    begin = max([begin, *(ready[id(other)] for other in awaited)])
                    end[node.rank, node.id] = begin + node.duration
                    continue
            rest.append(node)
        assert len(rest) < len(todo), "nodes wait for each other in a circle"
        todo = rest
    steps: dict[int, int] = defaultdict(int)
    for own in nodes.values():
        for node in own:
            step = node["step"] if "step" in node.attributes else -1
            steps[step] = max(steps[step], end[node.rank, node.id])
    return dict(steps)
