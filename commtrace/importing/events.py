"""What importers yield: for each process of a run, what is known of it, then its calls and what surrounds them.

An importer is a generator of these events. It leaves out what its source does not know: None, "" or an empty
tuple mean "not known", and are written to the log as such. Times are ns since 1970, or of any clock with one origin
for all events of a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from commtrace.schema import Clock, Phase, Purpose, State

MOST_RANKS: Final = 1 << 20
"""Ranks of a job that are thought possible; larger numbers in a file are damaged."""

Spans: TypeAlias = npt.NDArray[np.int64]
"""Begins and ends in ns, shape (n, 2), ascending and disjoint."""


@dataclass(frozen=True)
class ImportedProcess:
    """A process; the following events are of it.

    Attributes:
        rank: Its rank.
        world_size: Ranks of the job.
        host: Name of its host.
        pid: Its process id.
        tool: What recorded it.
        moment_ns: A moment of its events, in ns.
        alive_ns: When the process was last known to run, in ns, if its calls go on after those in the source; 0: they
            do not.
        clock_is_wall: Whether times are ns since 1970.
        has_times: Whether the source says when calls were made.
        facts: Further facts, such as versions and the device.
    """

    rank: int | None
    world_size: int | None = None
    host: str = ""
    pid: int | None = None
    tool: str = ""
    moment_ns: int = 0
    alive_ns: int = 0
    clock_is_wall: bool = True
    has_times: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ImportedGroup:
    """A process group: its global ranks in its own order, name and description."""

    ranks: tuple[int, ...]
    name: str = ""
    description: str = ""
    backend: str = ""


@dataclass(frozen=True)
class ImportedSite:
    """A call site, the purpose of its calls, and the module that it is about."""

    file: str = ""
    line: int = 0
    function: str = ""
    purpose: Purpose | None = None
    module: str = ""


@dataclass(frozen=True)
class ImportedCall:
    """A call, with the fields of `schema.RECORD`; 0, -1 and None mean "not known".

    Attributes:
        kind: Operation, variant, API, dtype and reduction.
        payload: Bytes of the buffer; None: not known.
        local: Bytes of it that never leave the rank.
        seq: Its number in its group, as the source states it.
        seq_of_operation: Whether that number counts the calls of each operation of the group by itself.
        step: Training step; -1: none.
    """

    kind: tuple[str, str, str, str, str]
    group: ImportedGroup | None = None
    payload: int | None = None
    local: int | None = 0
    seq: int | None = None
    seq_of_operation: bool = False
    t_begin: int = 0
    t_return: int = 0
    t_wait: int = 0
    t_start: int = 0
    t_end: int = 0
    step: int = -1
    peer: int = -1
    tag: int = -1
    batch: int = 0
    thread: int = 1
    phase: Phase = Phase.OTHER
    clock: Clock = Clock.NONE
    flags: int = 0
    state: State = State.UNOBSERVABLE
    site: ImportedSite | None = None


@dataclass(frozen=True)
class ImportedTotal:
    """Equal calls that the source counts without saying when each was; the log has them as a summary.

    Attributes:
        call: What is known of each of them: no times, and no number. Its clock says what observed the ends.
        calls: Number of calls, at least 1.
        is_exact: Whether the payload is that of each call; False: the source rounds it.
        in_flight_ns: Times from the arrival to the end, for bandwidths, in ns: of each call, or none.
        to_completion_ns: Times from the call to its end in ns: of each call, or none.
    """

    call: ImportedCall
    calls: int = 1
    is_exact: bool = True
    in_flight_ns: Sequence[int] = ()
    to_completion_ns: Sequence[int] = ()


@dataclass(frozen=True)
class NotRecorded:
    """Calls that the source counted and did not keep."""

    calls: int


@dataclass(frozen=True)
class DeviceWork:
    """What the device did besides communication: times in which a kernel computed, and in which memory was copied."""

    computation: Spans
    copies: Spans


@dataclass(frozen=True)
class StepSpans:
    """The training steps: numbers, shape (n,), and begins and ends in ns, shape (n, 2), on the device if known."""

    steps: npt.NDArray[np.int64]
    spans: Spans


@dataclass(frozen=True)
class NotKnown:
    """A fact about the calls that the source lacks, as a sentence without full stop."""

    text: str


@dataclass(frozen=True)
class Problem:
    """What is wrong with the source, such as "cut after 1,234 bytes", what follows, and the kind of the note on it."""

    text: str
    consequence: str
    kind: Literal["cut", "garbled"] = "garbled"


Event: TypeAlias = (
    ImportedProcess | ImportedCall | ImportedTotal | NotRecorded | DeviceWork | StepSpans | NotKnown | Problem
)
