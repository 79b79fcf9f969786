"""Keys of calls in a comparison of runs. They are equal where ranks and runs make the same calls."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final, NamedTuple, TypeAlias

from commtrace.library_frames import path_below_packages
from commtrace.operations import OPERATIONS
from commtrace.reading.table_reader import RecordedGroup, Site

OBJECTS: Final = -1
"""Payload of a call with pickled objects: their size depends on host names; it is not compared."""

SUMMED: Final = -2
"""Payload of calls of which only the sum of their payloads is known."""

UNKNOWN: Final = -3
"""Payload of calls that the source of an imported run does not state."""

ROUTED: Final = -4
"""Payload of a call with tokens of experts, where it is not compared: it depends on the data."""

UNCOMPARED_SIZES: Final[Mapping[int, str]] = {OBJECTS: "pickled objects", ROUTED: "tokens of experts"}
"""Payloads of which only the number of calls is compared -> what the calls carry."""

ANY: Final = "*"
"""Label of an expected call that matches any label of a recorded one."""


CellKey: TypeAlias = tuple[str, str]
"""Parallel dimension and operation."""


class CallKey(NamedTuple):
    """What identifies a call. Missing labels are "-"; rules leave labels open (ANY)."""

    op: str
    payload: int
    dtype: str
    reduce_op: str
    phase: str
    role: str
    group: str
    """Shape of the group: `group_shape`."""
    peer: str
    """Distance in the group for a message ("peer=+1"); else position of the root ("root=0")."""

    @property
    def cell(self) -> CellKey:
        """Parallel dimension and operation."""
        return self.role, self.op


def site_name(site: Site) -> str:
    """Return a call site without line number and without folders that differ between checkouts."""
    file = site.file.replace("\\", "/")
    return f"{path_below_packages(file) or file.rpartition('/')[2]} {site.function}".rstrip()


@functools.cache
def group_shape(ranks: tuple[int, ...]) -> str:
    """Describe the ranks of a group, so that a member can derive the others from its own rank.

    "4/2" is 4 ranks with stride 2. "2/4+1" is 2 ranks with stride 4; the first of them, divided by
    the stride, is 1 modulo the size. Ranks without a constant stride are described by a digest of
    their distances.
    """
    if len(ranks) < 2:
        return str(len(ranks))
    gaps = [after - before for before, after in itertools.pairwise(ranks)]
    if len({*gaps}) > 1 or not gaps[0]:  # in a damaged log, ranks may be equal
        return f"{len(ranks)}#{blake2b(repr(gaps).encode(), digest_size=3).hexdigest()}"
    stride = gaps[0]
    offset = ranks[0] // stride % len(ranks)
    return f"{len(ranks)}" + (f"/{stride}" if stride > 1 else "") + (f"+{offset}" if offset else "")


def peer_label(op: str, peer: int, rank: int, group: RecordedGroup | None) -> str:
    """Return the peer of a call relative to its rank (`CallKey.peer`); "" without a peer."""
    if peer < 0:
        return ""
    if group is None or peer not in group.ranks or rank not in group.ranks:
        return f"rank={peer}"
    position = group.ranks.index(peer)
    operation = OPERATIONS.get(op)
    if operation is None or not (operation.is_message or operation.is_one_sided):
        return f"root={position}"
    size = len(group.ranks)
    distance = (position - group.ranks.index(rank)) % size
    return f"peer={distance - size if distance > size // 2 else distance:+d}"
