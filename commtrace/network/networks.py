"""A network that can be asked how long a call takes: one that was measured, or one that a small file describes.

    network = open_network("network.json")               what commtrace bench has kept
    network = open_network("slingshot-11")               a description that is shipped, or the path of your own
    network.expected("all_reduce", payload=1 << 20, ranks=8, hosts=2)

A description is JSON:

    {
      "format": "commtrace-network-description", "version": 1,
      "name": "slingshot-11",
      "about": "...",                                          a sentence or two, printed with every table
      "ranks_per_node": 4,
      "start_us": 3.6,                                         of every call, whatever its size (0)
      "intra_node": {"latency_us": 0.47, "bandwidth_gb_per_s": 235},
      "inter_node": {"latency_us": 2.7, "bandwidth_gb_per_s": 25},     of one rank, in one direction
      "sources": {"inter_node.bandwidth_gb_per_s": "..."}      where the figures come from (none)
    }

What a described network gives is the time of an ideal library in an idle network: real ones take longer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from commtrace.volume import busbw_factor

from . import NetworkError
from .algorithms import ALGORITHMS, RING, Level, cost, steps
from .bench_results import FORMAT, BenchResults, read_json_object, read_results
from .fit import Fit
from .operations import BARRIER, COLLECTIVES, PING_PONG, bus_bytes

DESCRIPTION: Final = "commtrace-network-description"
_VERSION: Final = 1

FITTED, EXTRAPOLATED, DESCRIBED, LOCAL = "fitted", "extrapolated", "described", "local"
"""Where a time comes from: a fit of this very operation and group, of another group or smaller sizes, a description; or
nothing leaves the rank."""

_MESSAGES: Final = ("send", "recv", "sendrecv")


@dataclass(frozen=True)
class ExpectedTime:
    """Time of a call in microseconds; its latency is what a call takes however small it is."""

    latency_us: float
    bandwidth_us: float
    how: str

    @property
    def total_us(self) -> float:
        """Both parts."""
        return self.latency_us + self.bandwidth_us


class Network(ABC):
    """See the module."""

    name: str
    about: Sequence[str]
    """Sentences, without their full stop, that must stand beside what is said of it."""
    ranks_per_node: int

    def expected(self, op: str, payload: int, ranks: int, hosts: int) -> ExpectedTime | None:
        """Of a call in a group of `ranks` on `hosts`; payload in bytes. None for an operation that it knows nothing of.

        For messages, `hosts` is 1 or 2: whether both ends are on one.
        """
        if op in _MESSAGES:
            return self._expected(PING_PONG, payload, 2, min(hosts, 2))
        if ranks < 2:
            return ExpectedTime(0.0, 0.0, LOCAL)
        return self._expected(op, payload, ranks, hosts) if op in (*COLLECTIVES, BARRIER) else None

    @abstractmethod
    def _expected(self, op: str, payload: int, ranks: int, hosts: int) -> ExpectedTime | None: ...


def open_network(name: str) -> Network:
    """By the path of a file, or the name of a shipped description. Raises NetworkError."""
    path = Path(name)
    if not path.exists() and name in shipped_networks():
        return _described(read_json_object(Path(str(_folder().joinpath(f"{name}.json")))), name)
    if not path.exists():
        raise NetworkError(
            f"{name}: no such file, and no description is called so (there are {', '.join(shipped_networks())}); "
            "commtrace bench writes such a file"
        )
    document = read_json_object(path)
    if document.get("format") == FORMAT:
        return MeasuredNetwork(name, read_results(path))
    if document.get("format") == DESCRIPTION:
        return _described(document, name)
    raise NetworkError(f"{name}: neither a file of commtrace bench ({FORMAT!r}) nor a description ({DESCRIPTION!r})")


def shipped_networks() -> list[str]:
    """Names of the descriptions that come with commtrace."""
    return sorted(Path(file.name).stem for file in _folder().iterdir() if file.name.endswith(".json"))


def _folder() -> Any:
    return resources.files(__package__).joinpath("networks")


# --- measured -------------------------------------------------------------------------------------------------------


class MeasuredNetwork(Network):
    """What `commtrace bench` measured. A group that was not is extrapolated from the nearest that was.

    The latency grows with the steps of the algorithm (`algorithms.steps`); the bus bandwidth stays. Which algorithm,
    the groups that were measured say, where there are two or more of an operation; else a ring is taken, whose latency
    grows faster. A group of several hosts is extrapolated from another one of several hosts where that was measured.
    """

    def __init__(self, name: str, results: BenchResults) -> None:
        self.name = name
        self.ranks_per_node = max(int(one["ranks"]) for one in results.hosts)
        self.about = (f"measured: {results.title}, {results.date}",)
        if results.traced:
            self.about += ("commtrace was recording while this was measured",)
        self._fits: dict[str, list[Fit]] = {}
        for fit in results.fits:
            self._fits.setdefault(fit.op, []).append(fit)

    def _expected(self, op: str, payload: int, ranks: int, hosts: int) -> ExpectedTime | None:
        fits = self._fits.get(op)
        if not fits:
            return None
        for fit in fits:
            if (fit.ranks, fit.hosts) == (ranks, hosts):
                return _of_fit(fit, payload, 1.0, FITTED if payload <= fit.most_bytes else EXTRAPOLATED)
        near = min(fits, key=lambda fit: ((fit.hosts > 1) != (hosts > 1), abs(fit.ranks - ranks), -fit.ranks))
        algorithm = algorithm_of_fits(op, [fit for fit in fits if (fit.hosts > 1) == (near.hosts > 1)])
        ratio = steps(op, ranks, algorithm) / steps(op, near.ranks, algorithm)
        return _of_fit(near, _alike(op, payload, ranks, near.ranks), ratio, EXTRAPOLATED)


def _alike(op: str, payload: int, ranks: int, others: int) -> int:
    """The payload that has as many bytes of busbw in a group of another size."""
    factor = busbw_factor(op, others)
    return payload if not factor else round(float(bus_bytes(op, payload, ranks)) / factor)


def _of_fit(fit: Fit, payload: int, ratio: float, how: str) -> ExpectedTime:
    total = fit.time_us(payload)
    latency = min(fit.latency_us, total)
    return ExpectedTime(latency * ratio, total - latency, how)


def algorithm_of_fits(op: str, fits: Sequence[Fit]) -> str:
    """The algorithm whose steps the latencies of groups of several sizes follow more closely; of one size: the ring."""
    if len({fit.ranks for fit in fits}) < 2:
        return RING
    return min(ALGORITHMS, key=lambda algorithm: _spread(op, fits, algorithm))


def _spread(op: str, fits: Sequence[Fit], algorithm: str) -> float:
    """The largest latency of a step by the smallest: 1 where all are alike."""
    each = [max(fit.latency_us, 1e-3) / steps(op, fit.ranks, algorithm) for fit in fits]
    return max(each) / min(each)


# --- described ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DescribedNetwork(Network):
    """Two levels: within a node and between nodes. `algorithms.cost` has the formulas."""

    name: str
    about: Sequence[str]
    ranks_per_node: int
    start_us: float
    intra: Level
    inter: Level
    sources: Mapping[str, str]

    def _expected(self, op: str, payload: int, ranks: int, hosts: int) -> ExpectedTime | None:
        found = cost(op, payload, ranks, hosts, self.intra, self.inter)
        return ExpectedTime(self.start_us + found.latency_us, found.bandwidth_us, DESCRIBED)


_KEYS: Final = (
    "format", "version", "name", "about", "ranks_per_node", "start_us", "intra_node", "inter_node", "sources",
)  # fmt: skip
_LEVEL: Final = ("latency_us", "bandwidth_gb_per_s")


def _described(document: Mapping[str, Any], file: str) -> DescribedNetwork:
    """Raises NetworkError that names the key, what it holds, and what it must."""
    if document.get("version") != _VERSION:
        raise NetworkError(f"{file}: version is {document.get('version')!r}; this commtrace reads {_VERSION}")
    _known(document, _KEYS, file)
    ranks = document.get("ranks_per_node")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise NetworkError(f"{file}: ranks_per_node is {ranks!r}; a whole number from 1 is needed")
    about, sources = document.get("about", ""), document.get("sources", {})
    if not isinstance(sources, dict):
        raise NetworkError(f"{file}: sources is {sources!r:.40}; an object of keys and sentences is needed")
    return DescribedNetwork(
        str(document.get("name", file)),
        (f"described: {about or file}",),
        ranks,
        _number(document.get("start_us", 0), f"{file}: start_us"),
        _level(document, "intra_node", file),
        _level(document, "inter_node", file),
        {str(key): str(value) for key, value in sources.items()},
    )


def _level(document: Mapping[str, Any], name: str, file: str) -> Level:
    level = document.get(name)
    if not isinstance(level, dict):
        raise NetworkError(f"{file}: {name} is {level!r:.40}; an object with {' and '.join(_LEVEL)} is needed")
    _known(level, _LEVEL, f"{file}: {name}")
    bandwidth = _number(level.get("bandwidth_gb_per_s"), f"{file}: {name}.bandwidth_gb_per_s")
    if not bandwidth:
        raise NetworkError(f"{file}: {name}.bandwidth_gb_per_s is 0; a number above 0 is needed")
    return Level(_number(level.get("latency_us"), f"{file}: {name}.latency_us"), bandwidth)


def _known(document: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    unknown = sorted(set(document) - set(keys))
    if unknown:
        raise NetworkError(f"{where}: unknown key {', '.join(unknown)}; there are {', '.join(keys)}")


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise NetworkError(f"{where} is {value!r}; a number from 0 is needed")
    return float(value)


# --- where ranks are ------------------------------------------------------------------------------------------------


def hosts_of_group(ranks: int, stride: int, ranks_per_node: int) -> int:
    """Hosts of the group of ranks 0, stride, 2 stride ..., where the ranks fill one host after the other."""
    return len({rank * stride // ranks_per_node for rank in range(ranks)})
