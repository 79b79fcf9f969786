"""The operations of torch and MPI: one row of OPERATIONS has all that reports, theory and networks know of one.

A new operation is a row here, and a hook that maps calls of a library to its name.

The payload S of a call is nccl-tests' size (its doc/PERFORMANCE.md): the buffer of an operation whose ranks all hold
the same bytes, the shares of all ranks together where each rank holds one, and the send buffer of an all_to_all. Each
row says which part of S a rank puts in and which it gets out. A rank that has no input or no output, such as the root
of a broadcast, follows from `flow`.

| operation | input | output | S |
| --- | --- | --- | --- |
| all_reduce, broadcast, reduce, scan, exscan | S | S | the buffer |
| all_gather, gather | own share | S | all shares |
| reduce_scatter, scatter | S | own share | all shares |
| all_to_all | a split for each rank | a split of each rank | the send buffer |
| send, put, accumulate | S | | the message |
| recv, get | | S | the message |
| barrier | | | 0 |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

Number = Any  # a Python number or a numpy array; numpy's own types have no common name for both


class Flow(Enum):
    """Which ranks take part in a call, and which of them cannot end before which others have begun."""

    EVERYONE = auto()
    """All ranks of the group; each waits for every other."""
    FROM_ROOT = auto()
    """All ranks of the group; each waits for the root, which is the call's peer."""
    TO_ROOT = auto()
    """All ranks of the group; the root waits for every other."""
    PREFIX = auto()
    """All ranks of the group; some may wait for lower ranks."""
    SEND = auto()
    """The sender of a message; the peer is its receiver."""
    RECEIVE = auto()
    """The receiver of a message, which waits for the sender, the peer."""
    ONE_SIDED = auto()
    """One rank, which reads or writes memory of the peer; the peer makes no call."""


class Extent(Enum):
    """The part of the payload in a rank's input or output."""

    NOTHING = auto()
    WHOLE = auto()
    SHARE = auto()
    """This rank's share. Shares may have different sizes."""
    SPLITS = auto()
    """A split for each rank, which may be empty."""


class Schedule(Enum):
    """How libraries carry out an operation (`network.algorithms`)."""

    ONE_PHASE = auto()
    """Data passes around a ring once."""
    TWO_PHASES = auto()
    """Data passes around a ring twice, or up and down a tree."""
    CHAIN = auto()
    """The whole payload passes along a chain or down a tree."""
    DIRECT = auto()
    """A message to or from each rank."""


