"""The calls of a run by rank and step: one form, whoever recorded or expects them.

Equal steps are stored once, and consecutive equal steps of a rank are one period, so that the size does not depend on
the number of steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from commtrace.analyses.grouping import Array
from commtrace.analyses.process_settings import ProcessSettings
from commtrace.reading.labels import NOT_RECORDED

from .call_keys import CallKey, CellKey
from .own_calls import OwnCalls, OwnKey

START_UP: Final = -1
"""Number of the step of calls before the first training step."""

GroupLabel: TypeAlias = tuple[str, str]
"""Role and shape of a group."""


class Call(NamedTuple):
    """A call, the function that made it, without line number ("train.py main"), and why it did.

    Purpose and place are "" where they do not count.
    """

    key: CallKey
    site: str
    purpose: str = ""
    place: str = ""


@dataclass(frozen=True)
class EqualCalls:
    """Calls of one step of one rank that are equal in all fields.

    Unmatched calls of a comparison were recorded but not expected, or, with `calls`, `bytes` and `wire` below 0,
    expected but not recorded.
    """

    key: CallKey
    calls: int
    bytes: int
    site: str = ""
    wire: Fraction | None = None
    """Their wire bytes; None: not known."""
    min_payload: int | None = None
    """Minimum payload of expected calls whose payload is only bounded; None: the payload of `key`."""
    purpose: str = NOT_RECORDED
    """Why they were made: the value of a `schema.Purpose`. Of calls that rules expect: what they are for."""
    place: str = ""
    """What the purpose is about: a module or unit with placements, a bucket, a stage."""

    @property
    def origin(self) -> tuple[str, str, str]:
        """Where the calls come from: call site, purpose and place."""
        return self.site, self.purpose, self.place

    def number(self, calls: int) -> EqualCalls:
        """Return this many of the calls; below 0 for calls that were not recorded."""
        wire = None if self.wire is None else self.wire * calls / self.calls
        return replace(self, calls=calls, bytes=self.bytes * calls // self.calls, wire=wire)


@dataclass(frozen=True)
class StepCalls:
    """The calls of one step."""

    calls: tuple[EqualCalls, ...]
    orders: Mapping[GroupLabel, str] = field(default_factory=dict)
    """Digest of the order of the keys in each group, if the order is known. Equal digests mean equal calls."""
    sequences: Mapping[GroupLabel, Sequence[CallKey]] = field(default_factory=dict, compare=False)
    """The keys in their order; empty where only digests of the order are known."""
    declared: tuple[EqualCalls, ...] = ()
    """Calls that were declared to be the program's own, and are not compared."""
    max_calls: Mapping[CellKey, int] = field(default_factory=dict, compare=False)
    """Maximum number of calls of cells whose number depends on the order of modules and gradients."""

    @classmethod
    def of(
        cls,
        counts: Mapping[Call, int],
        orders: Mapping[GroupLabel, str],
        sequences: Mapping[GroupLabel, Sequence[CallKey]] | None = None,
    ) -> StepCalls:
        """Return the step that has each call this often."""
        calls = [
            EqualCalls(key, count, max(key.payload, 0) * count, site, purpose=purpose or NOT_RECORDED, place=place)
            for (key, site, purpose, place), count in sorted(counts.items())
        ]
        return cls(tuple(calls), orders, sequences or {})

    def __hash__(self) -> int:
        """Return a hash that is equal for equal calls in equal order."""
        return hash(self.digest) if self.orders else hash(self.calls)

    @cached_property
    def digest(self) -> tuple[tuple[GroupLabel, str], ...]:
        """Digest that is equal for steps with equal calls in equal order, from any call sites."""
        return tuple(sorted(self.orders.items()))

    @cached_property
    def volume(self) -> tuple[int, int]:
        """Number of calls, and their payload in bytes."""
        return sum(calls.calls for calls in self.calls), sum(calls.bytes for calls in self.calls)

    @cached_property
    def sites_by_key(self) -> Mapping[CallKey, Counter[str]]:
        """Number of calls by key and call site."""
        by_key: dict[CallKey, Counter[str]] = defaultdict(Counter)
        for calls in self.calls:
            by_key[calls.key][calls.site] += calls.calls
        return by_key


