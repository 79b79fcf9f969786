"""Settings of a process: what its tables say about how it was set up, as texts that are shown and compared.

A value is compared if it is equal in equal runs: no identifiers, ports, times or temporary paths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from commtrace.formatting import format_bytes, format_plural
from commtrace.process_setup.variables import IDENTITY_VARIABLES
from commtrace.rank_ranges import rank_ranges
from commtrace.reading.process_reader import Process
from commtrace.reading.recorded_run import RecordedRun


class ProcessSetting(NamedTuple):
    """One setting of a process.

    Attributes:
        kind: What it is a setting of, such as "variable".
        value: Its value as text.
        compared: What is compared with other ranks and runs; "": it is not compared.
    """

    kind: str
    value: str
    compared: str


@dataclass(frozen=True)
class ProcessSettings:
    """The settings of a process.

    Attributes:
        values: The settings by name.
        complete: Whether a setting that is missing is not set. In logs of earlier releases, it may be unknown.
    """

    values: Mapping[str, ProcessSetting]
    complete: bool

    def compared(self, name: str) -> str | None:
        """Return what is compared of a setting, NOT_SET if it is not set; None if that is not known or not compared."""
        if name in self.values:
            return self.values[name].compared or None
        return NOT_SET if name != LISTENS and (self.complete or name in _IN_OLD_LOGS) else None

    def shown(self, name: str) -> str:
        """Return the value of a setting as text."""
        return self.values[name].value if name in self.values else NOT_SET


KINDS: Final = ("version", "variable", "library", "interface", "processor", "limit", "device", "recording")
"""Kinds of settings, in their order in reports."""

CORES: Final = "cores"
LISTENS: Final = "interface listened on"
LIMITS: Final = ("processor limit", "memory limit")
NOT_SET: Final = "-"

_IN_OLD_LOGS: Final = frozenset((
    CORES, "recorder", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO",
    "NCCL_PROTO", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT",
    "DS_ACCELERATOR",
))  # fmt: skip
"""Names that logs without a row of `setup` have, if they are set."""

_CAUSES: Final[Mapping[str, re.Pattern[str]]] = {
    "threads of torch": re.compile(rf"OMP_NUM_THREADS|MKL_NUM_THREADS|{CORES}"),
    "inter-op threads of torch": re.compile(CORES),
    LISTENS: re.compile(r"\w+_SOCKET_IFNAME|interface (?!listened)\S+"),
    "library gloo": re.compile("version torch"),
}
"""ProcessSetting -> names of settings that determine it: if one of them differs, it is no difference of its own."""

_NO_SETTING: Final = re.compile(r"NCCL_COMM_ID|NCCL_HOSTID|OMPI_MCA_(initial_wdir|num_procs|ess_|orte_|prte_|pmix_)\w*")
_TEMPORARY: Final = re.compile(r"(^|[:=, ])/(tmp|var/tmp|dev/shm|run)/")
_LEFT_OUT: Final = "left out, because it may be a secret"
_MPI_VERSION: Final = re.compile(r"(Open MPI) v([\w.]+)|(MPICH) Version:\s*([\w.]+)")


def settings_by_rank(run: RecordedRun) -> dict[int, ProcessSettings]:
    """Return the settings of each rank's first process; equal ones are one object. A dry run has none."""
    known: dict[str, ProcessSettings] = {}
    ranks: dict[int, ProcessSettings] = {}
    for process in run.processes:
        if process.rank >= 0 and process.rank not in ranks and not process.tables.process.get("simulated"):
            settings = process_settings(process)
            ranks[process.rank] = known.setdefault(repr(settings), settings)
    return ranks


def process_settings(process: Process) -> ProcessSettings:
    """Return the settings of a process. Those of a damaged log that have another form are left out."""
    row, setup = process.tables.process, process.tables.setup or {}
    found: dict[str, ProcessSetting] = {}
    for kind, read in _READERS:
        try:
            found |= {name: ProcessSetting(kind, value, compared) for name, value, compared in read(row, setup)}
        except (TypeError, ValueError, KeyError, AttributeError):
            continue
    return ProcessSettings(found, complete=process.tables.setup is not None)


def is_by_rank(name: str) -> bool:
    """Return whether each rank of a host usually has its own value, because it selects the rank's device."""
    return name.endswith(("_VISIBLE_DEVICES", "_AFFINITY_MASK"))


def names_of(all_settings: Iterable[ProcessSettings]) -> list[str]:
    """Return the names of all settings, by kind and name."""
    kinds = {name: setting.kind for settings in all_settings for name, setting in settings.values.items()}
    return sorted(kinds, key=lambda name: (KINDS.index(kinds[name]), name))


def without_consequences(names: Iterable[str]) -> list[str]:
    """Return the names of settings that differ, without those that follow from another one that differs."""
    all_names = [*names]
    return [
        name
        for name in all_names
        if name not in _CAUSES or not any(_CAUSES[name].fullmatch(other) for other in all_names)
    ]


# ---- kinds of settings -----------------------------------------------------------------------------------------------

_Row = Mapping[str, Any]
_Found = Iterator[tuple[str, str, str]]


