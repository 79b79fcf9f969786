"""Public traces of GPU runs: counts, bytes and device times of an import equal an independent count of the raw JSON.

    PUBLIC_TRACES=DIR_OR_FILE:... pytest -m external tests/external/test_public_traces.py

Files of the tests of HTA, TraceLens, PARAM and Chakra, of deepseek-ai/profile-data and others; none of them is part of
this project.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commtrace
from commtrace.importing.formats import format_of
from commtrace.importing.import_run import import_files
from commtrace.schema import Clock

pytestmark = [pytest.mark.external, pytest.mark.timeout(600)]

WIDTHS = {"Float": 4, "BFloat16": 2, "Half": 2, "Long": 8, "Int": 4, "Byte": 1, "Char": 1, "Double": 8, "Bool": 1}
COMMUNICATION = re.compile(r"nccl\w*Kernel|dpsk::ep::|deep_ep::|cross_device_reduce|multimem_all_reduce")
NO_COMMUNICATION = re.compile(r"get_dispatch_layout")
WHOLE = {
    "allreduce": "In",
    "broadcast": "In",
    "reduce": "In",
    "allgather": "Out",
    "reducescatter": "In",
    "alltoall": "In",
}


PAYLOAD_ARGUMENT = {
    "c10d::allreduce_": 0, "c10d::broadcast_": 0, "c10d::alltoall_base_": 1, "c10d::allgather_": 0,
    "c10d::_allgather_base_": 0, "c10d::_reduce_scatter_base_": 1,
}  # fmt: skip
"""Argument of an operator that has its payload."""


def files(format_name: str = "kineto") -> list[Path]:
    given = [Path(part) for part in os.environ.get("PUBLIC_TRACES", "").split(":") if part]
    paths = [path for one in given for path in (sorted(one.rglob("*")) if one.is_dir() else [one])]
    return [
        path
        for path in paths
        if path.is_file() and (known := format_of(path)) is not None and known.name == format_name
    ]


def raw(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    document: dict[str, Any] = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    return document


def raw_events(path: Path) -> list[dict[str, Any]]:
    return [event for event in raw(path)["traceEvents"] if event.get("ph") == "X"]


def counted_calls(events: list[dict[str, Any]]) -> Counter[tuple[str, str, int]]:
    """Count the calls whose arguments the trace has, and sum their bytes, by operation and group."""
    counts: Counter[tuple[str, str, int]] = Counter()
    for event in events:
        args = event.get("args", {})
        name = re.sub(r"_|base|tensor|into", "", str(args.get("Collective name", "")).lower())
        if event["name"] == "record_param_comms" and name in WHOLE and args.get("dtype") in WIDTHS:
            size = args[f"{WHOLE[name]} msg nelems"] * WIDTHS[args["dtype"]]
            counts[name, str(args.get("Process Group Name", args.get("Process Group ID"))), 0] += 1
            counts[name, str(args.get("Process Group Name", args.get("Process Group ID"))), 1] += size
    return counts


def outermost_operators(events: list[dict[str, Any]]) -> dict[str, int]:
    """Count the operators of c10d that are not within another one, by name."""
    operators = [event for event in events if str(event["name"]).startswith("c10d::")]
    ends: dict[Any, float] = {}
    counts: Counter[str] = Counter()
    for event in sorted(operators, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        if float(event["ts"]) >= ends.get(event["tid"], -1):
            counts[event["name"].removeprefix("c10d::")] += 1
            ends[event["tid"]] = float(event["ts"]) + float(event["dur"])
    return dict(counts)


def imported_calls(run: commtrace.Run) -> Counter[tuple[str, str, int]]:
    counts: Counter[tuple[str, str, int]] = Counter()
    table = run.events()
    known = table[table["payload_bytes"].notna() & (table["api"] == "torch") & (table["group"] != "unknown")]
    for op, label, payload in zip(known["op"], known["group"], known["payload_bytes"].tolist(), strict=True):
        name = str(op).replace("_", "")
        if name in WHOLE:
            group = str(label).rpartition("/")[2].partition("#")[0]
            counts[name, group, 0] += 1
            counts[name, group, 1] += payload
    return counts


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_an_import_equals_an_independent_count(path: Path, tmp_path: Path) -> None:
    events = raw_events(path)
    kernels = [
        (round(float(event["dur"]) * 1000), float(event["ts"]))
        for event in events
        if str(event.get("cat")).lower() == "kernel"
        and COMMUNICATION.search(event["name"])
        and not NO_COMMUNICATION.search(event["name"])
    ]
    operators = outermost_operators(events)
    annotated = any(str(event["name"]).startswith("nccl:") for event in events)
    has_calls = annotated or bool(operators) or any(event["name"] == "record_param_comms" for event in events)
    if not kernels and not has_calls:
        with pytest.raises(commtrace.CommtraceError, match="no communication call"):
            import_files([path], tmp_path / "log")
        return
    import_files([path], tmp_path / "log")
    run = commtrace.open(tmp_path / "log")
    assert imported_calls(run) == counted_calls(events)
    variants = run.events()["variant"].value_counts().to_dict()
    assert {name: variants.get(name, 0) for name in operators} == operators
    records = np.concatenate([block for process in run.processes for s in process.segments for block in s.blocks()])
    on_device = records[records["clock"] == Clock.DEVICE]
    spans = on_device["t_end"] - on_device["t_start"]
    # Every kernel is in one call; a call of several kernels lasts from the first's begin to the last's end.
    assert len(on_device) <= len(kernels)
    assert bool(len(on_device)) == bool(kernels)
    if 0 < len(on_device) == len(kernels):
        assert sorted(spans.tolist()) == sorted(duration for duration, _ in kernels)
        begins = np.sort(np.array([begin for _, begin in kernels])) * 1000.0
        starts = np.sort(on_device["t_start"])
        assert np.abs((starts - starts[0]) - (begins - begins[0])).max() < 500
    else:
        assert spans.sum() >= sum(duration for duration, _ in kernels)


def merged(spans: list[tuple[float, float]]) -> list[list[float]]:
    union: list[list[float]] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([begin, end])
    return union


def common(first: list[list[float]], second: list[list[float]]) -> float:
    """Return the time that two unions of spans share."""
    total = 0.0
    one, other = iter(first), iter(second)
    a, b = next(one, None), next(other, None)
    while a is not None and b is not None:
        total += max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
        if a[1] < b[1]:
            a = next(one, None)
        else:
            b = next(other, None)
    return total


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_overlap_equals_that_of_the_raw_kernels(path: Path) -> None:
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in raw_events(path):
        if str(event.get("cat")).lower() == "kernel":
            known = bool(COMMUNICATION.search(event["name"])) and not NO_COMMUNICATION.search(event["name"])
            spans[known].append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    if not spans[True] or not spans[False]:
        pytest.skip("the trace has no kernels of both kinds")
    communication, computation = merged(spans[True]), merged(spans[False])
    expected = common(communication, computation) / sum(end - begin for begin, end in communication)
    table = commtrace.open(path).table("exposed_communication").set_index("step")
    assert table.loc["all", "overlap"] == pytest.approx(expected, abs=1e-4)


def tensor_bytes(value: Any) -> int:
    """Return the bytes of a tensor of an execution trace (elements and their bytes are items 3 and 4), or of a list."""
    if len(value) == 6 and isinstance(value[5], str):
        return int(value[3] * value[4])
    return sum(map(tensor_bytes, value))


def counted_nodes(path: Path) -> list[tuple[str, int]]:
    """Return operator and payload of the calls of an execution trace, in the order of their begins."""
    calls = []
    for node in raw(path)["nodes"]:
        inputs = node["inputs"]["values"] if isinstance(node["inputs"], dict) else node["inputs"]
        if str(node["name"]).startswith("c10d::") and node["name"] in PAYLOAD_ARGUMENT:
            payload = tensor_bytes(inputs[PAYLOAD_ARGUMENT[node["name"]]])
            calls.append((node["id"], str(node["name"]).removeprefix("c10d::"), payload))
    return [(operator, payload) for _, operator, payload in sorted(calls)]


@pytest.mark.parametrize("path", files("execution-trace"), ids=lambda path: path.name)
def test_an_execution_trace_equals_an_independent_count(path: Path, tmp_path: Path) -> None:
    expected = counted_nodes(path)
    if not expected:
        with pytest.raises(commtrace.CommtraceError, match="no communication call"):
            import_files([path], tmp_path / "log")
        return
    import_files([path], tmp_path / "log")
    table = commtrace.open(tmp_path / "log").events()
    assert [*zip(table["variant"], table["payload_bytes"].astype(int), strict=True)] == expected


@pytest.mark.parametrize("trace", [path for path in files() if "dlrm" in str(path)], ids=lambda path: path.name)
def test_an_execution_trace_completes_a_public_trace(trace: Path, tmp_path: Path) -> None:
    """PARAM has eight ranks of a DLRM on GPUs, recorded by both; Kineto did not record the sizes of all_reduces."""
    import_files([trace], tmp_path / "alone")
    before = commtrace.open(tmp_path / "alone").events()["payload_bytes"]
    pid = raw_events(trace)[0]["pid"]
    other = next(path for path in files("execution-trace") if "dlrm" in str(path) and raw(path)["pid"] == pid)
    import_files([trace, other], tmp_path / "log")
    table = commtrace.open(tmp_path / "log").events()
    assert [*zip(table["variant"], table["payload_bytes"].astype(int), strict=True)] == counted_nodes(other)
    assert before.isna().sum() == table["op"].eq("all_reduce").sum() > 0
