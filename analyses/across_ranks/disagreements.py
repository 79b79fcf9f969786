"""Disagreements between the ranks of one operation: different operations, sizes, types or roots.

Only ranks whose logs lack nothing are compared (`Member.proves`). If the operations differ, their
sizes, types and roots are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from commtrace.analyses.grouping import Array
from commtrace.formatting import MAX_SINGLE, format_count
from commtrace.operations import MESSAGES, OPERATIONS, Equality, Operation, operations_where
from commtrace.rank_ranges import format_ranks, shorten_rank_list
from commtrace.reading.labels import UNKNOWN
from commtrace.schema import Flag

from .last_calls import LastCalls

_OWN_SIZES: Final = Flag.OBJECT | Flag.UNEVEN | Flag.SPARSE
_ROOTED: Final = operations_where(lambda operation: operation.is_rooted)
TAG, COMMUNICATOR, ORDER = "tag", "communicator", "order"
_SUBJECTS: Final = {"op": "operation", "payload": "size", "dtype": "dtype", "peer": "root"}


class Disagreement(NamedTuple):
    """What the ranks of an operation disagree about.

    Attributes:
        subject: "operation", "size", "dtype", "root", "tag", "communicator" or "order".
        values: The values and the ranks that have each; for "order", the calls that the ranks are in.
    """

    subject: str
    values: Sequence[tuple[str, Sequence[int]]] = ()

    def __str__(self) -> str:
        if self.subject == COMMUNICATOR:
            return f"{COMMUNICATOR}: may not be the same, because it has no name and the call sites differ"
        is_order = self.subject == ORDER
        parts = [
            f"rank {format_ranks(ranks)} is in {value}" if is_order else f"{value} on rank {_short(ranks)}"
            for value, ranks in self.values[:MAX_SINGLE]
        ]
        more = f" and {len(self.values) - len(parts):,} more" if len(parts) < len(self.values) else ""
        return f"{self.subject}: {', '.join(parts)}{more}{', which waits in turn' * is_order}"


def _short(ranks: Sequence[int]) -> str:
    return shorten_rank_list(format_ranks(ranks))


class Disagreements:
    """Comparison of the calls of each operation."""

    def __init__(self, last: LastCalls) -> None:
        self._last = last

    @property
    def of_instances(self) -> Array:
        """Whether the calls of each instance disagree, bool, shape (instances,)."""
        return np.asarray(np.any([self._differs(*compared) for compared in self._compared.items()], axis=0))

    def _differs(self, column: str, mask: Array) -> Array:
        """Return whether the masked values of each instance differ, bool, shape (instances,)."""
        calls = self._last.calls
        lowest = calls.smallest(np.where(mask, calls[column], np.iinfo(np.int64).max))
        return np.asarray(lowest < calls.largest(np.where(mask, calls[column], -1), -1))

    @cached_property
    def _compared(self) -> dict[str, Array]:
        """Whether a call's value must equal the others', by column; bool, shape (calls,)."""
        calls = self._last.calls
        message = calls.has_label("op", *MESSAGES)
        reliable = np.array([member.proves for member in self._last.members], bool)[calls["process"]]
        same_size = self._must_equal(lambda operation: operation.equal_size)
        same_dtype = self._must_equal(lambda operation: operation.equal_dtype)
        same_op = calls.per_call(~self._differs("op", reliable))
        known = reliable & (same_op | message)
        return {
            "op": reliable & ~message,
            "payload": known & same_size & ((calls["flags"] & _OWN_SIZES) == 0),
            "dtype": known & same_dtype & ~calls.has_label("dtype", "", "object", UNKNOWN),
            "peer": known & calls.has_label("op", *_ROOTED) & (calls["peer"] >= 0),
        }

    def _must_equal(self, equality: Callable[[Operation], Equality]) -> Array:
        """Return whether a value of each call must equal the other ranks', bool, shape (calls,)."""
        calls = self._last.calls
        names: dict[Equality, list[str]] = {where: [] for where in Equality}
        for name, operation in OPERATIONS.items():
            names[equality(operation)].append(name)
        in_torch = calls.has_label("api", "torch") & calls.has_label("op", *names[Equality.IN_TORCH])
        return calls.has_label("op", *names[Equality.EVERYWHERE]) | in_torch

    def of_calls(self, indices: Iterable[int]) -> list[Disagreement]:
        """Return what calls of one instance, given by their indices, disagree about."""
        found = []
        at = np.array(sorted(indices))
        for column, mask in self._compared.items():
            calls = at[mask[at]]
            values = self._last.calls[column][calls].tolist()
            if len({*values}) > 1:
                ranks: dict[int, list[int]] = {}
                for value, call in zip(values, calls.tolist(), strict=True):
                    ranks.setdefault(value, []).append(self._last.member(call).rank)
                named = [(self._text(column, value), same) for value, same in ranks.items()]
                found.append(Disagreement(_SUBJECTS[column], named))
        return found

    def _text(self, column: str, value: int) -> str:
        if column in self._last.calls.categories:
            return str(self._last.calls.categories[column][value])
        return f"{format_count(value)} bytes" if column == "payload" else f"rank {value}"