def _versions(row: _Row, setup: _Row) -> _Found:
    for name, version in (row.get("versions") or {}).items():
        yield f"version {name}", str(version), str(version)


def _variables(row: _Row, setup: _Row) -> _Found:
    for name, value in (row.get("environment") or {}).items():
        if name in IDENTITY_VARIABLES or _NO_SETTING.fullmatch(name):
            continue
        if value is None:
            yield str(name), _LEFT_OUT, ""
        else:
            yield str(name), str(value), "" if _TEMPORARY.search(str(value)) else str(value)


def _libraries(row: _Row, setup: _Row) -> _Found:
    for name, (value, compared) in _joined(_library_rows(row, setup)).items():
        yield f"library {name}", value, compared


def _library_rows(row: _Row, setup: _Row) -> _Found:
    mpi = _MPI_VERSION.search(str(setup.get("mpi_version") or ""))
    for library in setup.get("libraries") or ():
        name, version = str(library["name"]), str(library.get("version") or "")
        if mpi is not None and name in ("MPI", "Open MPI"):
            name, version = mpi[1] or mpi[3], mpi[2] or mpi[4]
        elif name == "MPI":
            version = str(setup.get("mpi_version") or "").partition("\n")[0][:80]
        if name == "gloo":
            torch = (row.get("versions") or {}).get("torch")
            version = version or (f"torch {torch}" if torch else "")
        build = str(library.get("build") or "")
        yield name, f"{version or 'version not known'} ({library['file']})", f"{version} {build}" if build else version


def _joined(rows: Iterable[tuple[str, str, str]]) -> dict[str, tuple[str, str]]:
    """Join rows of one name: several files of one library may be loaded."""
    joined: dict[str, tuple[str, str]] = {}
    for name, value, compared in rows:
        before = joined.get(name)
        joined[name] = (value, compared) if before is None else (f"{before[0]}, {value}", f"{before[1]}, {compared}")
    return joined


def _interfaces(row: _Row, setup: _Row) -> _Found:
    for interface in setup.get("interfaces") or ():
        speed, mtu = interface.get("speed"), interface.get("mtu")
        texts = [str(interface["state"]), _speed(speed), f"MTU {mtu}" if mtu else ""]
        text = ", ".join(filter(None, texts))
        yield f"interface {interface['name']}", text, text
    if setup.get("listens_on"):
        text = ", ".join(map(str, setup["listens_on"]))
        yield LISTENS, text, text
    for port in setup.get("rdma_ports") or ():
        texts = [str(port[key]) for key in ("state", "rate", "link_layer") if port.get(key)]
        text = ", ".join(texts) + _node(port)
        yield f"RDMA port {port['name']}", text, text


def _speed(megabits: int | None) -> str:
    if not megabits:
        return ""
    return f"{megabits / 1000:g} Gbit/s" if megabits >= 1000 else f"{megabits} Mbit/s"


def _node(row: _Row) -> str:
    return f", NUMA node {row['numa_node']}" if "numa_node" in row else ""


def _processor(row: _Row, setup: _Row) -> _Found:
    if cores := str(row.get("cores") or ""):
        count = core_count(cores)
        yield CORES, cores if count == 1 or count is None else f"{cores} ({count:,})", cores
    for key, name in (("processor", "processor"), ("memory_nodes", "memory nodes")):
        if text := str(setup.get(key) or ""):
            yield name, text, text
    if nodes := setup.get("numa_nodes"):
        text = "; ".join(f"{node}: {cores}" for node, cores in nodes.items())
        yield "NUMA nodes", text, text
    for key, name in (("threads", "threads of torch"), ("interop_threads", "inter-op threads of torch")):
        if setup.get(key):
            yield name, str(setup[key]), str(setup[key])


def core_count(cores: str) -> int | None:
    """Return how many cores a list has; None if it is damaged."""
    try:
        return sum(map(len, rank_ranges(cores)))
    except ValueError:
        return None


def _limits(row: _Row, setup: _Row) -> _Found:
    limits = setup.get("limits") or {}
    if "cpus" in limits:
        yield "processor limit", f"{float(limits['cpus']):g} cores", str(float(limits["cpus"]))
    if "memory_bytes" in limits:
        yield "memory limit", format_bytes(int(limits["memory_bytes"])), str(limits["memory_bytes"])


def _devices(row: _Row, setup: _Row) -> _Found:
    if gpus := [str(gpu["model"]) + _node(gpu) for gpu in setup.get("gpus") or ()]:
        text = "; ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus))
        yield "GPUs", text, text
    for name, version in (setup.get("drivers") or {}).items():
        yield f"driver {name}", str(version), str(version)


def _recording(row: _Row, setup: _Row) -> _Found:
    if row.get("recorder"):
        yield "recorder", str(row["recorder"]), str(row["recorder"])
    if setup.get("groups_created"):
        yield "groups created", format_plural(int(setup["groups_created"]), "group"), ""


_READERS: Final[tuple[tuple[str, Callable[[_Row, _Row], _Found]], ...]] = (
    ("version", _versions),
    ("variable", _variables),
    ("library", _libraries),
    ("interface", _interfaces),
    ("processor", _processor),
    ("limit", _limits),
    ("device", _devices),
    ("recording", _recording),
)