class Equality(Enum):
    """Where all ranks of a call must pass an equal value."""

    NOWHERE = auto()
    IN_TORCH = auto()
    EVERYWHERE = auto()


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What is known about an operation.

    Attributes:
        name: Its name in the event table.
        flow: Who takes part, and who waits for whom.
        input: What a rank puts in, if it has an input.
        output: What a rank gets out, if it has an output.
        wire: Wire bytes (`volume.wire_bytes`), from the payload, the rank's own share of it, the number of ranks n,
            and whether the peer is the calling rank (0 or 1).
        busbw: busbw / algbw for n ranks (nccl-tests doc/PERFORMANCE.md); None: the operation has no busbw.
        reduces: Whether it combines the ranks' values.
        equal_size: Where all ranks must pass the same payload.
        equal_dtype: Where all ranks must pass the same dtype.
        wait_state: Scalasca's name for the wait in it; None: its waits are not known.
        schedule: How libraries carry it out; None: it is not predicted, or is a message.
        colour: Name of its colour in figures (`figures.style`). Related operations share one.
        pattern: plotly's name of the pattern of its bars, which differs between operations of one colour.
    """

    name: str
    flow: Flow
    input: Extent
    output: Extent
    wire: Callable[[Number, Number, Number, Number], Number]
    busbw: Callable[[Number], Number] | None
    reduces: bool = False
    equal_size: Equality = Equality.NOWHERE
    equal_dtype: Equality = Equality.NOWHERE
    wait_state: str | None
    schedule: Schedule | None
    colour: str
    pattern: str = ""

    @property
    def is_message(self) -> bool:
        """Whether it is one end of a point-to-point message."""
        return self.flow in (Flow.SEND, Flow.RECEIVE)

    @property
    def is_one_sided(self) -> bool:
        """Whether only the calling rank takes part."""
        return self.flow is Flow.ONE_SIDED

    @property
    def is_rooted(self) -> bool:
        """Whether the peer of a call is a root."""
        return self.flow in (Flow.FROM_ROOT, Flow.TO_ROOT)

    @property
    def is_synchronizing(self) -> bool:
        """Whether no rank can leave it before all ranks have entered."""
        return self.flow is Flow.EVERYONE

    @property
    def has_parts(self) -> bool:
        """Whether the payload consists of a part for each rank, so that it is a multiple of equal parts."""
        return not {self.input, self.output}.isdisjoint((Extent.SHARE, Extent.SPLITS))


def _nths(rule: Callable[[Number], Number]) -> Callable[[Number, Number, Number, Number], Number]:
    """Return the wire bytes of an operation that sends `rule(n)` n-ths of its payload, but nothing to itself."""
    # The division comes after the product, so that the result is exact if it is a whole number of bytes.
    return lambda payload, local, n, peer_is_self: payload * rule(n) / n


def _others_parts(payload: Number, local: Number, n: Number, peer_is_self: Number) -> Number:
    return payload - local


def _message(payload: Number, local: Number, n: Number, peer_is_self: Number) -> Number:
    return payload * n / n * (1.0 - peer_is_self)  # not known, as of all operations, if the group is not


def _all_but_own(n: Number) -> Number:
    return (n - 1) / n


def _payload(n: Number) -> Number:
    return n / n


_AT_N_X_N: Final = "wait at n x n"
_LATE_BROADCAST: Final = "late broadcast"
_EARLY_REDUCE: Final = "early reduce"

# In the order of legends and stacks. The wire bytes of broadcast and reduce are (n-1)S over the group, so (n-1)/n on
# average; which ranks send depends on the algorithm. Those of all_reduce: Patarasuk and Yuan 2009,
# doi:10.1016/j.jpdc.2008.09.002.
_ROWS: Final = (
    Operation(
        name="all_reduce", flow=Flow.EVERYONE, input=Extent.WHOLE, output=Extent.WHOLE, reduces=True,
        wire=_nths(lambda n: 2 * (n - 1)), busbw=lambda n: 2 * (n - 1) / n,
        equal_size=Equality.EVERYWHERE, equal_dtype=Equality.EVERYWHERE,
        wait_state=_AT_N_X_N, schedule=Schedule.TWO_PHASES, colour="blue",
    ),
    Operation(
        name="all_gather", flow=Flow.EVERYONE, input=Extent.SHARE, output=Extent.WHOLE,
        wire=_others_parts, busbw=_all_but_own,
        equal_size=Equality.IN_TORCH, equal_dtype=Equality.IN_TORCH,
        wait_state=_AT_N_X_N, schedule=Schedule.ONE_PHASE, colour="orange",
    ),
    Operation(
        name="reduce_scatter", flow=Flow.EVERYONE, input=Extent.WHOLE, output=Extent.SHARE, reduces=True,
        wire=_others_parts, busbw=_all_but_own,
        equal_size=Equality.IN_TORCH, equal_dtype=Equality.EVERYWHERE,
        wait_state=_AT_N_X_N, schedule=Schedule.ONE_PHASE, colour="green",
    ),
    Operation(
        name="all_to_all", flow=Flow.EVERYONE, input=Extent.SPLITS, output=Extent.SPLITS,
        wire=_others_parts, busbw=_all_but_own,
        wait_state=_AT_N_X_N, schedule=Schedule.DIRECT, colour="vermilion",
    ),
    Operation(
        name="broadcast", flow=Flow.FROM_ROOT, input=Extent.WHOLE, output=Extent.WHOLE,
        wire=_nths(lambda n: n - 1), busbw=_payload,
        equal_size=Equality.EVERYWHERE,
        wait_state=_LATE_BROADCAST, schedule=Schedule.CHAIN, colour="pink",
    ),
    Operation(
        name="send", flow=Flow.SEND, input=Extent.WHOLE, output=Extent.NOTHING,
        wire=_message, busbw=_payload,
        equal_size=Equality.IN_TORCH,
        wait_state="late receiver", schedule=None, colour="sky",
    ),
    Operation(
        name="recv", flow=Flow.RECEIVE, input=Extent.NOTHING, output=Extent.WHOLE,
        wire=_nths(lambda n: 0 * n), busbw=_payload,
        equal_size=Equality.IN_TORCH,
        wait_state="late sender", schedule=None, colour="sky", pattern="/",
    ),
    Operation(
        name="reduce", flow=Flow.TO_ROOT, input=Extent.WHOLE, output=Extent.WHOLE, reduces=True,
        wire=_nths(lambda n: n - 1), busbw=_payload,
        equal_size=Equality.EVERYWHERE, equal_dtype=Equality.EVERYWHERE,
        wait_state=_EARLY_REDUCE, schedule=Schedule.CHAIN, colour="blue", pattern="/",
    ),
    Operation(
        name="gather", flow=Flow.TO_ROOT, input=Extent.SHARE, output=Extent.WHOLE,
        wire=lambda payload, local, n, is_root: local * (1.0 - is_root), busbw=_all_but_own,
        wait_state=_EARLY_REDUCE, schedule=Schedule.DIRECT, colour="orange", pattern="/",
    ),
    Operation(
        name="scatter", flow=Flow.FROM_ROOT, input=Extent.WHOLE, output=Extent.SHARE,
        wire=lambda payload, local, n, is_root: (payload - local) * is_root, busbw=_all_but_own,
        wait_state=_LATE_BROADCAST, schedule=Schedule.DIRECT, colour="green", pattern="/",
    ),
    Operation(
        name="scan", flow=Flow.PREFIX, input=Extent.WHOLE, output=Extent.WHOLE, reduces=True,
        wire=_nths(lambda n: n - 1), busbw=None,
        equal_size=Equality.EVERYWHERE, equal_dtype=Equality.EVERYWHERE,
        wait_state=None, schedule=None, colour="blue", pattern="x",
    ),
    Operation(
        name="exscan", flow=Flow.PREFIX, input=Extent.WHOLE, output=Extent.WHOLE, reduces=True,
        wire=_nths(lambda n: n - 1), busbw=None,
        equal_size=Equality.EVERYWHERE, equal_dtype=Equality.EVERYWHERE,
        wait_state=None, schedule=None, colour="blue", pattern="\\",
    ),
    Operation(
        name="put", flow=Flow.ONE_SIDED, input=Extent.WHOLE, output=Extent.NOTHING,
        wire=_message, busbw=None,
        wait_state=None, schedule=None, colour="vermilion", pattern="/",
    ),
    Operation(
        name="get", flow=Flow.ONE_SIDED, input=Extent.NOTHING, output=Extent.WHOLE,
        wire=_nths(lambda n: 0 * n), busbw=None,
        wait_state=None, schedule=None, colour="vermilion", pattern="\\",
    ),
    Operation(
        name="accumulate", flow=Flow.ONE_SIDED, input=Extent.WHOLE, output=Extent.NOTHING, reduces=True,
        wire=_message, busbw=None,
        wait_state=None, schedule=None, colour="vermilion", pattern="x",
    ),
    Operation(
        name="barrier", flow=Flow.EVERYONE, input=Extent.NOTHING, output=Extent.NOTHING,
        wire=_nths(lambda n: 0 * n), busbw=None,
        wait_state="wait at barrier", schedule=Schedule.TWO_PHASES, colour="grey",
    ),
)  # fmt: skip

OPERATIONS: Final = {operation.name: operation for operation in _ROWS}
"""The operations by name, in the order of legends and stacks."""


def operations_where(condition: Callable[[Operation], object]) -> tuple[str, ...]:
    """Return the names of the operations that a condition holds for, in the order of OPERATIONS."""
    return tuple(name for name, operation in OPERATIONS.items() if condition(operation))


MESSAGES: Final = operations_where(lambda operation: operation.is_message)
"""Names of the two ends of a point-to-point message."""