NO_CALLS: Final = StepCalls(())


@dataclass(frozen=True, eq=False)
class RankCalls:
    """The calls of a rank by period: consecutive steps with equal calls.

    Attributes:
        first: First step of each period, int64, shape (periods,), ascending. Step -1 is start-up.
        content: Index into `RunCalls.contents` for the steps of each period, int64, shape (periods,).
        ended: Whether the rank ran to its end. If not, its last step may be incomplete.
        lost_records: Number of counted calls that have no record.
        losses: What recording lost (`Process.losses`).
        problem: Why the rank cannot be compared (`Process.steps_problem`).
    """

    first: Array
    content: Array
    ended: bool = True
    lost_records: int = 0
    losses: str = ""
    problem: str | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """What the comparison of the rank depends on; equal for equal ranks of a run."""
        return self.first.tobytes(), self.content.tobytes(), self.ended, self.lost_records > 0

    @property
    def last_step(self) -> int:
        """The last step that has a call; -1 without one."""
        return int(self.first[-1]) - 1 if len(self.first) else START_UP

    @property
    def last_complete_step(self) -> int:
        """The last step that lacks no call: a rank that did not run to its end may have been within its last one."""
        return self.last_step if self.ended else self.last_step - 1

    def at(self, steps: Array) -> Array:
        """Return the index into `RunCalls.contents` for each of these steps, int64, same shape as `steps`."""
        return np.append(0, self.content)[np.searchsorted(self.first, steps, side="right")]


def periods(steps: Array, contents: Array) -> tuple[Array, Array]:
    """Return `first` and `content` of a rank, given ascending steps and the content of each; others have no calls."""
    begins = np.flatnonzero((np.diff(steps, prepend=steps[:1] - 2) != 1) | (np.diff(contents, prepend=-1) != 0))
    ends = steps[np.append(begins[1:], len(steps)) - 1] + 1 if len(steps) else steps
    first = np.stack([steps[begins], ends], axis=1).ravel()
    content = np.stack([contents[begins], np.zeros_like(begins)], axis=1).ravel()
    is_last = np.diff(first, append=first[-1:] + 1) != 0  # a period that begins where the one before ends replaces it
    return first[is_last], content[is_last]


@dataclass(frozen=True, eq=False)
class RunCalls:
    """The calls of a run."""

    name: str
    contents: Sequence[StepCalls]
    """The distinct steps. The first one is empty."""
    ranks: Mapping[int, RankCalls]
    world_size: int | None
    partial: bool = False
    """Whether ranks may be absent because they were not run (dry run)."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """World size, versions and job of the run, as text."""
    lines: Mapping[Call, frozenset[str]] = field(default_factory=dict)
    """Lines of code that made a call: "project/train.py:40 main"."""
    own: Mapping[OwnKey, OwnCalls] = field(default_factory=dict)
    """Calls that were declared to be the program's own."""
    settings: Mapping[int, ProcessSettings] = field(default_factory=dict)
    """How each rank was set up; empty: not known."""
    step_ranges: Sequence[range] = ()
    """Steps that were recorded; none: all."""

    @cached_property
    def last_step(self) -> int:
        """The last step of any rank that can be compared; -1 if there is none."""
        return max((calls.last_step for calls in self.ranks.values() if not calls.problem), default=START_UP)

    def volume(self, rank: int) -> tuple[int, int]:
        """Return the number of calls of a rank, and their payload in bytes."""
        calls = self.ranks[rank]
        lengths = np.diff(calls.first, append=calls.last_step + 1).tolist()
        volumes = [self.contents[content].volume for content in calls.content.tolist()]
        return tuple(sum(volume[at] * n for volume, n in zip(volumes, lengths, strict=True)) for at in (0, 1))
