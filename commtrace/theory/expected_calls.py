"""Expected calls of a job, and its prediction, which consists of them; bars of a waterfall, summed over calls."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache

from commtrace.volume import wire_bytes


@dataclass(frozen=True)
class ExpectedCall:
    """Calls that one rank makes with the same operation and payload.

    Attributes:
        op: Operation, as in the event table ("all_reduce").
        payload: Payload of each call in bytes, as nccl-tests counts it.
        cause: What the calls are for, in a few words.
        calls: Number of calls.
        max_calls: Maximum number of calls, if it depends on facts that no job row has; None: exactly `calls`.
        role: Parallel dimension of the group: "data", "tensor", "pipeline" ...; "self" for a group of one rank.
        ranks: Ranks of the group, if the role has groups of several sizes; None: `Prediction.ranks_of(role)`.
        min_payload: Minimum payload, if it depends on the data and `payload` is the maximum; None: `payload`.
    """

    op: str
    payload: int
    cause: str
    calls: int = 1
    max_calls: int | None = None
    role: str = "data"
    ranks: int | None = None
    min_payload: int | None = None

    @property
    def bytes(self) -> int:
        """Payload of all calls together."""
        return self.payload * self.calls

    def among(self, ranks: int) -> ExpectedCall:
        """Return the calls in a group of `ranks` ranks; a group of one has the role "self"."""
        return replace(self, ranks=ranks, role="self" if ranks == 1 else self.role)

    def times(self, number: int) -> ExpectedCall:
        """Return the calls repeated `number` times."""
        max_calls = None if self.max_calls is None else self.max_calls * number
        return replace(self, calls=self.calls * number, max_calls=max_calls)


@dataclass(frozen=True)
class WaterfallBar:
    """A labelled part of the wire bytes that a rank sends in a step. The bytes are exact."""

    label: str
    bytes: Fraction
    role: str = "data"


def _no_special_step(number: int) -> None:
    """Return None: `Prediction.steps` has the calls of every step."""


@dataclass(frozen=True)
class Prediction:
    """All calls that one rank of a job makes.

    Attributes:
        scheme: Name of the parallelism ("ZeRO-1").
        ranks: Ranks of the data-parallel group.
        start: Calls at start-up, before the first step.
        steps: Calls of each training step. All later steps equal the last one; repetitions of it are dropped.
        closed_form: Wire bytes of a step according to the literature's formula.
        bars: Waterfall from the closed form to the wire bytes of the last of `steps`; their sum is exact.
        skipped: Calls that a step omits if the overflow check detects an overflow, and if only the norm does.
        others: Group sizes of the other roles.
        forms: Summands of `closed_form`, if it has several of different roles.
        special_step: Returns the calls of a step, by its number, if they differ from those in `steps`; else None.
    """

    scheme: str
    ranks: int
    start: tuple[ExpectedCall, ...]
    steps: tuple[tuple[ExpectedCall, ...], ...]
    closed_form: WaterfallBar
    bars: tuple[WaterfallBar, ...]
    skipped: tuple[tuple[ExpectedCall, ...], ...] = ()
    others: Mapping[str, int] = field(default_factory=dict)
    forms: tuple[WaterfallBar, ...] = ()
    special_step: Callable[[int], tuple[ExpectedCall, ...] | None] = _no_special_step

    def __post_init__(self) -> None:
        """Drop repetitions of the last step at the end."""
        steps = self.steps
        while len(steps) > 1 and sorted_calls(steps[-1]) == sorted_calls(steps[-2]):
            steps = steps[:-1]
        object.__setattr__(self, "steps", steps)

    def ranks_of(self, role: str) -> int:
        """Return the group size of a role."""
        return self.others.get(role, self.ranks)

    def step(self, number: int) -> tuple[ExpectedCall, ...]:
        """Return the calls of a training step, counted from 0; -1 is start-up."""
        if number < 0:
            return self.start
        special = self.special_step(number)
        return self.steps[min(number, len(self.steps) - 1)] if special is None else special

    def with_steps(self, calls: Mapping[int, tuple[ExpectedCall, ...]]) -> Prediction:
        """Return the prediction with these calls; each key is the first of the steps that have them."""
        firsts = sorted(calls)

        @cache
        def is_regular(first: int, regular: int) -> bool:
            return count_calls(calls[first]) == count_calls(self.steps[regular])

        def special_step(number: int) -> tuple[ExpectedCall, ...] | None:
            first = firsts[bisect_right(firsts, number) - 1]
            return None if is_regular(first, min(number, self.steady)) else calls[first]

        return replace(self, special_step=special_step)

    @property
    def has_special_steps(self) -> bool:
        """Whether a step may have other calls than those in `steps`."""
        return self.special_step is not _no_special_step

    @property
    def steady(self) -> int:
        """Number of the step that all later steps equal, unless they are special."""
        return len(self.steps) - 1


def exact_wire_bytes(op: str, payload: int, ranks: int) -> Fraction:
    """Return the exact wire bytes of a collective with equal shares. `commtrace.volume` returns floats."""
    # wire_bytes is linear in the payload. n times the payload makes whole bytes, which a float holds exactly.
    return Fraction(int(wire_bytes(op, payload * ranks, payload, ranks)), ranks)


def total_wire_bytes(calls: Iterable[ExpectedCall], ranks: int, *causes: str) -> Fraction:
    """Return the wire bytes of calls in groups of `ranks` ranks, unless a call has its own `ranks`.

    If any causes are given, only their calls are counted.
    """
    chosen = (call for call in calls if not causes or call.cause in causes)
    sent = (exact_wire_bytes(call.op, call.payload, call.ranks or ranks) * call.calls for call in chosen)
    return sum(sent, Fraction(0))


def count_calls(calls: Iterable[ExpectedCall]) -> Counter[ExpectedCall]:
    """Count equal calls. The result does not depend on the order of `calls`."""
    counts = Counter[ExpectedCall]()
    for call in calls:
        counts[replace(call, calls=1)] += call.calls
    return counts


def sorted_calls(calls: Iterable[ExpectedCall]) -> list[tuple[str, int, int]]:
    """Return (operation, payload, number of calls), sorted. The result does not depend on the order of `calls`."""
    counts = Counter[tuple[str, int]]()
    for call in calls:
        counts[call.op, call.payload] += call.calls
    return sorted((op, payload, number) for (op, payload), number in counts.items())


def level_bars(start: Fraction, levels: Mapping[str, Fraction]) -> list[WaterfallBar]:
    """Return a bar for each level: its difference from the previous level (from `start` for the first)."""
    before = (start, *levels.values())
    return [WaterfallBar(label, level - below) for (label, level), below in zip(levels.items(), before, strict=False)]


def cause_bars(calls: Iterable[ExpectedCall], ranks: int, *counted: str, prefix: str = "") -> list[WaterfallBar]:
    """Return a bar for each cause of calls, except `counted` causes, which a closed form or a level includes."""
    totals: dict[str, Fraction] = {}
    for call in calls:
        if call.cause not in counted:
            totals[call.cause] = totals.get(call.cause, Fraction(0)) + total_wire_bytes([call], ranks)
    return [WaterfallBar(prefix + cause, total) for cause, total in totals.items()]
