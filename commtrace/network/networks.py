"""Networks that predict the time of a call: measured networks, and networks described in a small file.

    network = open_network("network.json")               a file of commtrace bench
    network = open_network("all_reduce.txt")             tables of nccl-tests or the OSU micro-benchmarks
    network = open_network("slingshot-11")               a built-in description, or the path of another
    network = open_network("100GB/s+5us")                a rank's bandwidth in one direction, and latency of a message
    network.expected("all_reduce", payload=1 << 20, ranks=8, hosts=2)

A description is JSON:

    {
      "format": "commtrace-network-description", "version": 1,
      "name": "slingshot-11",
      "about": "...",                                          a sentence or two, printed with every table
      "ranks_per_node": 4,
      "start_us": 3.6,                                         part of every call's latency (default: 0)
      "intra_node": {"latency_us": 0.47, "bandwidth_gb_per_s": 235},
      "inter_node": {"latency_us": 2.7, "bandwidth_gb_per_s": 25},     of one rank, in one direction
      "sources": {"inter_node.bandwidth_gb_per_s": "..."}      where the numbers come from (optional)
    }

A described network predicts the time of an ideal library in an idle network: real calls take longer.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from commtrace.operations import MESSAGES
from commtrace.rank_ranges import MAX_RANKS
from commtrace.volume import busbw_factor

from . import NetworkError
from .algorithms import ALGORITHMS, CARRIED_OUT_AS, IF_ONE_IS_LATE, RING, Cost, Level, cost, steps
from .bench_operations import BARRIER, COLLECTIVES, PING_PONG, bus_bytes
from .bench_results import FORMAT, BenchResults, is_other_benchmark, read_json_object, read_results
from .fit import Fit

_DESCRIPTIONS: Final = Path(__file__).with_name("descriptions")
DESCRIPTION: Final = "commtrace-network-description"
_VERSION: Final = 1

FITTED, EXTRAPOLATED, DESCRIBED, LOCAL = "fitted", "extrapolated", "described", "local"
"""The source of a time: a fit of the same operation and group, a fit of another group or smaller sizes, a description,
or a group of one rank, which sends nothing."""


@dataclass(frozen=True)
class ExpectedTime(Cost):
    """Expected microseconds of a call: latency, the part that depends on the size, and the source (`FITTED` ...)."""

    source: str


class Network(Protocol):
    """A network that predicts the time of a call."""

    name: str  # name or file
    about: Sequence[str]  # sentences without a full stop, shown with every table of its times
    ranks_per_node: int  # number of ranks on a host
    held_out_error: float | None  # median relative error for sizes that were not fitted; None: not known

    def over(self, backend: str) -> Network:
        """Return the network as a backend of torch uses it; measured times are those of the backend measured."""
        return self

    def expected(self, op: str, payload: int, ranks: int, hosts: int) -> ExpectedTime | None:
        """Predict the time of a call.

        Args:
            op: Name of the operation, as in the event table.
            payload: Bytes.
            ranks: Number of ranks of the group.
            hosts: Number of hosts of the group; for messages, 1 or 2.

        Returns:
            The time; None for an operation that was neither measured nor described.
        """
        if op in MESSAGES:
            return self._expected(PING_PONG, payload, 2, min(hosts, 2))
        if ranks < 2:
            return ExpectedTime(0.0, 0.0, LOCAL)
        return self._expected(op, payload, ranks, hosts) if op in (*COLLECTIVES, BARRIER) else None

    def _expected(self, op: str, payload: int, ranks: int, hosts: int) -> ExpectedTime | None: ...


def open_network(name: str) -> Network:
    """Open a network by the path of its file, or by the name of a built-in description.

    Raises:
        NetworkError: There is no such network, or its file is invalid.
    """
    path = Path(name)
    if not path.exists():
        if (flat := _flat_network(name)) is not None:
            return flat
        if name not in builtin_networks():
            raise NetworkError(
                f"{name}: no such file, and no built-in description of this name (choose from "
                f"{', '.join(builtin_networks())}); commtrace bench writes such a file"
            )
        path = _DESCRIPTIONS / f"{name}.json"
    if is_other_benchmark(path):
        return MeasuredNetwork(name, read_results(path))
    document = read_json_object(path)
    if document.get("format") == FORMAT:
        return MeasuredNetwork(name, read_results(path))
    if document.get("format") == DESCRIPTION:
        return _read_description(document, name)
    raise NetworkError(f"{name}: neither a file of commtrace bench ({FORMAT!r}) nor a description ({DESCRIPTION!r})")


def _flat_network(text: str) -> DescribedNetwork | None:
    """Return the network of a text such as "100GB/s+5us", in which all ranks are equally far from each other."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(MB|GB|TB)/s(?:\+(\d+(?:\.\d+)?)(us|ms))?", text)
    if match is None or not float(match[1]):
        return None
    bandwidth = float(match[1]) * {"MB": 1e-3, "GB": 1.0, "TB": 1e3}[match[2]]
    links = Level(float(match[3] or 0) * (1e3 if match[4] == "ms" else 1), bandwidth)
    return DescribedNetwork(
        text, ("described: all ranks are equally far from each other",), MAX_RANKS, 0.0, links, links, {}
    )


