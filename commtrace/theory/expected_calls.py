"""What a prediction is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from commtrace.volume import wire_bytes


@dataclass(frozen=True)
class ExpectedCall:
    """Calls of one operation and size. `cause` says in a sentence what they are for."""

    op: str
    payload: int
    cause: str
    calls: int = 1
    most: int | None = None  # calls at the most, where their number depends on what the job does not say
    role: str = "data"
    ranks: int | None = None  # of the group, where a role has groups of several sizes
    least: int | None = None  # bytes at the least, where the size depends on the data; `payload` is the most

    @property
    def bytes(self) -> int:
        """Payload of all of them."""
        return self.payload * self.calls

    def among(self, ranks: int) -> ExpectedCall:
        """The same in a group of so many ranks; in one of a single rank nothing leaves it."""
        return replace(self, ranks=ranks, role="self" if ranks == 1 else self.role)

    def times(self, number: int) -> ExpectedCall:
        """The same, so many times."""
        return replace(self, calls=self.calls * number, most=None if self.most is None else self.most * number)


@dataclass(frozen=True)
class WaterfallBar:
    """A part of what a rank sends in a step: wire bytes, exact, and what they are."""

    label: str
    bytes: Fraction
    role: str = "data"


@dataclass(frozen=True)
class Prediction:
    """Everything that one rank communicates. Steps from `steady` on are alike."""

    scheme: str
    ranks: int
    start: tuple[ExpectedCall, ...]
    steps: tuple[tuple[ExpectedCall, ...], ...]
    closed_form: WaterfallBar
    """What the paper says of a step."""
    bars: tuple[WaterfallBar, ...]
    """From there to what this prediction says of a steady step, one part a cause; their sum is exact."""
    skipped: tuple[tuple[ExpectedCall, ...], ...] = ()
    """What a step leaves out when gradients overflow: found by the check, or by the norm."""
    others: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the groups of other roles than the one that has `ranks`."""
    forms: tuple[WaterfallBar, ...] = ()
    """What `closed_form` is the sum of, where it has several parts, each of a role of its own."""

    def ranks_of(self, role: str) -> int:
        """Size of the group of a role."""
        return self.others.get(role, self.ranks)

    def step(self, number: int) -> tuple[ExpectedCall, ...]:
        """The calls of a training step, from 0; of start-up: -1."""
        return self.start if number < 0 else self.steps[min(number, len(self.steps) - 1)]

    @property
    def steady(self) -> int:
        """The first of the steps that are alike."""
        return len(self.steps) - 1


def exact_wire_bytes(op: str, payload: int, ranks: int) -> Fraction:
    """Bytes that a rank must at least send for a collective with equal shares, exact (`commtrace.volume`)."""
    # The rules are linear in the payload: n times the payload makes whole bytes, which a float holds exactly.
    return Fraction(int(wire_bytes(op, payload * ranks, payload, ranks)), ranks)


def total_wire_bytes(messages: Iterable[ExpectedCall], ranks: int) -> Fraction:
    """Bytes that a rank must at least send for all of them, in groups of so many ranks unless they say otherwise."""
    return sum((exact_wire_bytes(one.op, one.payload, one.ranks or ranks) * one.calls for one in messages), Fraction(0))


def level_bars(start: Fraction, levels: Mapping[str, Fraction]) -> list[WaterfallBar]:
    """From one level to the next, a bar for each: together they lead from `start` to the last level, exactly."""
    bars, before = [], start
    for label, level in levels.items():
        bars.append(WaterfallBar(label, level - before))
        before = level
    return bars


def cause_bars(messages: Iterable[ExpectedCall], ranks: int, prefix: str = "") -> list[WaterfallBar]:
    """A bar for each cause among messages that no closed form counts; `prefix` begins its label."""
    bars: dict[str, Fraction] = {}
    for one in messages:
        bars[one.cause] = bars.get(one.cause, Fraction(0)) + total_wire_bytes([one], ranks)
    return [WaterfallBar(prefix + cause, size) for cause, size in bars.items()]


def drop_repeated_steps(steps: Iterable[tuple[ExpectedCall, ...]]) -> tuple[tuple[ExpectedCall, ...], ...]:
    """The steps without repetitions of the last."""
    found = list(steps)
    while len(found) > 1 and sorted_calls(found[-1]) == sorted_calls(found[-2]):
        found.pop()
    return tuple(found)


def sorted_calls(messages: Iterable[ExpectedCall]) -> list[tuple[str, int, int]]:
    """Operations, sizes and counts, whatever the order."""
    sums: dict[tuple[str, int], int] = {}
    for one in messages:
        sums[one.op, one.payload] = sums.get((one.op, one.payload), 0) + one.calls
    return sorted((op, payload, calls) for (op, payload), calls in sums.items())
