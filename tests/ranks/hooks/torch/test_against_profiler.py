"""Every call in the log is the one that torch's own profiler recorded in the same run.

The profiler observes the dispatcher's operators independently: `Input Dims` of its Chrome trace give elements, its
execution trace gives the element size of tensors in lists, which the Chrome trace leaves out. Sizes are computed from
these two traces only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("deepspeed")

from hook_programs.runs import ENGINES, Call, training

from commtrace.schema import Flag

pytestmark = pytest.mark.long

ITEM_SIZES = {"float": 4, "double": 8, "long int": 8, "int": 4, "unsigned char": 1}


class Seen(NamedTuple):
    """Call: operator, payload, local bytes, group size if sizes show it, and whether it is asynchronous."""

    variant: str
    payload: int
    local: int
    ranks: int | None
    asynchronous: bool


class Arguments(NamedTuple):
    """Arguments of an operator call: shapes from the Chrome trace, tensors from the execution trace."""

    dims: Sequence[Any]
    types: Sequence[str]
    concrete: Sequence[str]
    tensors: Sequence[Any]

    def size(self, position: int) -> int:
        """Return the bytes of an argument that is a tensor."""
        return int(math.prod(self.dims[position])) * ITEM_SIZES[self.types[position]]

    def list_size(self, position: int) -> int:
        """Return the bytes of an argument that is a list of tensors."""
        *_, item_size, _ = self.tensors[position][0]
        return int(sum(map(math.prod, self.dims[position])) * item_size)

    def nested_size(self, position: int) -> int:
        """Return the bytes of an argument that is a list of lists, which the Chrome trace leaves out."""
        return sum(int(count * item_size) for parts in self.tensors[position] for *_, count, item_size, _ in parts)


Sizes = tuple[int, int]
SIZES: dict[str, Callable[[Arguments], Sizes]] = {
    "allreduce_": lambda a: (a.list_size(0), 0),
    "broadcast_": lambda a: (a.list_size(0), 0),
    "allgather_": lambda a: (a.nested_size(0), a.list_size(1)),
    "_allgather_base_": lambda a: (a.size(0), a.size(1)),
    "_reduce_scatter_base_": lambda a: (a.size(1), a.size(0)),
    "barrier": lambda a: (0, 0),
}


def profiler_calls(stem: Path) -> list[Seen]:
    """Return the calls that the profiler recorded, in order."""
    chrome = [
        event
        for event in json.loads(Path(f"{stem}.json").read_text())["traceEvents"]
        if event.get("name", "").startswith("c10d::")
    ]
    trace = json.loads(Path(f"{stem}.et.json").read_text())["nodes"]
    nodes = [node for node in trace if node["name"].startswith("c10d::")]
    chrome.sort(key=lambda event: event["ts"])
    assert [event["name"] for event in chrome] == [node["name"] for node in nodes]
    return [_seen(event, node) for event, node in zip(chrome, nodes, strict=True)]


def _seen(event: dict[str, Any], node: dict[str, Any]) -> Seen:
    given = event["args"]
    variant = event["name"].removeprefix("c10d::")
    arguments = Arguments(given["Input Dims"], given["Input type"], given["Concrete Inputs"], node["inputs"]["values"])
    payload, local = SIZES[variant](arguments)
    ranks = payload // local if local else None
    return Seen(variant, payload, local, ranks, arguments.concrete[-2] == "True")


def log_call(call: Call) -> Seen:
    ranks = len(call.ranks) if call.local else None
    return Seen(call.variant, call.payload, call.local, ranks, bool(call.flags & Flag.ASYNC))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("engine", ENGINES)
def test_each_call_is_as_the_profiler_saw_it(engine: str, rank: int, recorder: str) -> None:
    run = training(recorder)
    expected = profiler_calls(run.folder / f"{engine}-rank{rank}")
    assert len(expected) >= 9  # the least that a training of three steps makes
    assert [log_call(call) for call in run.calls(rank, engine)] == expected


def test_nothing_is_in_the_log_beside_what_the_profiler_saw(recorder: str) -> None:
    run = training(recorder)
    for rank, log in enumerate(run.logs):
        assert sum(len(run.calls(rank, engine)) for engine in ENGINES) == len(log.calls)


@pytest.mark.parametrize("engine", ENGINES)
def test_both_ranks_recorded_the_same_collectives(engine: str, recorder: str) -> None:
    run = training(recorder)

    def facts(call: Call) -> tuple[Any, ...]:
        return call.op, call.dtype, call.reduce_op, call.payload, call.seq, call.ranks, call.group["name"], call.step

    first, second = ([facts(call) for call in run.calls(rank, engine)] for rank in (0, 1))
    assert first == second


def test_numbers_of_a_group_s_collectives_have_no_gaps(recorder: str) -> None:
    for log in training(recorder).logs:
        for group in log.tables["groups"]:
            numbers = [call.seq for call in log.calls if call.group["id"] == group["id"]]
            assert all(after == before + 1 for before, after in pairwise(numbers))