def builtin_networks() -> list[str]:
    """Return the names of the built-in descriptions."""
    return sorted(path.stem for path in _DESCRIPTIONS.glob("*.json"))


def hosts_of_group(ranks: int, stride: int, ranks_per_node: int) -> int:
    """Return the number of hosts of ranks 0, stride, 2 stride ..., if ranks fill one host after the other."""
    return len({rank * stride // ranks_per_node for rank in range(ranks)})


class MeasuredNetwork(Network):
    """A network that `commtrace bench` measured. Other groups are extrapolated from the nearest measured one.

    The latency grows with the steps of the algorithm (`algorithms.steps`), and the bus bandwidth stays the same. The
    algorithm is the one that fits the measured groups of an operation best; if there is only one group, a ring, whose
    latency grows faster. Groups on several hosts are extrapolated from groups on several hosts, if any were measured.
    """

    def __init__(self, name: str, results: BenchResults) -> None:
        self.name = name
        self.ranks_per_node = max(int(host["ranks"]) for host in results.hosts)
        traced = ("commtrace was recording while this was measured",) if results.traced else ()
        date = f", {results.date}" if results.date else ""
        self.about = (f"measured: {results.title}{date}", *traced)
        self._fits = results.fits
        errors = [fit.held_out_median for fit in results.fits if fit.held_out_median is not None]
        self.held_out_error: float | None = statistics.median(errors) if errors else None

    def _expected(self, op: str, payload: int, ranks: int, hosts: int) -> ExpectedTime | None:
        fits = [fit for fit in self._fits if fit.op == op]
        if not fits:
            return None
        for fit in fits:
            if (fit.ranks, fit.hosts) == (ranks, hosts):
                return _time_of_fit(fit, payload, 1.0, FITTED if payload <= fit.most_bytes else EXTRAPOLATED)
        nearest = min(fits, key=lambda fit: ((fit.hosts > 1) != (hosts > 1), abs(fit.ranks - ranks), -fit.ranks))
        algorithm = algorithm_of_fits(op, [fit for fit in fits if (fit.hosts > 1) == (nearest.hosts > 1)])
        latency_ratio = steps(op, ranks, algorithm) / steps(op, nearest.ranks, algorithm)
        # The payload with the same number of bus bytes in the measured group.
        factor = busbw_factor(op, nearest.ranks)
        equal_payload = round(float(bus_bytes(op, payload, ranks)) / factor) if factor else payload
        return _time_of_fit(nearest, equal_payload, latency_ratio, EXTRAPOLATED)


def _time_of_fit(fit: Fit, payload: int, latency_ratio: float, source: str) -> ExpectedTime:
    total = fit.time_us(payload)
    latency = min(fit.latency_us, total)
    return ExpectedTime(latency * latency_ratio, total - latency, source)


def algorithm_of_fits(op: str, fits: Sequence[Fit]) -> str:
    """Return the algorithm whose latencies per step vary least among the groups; a ring for groups of one size."""
    if len({fit.ranks for fit in fits}) < 2:
        return RING

    def spread(algorithm: str) -> float:
        step_us = [max(fit.latency_us, 1e-3) / steps(op, fit.ranks, algorithm) for fit in fits]
        return max(step_us) / min(step_us)

    return min(ALGORITHMS, key=spread)


@dataclass(frozen=True)
class DescribedNetwork(Network):
    """A network with two levels, within a node and between nodes; `algorithms.cost` has the formulas."""

    name: str
    about: Sequence[str]
    ranks_per_node: int
    start_us: float
    intra: Level
    inter: Level
    sources: Mapping[str, str]
    held_out_error: float | None = None
    backend: str = ""

    def over(self, backend: str) -> DescribedNetwork:
        """Return the network as a backend of torch uses it, whose ranks compute between their calls."""
        return replace(self, backend=backend)

    def _expected(self, op: str, payload: int, ranks: int, hosts: int) -> ExpectedTime | None:
        op = CARRIED_OUT_AS.get((self.backend, op), op)
        call_cost = cost(op, payload, ranks, hosts, self.intra, self.inter)
        bandwidth_us = call_cost.bandwidth_us * IF_ONE_IS_LATE.get((self.backend, op, ranks), 1.0)
        return ExpectedTime(self.start_us + call_cost.latency_us, bandwidth_us, DESCRIBED)


_KEYS: Final = (
    "format", "version", "name", "about", "ranks_per_node", "start_us", "intra_node", "inter_node", "sources",
)  # fmt: skip
_LEVEL_KEYS: Final = ("latency_us", "bandwidth_gb_per_s")


def _read_description(document: Mapping[str, Any], file: str) -> DescribedNetwork:
    """Read and check a description without pydantic, which is not always installed."""

    def check(valid: bool, problem: str) -> None:
        if not valid:
            raise NetworkError(f"{file}: {problem}")

    def check_keys(table: Mapping[str, Any], keys: Sequence[str], where: str = "") -> None:
        unknown = sorted(set(table) - set(keys))
        check(not unknown, f"{where}unknown key {', '.join(unknown)}; choose from {', '.join(keys)}")

    def number(value: Any, key: str) -> float:
        valid = type(value) in (int, float) and 0 <= value < float("inf")
        check(valid, f"{key} is {value!r}; a number of at least 0 is needed")
        return float(value)

    def level(key: str) -> Level:
        table: Any = document.get(key)
        needed = f"an object with {' and '.join(_LEVEL_KEYS)} is needed"
        check(isinstance(table, dict), f"{key} is {table!r:.40}; {needed}")
        check_keys(table, _LEVEL_KEYS, f"{key}: ")
        latency_us, bandwidth = (number(table.get(name), f"{key}.{name}") for name in _LEVEL_KEYS)
        check(bandwidth > 0, f"{key}.bandwidth_gb_per_s is 0; a number above 0 is needed")
        return Level(latency_us, bandwidth)

    version = document.get("version")
    check(version == _VERSION, f"version is {version!r}; this commtrace reads {_VERSION}")
    check_keys(document, _KEYS)
    ranks: Any = document.get("ranks_per_node")
    sources: Any = document.get("sources", {})
    check(type(ranks) is int and ranks >= 1, f"ranks_per_node is {ranks!r}; a whole number of at least 1 is needed")
    check(isinstance(sources, dict), f"sources is {sources!r:.40}; an object of keys and sentences is needed")
    name, about = str(document.get("name", file)), (f"described: {document.get('about') or file}",)
    start_us, sources = number(document.get("start_us", 0), "start_us"), {key: str(sources[key]) for key in sources}
    return DescribedNetwork(name, about, ranks, start_us, level("intra_node"), level("inter_node"), sources)
