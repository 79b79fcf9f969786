"""Limits on exposed communication, overlap and waiting, for continuous integration (`check --max-exposed`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, TypeAlias

from commtrace.formatting import format_duration, format_share, is_known

from .overlap import ALL, EXPOSED_COMMUNICATION, OVERLAP_BY
from .sections import Tables


@dataclass(frozen=True)
class Limit:
    """A limit: the measure's name (a key of MEASURES), the fraction, and the operation that it is about, or ""."""

    measure: str
    fraction: Fraction
    operation: str = ""


@dataclass(frozen=True)
class LimitVerdict:
    """Whether a run keeps a limit (None: not known), as a sentence."""

    is_kept: bool | None
    text: str


Measured: TypeAlias = tuple[Fraction | None, str]
"""A fraction, or None if it is not known, and what it is or why it is not known."""


_NOT_KNOWN: Final = (
    "no overlap is known: this needs an imported trace of devices, or a recorded log of at least three steps with ends "
    "of calls that were observed on the host"
)


def _exposed(tables: Tables, operation: str) -> Measured:
    table = tables[EXPOSED_COMMUNICATION.name]
    steps = table[table["step"] != ALL] if len(table) > 1 else table
    if not steps["duration_ns"].sum() or not table["communication_ns"].sum():
        return None, _NOT_KNOWN
    share = Fraction(int(steps["exposed_ns"].sum()), int(steps["duration_ns"].sum()))
    of_what = "the steps" if len(table) > 1 else "the traced time"
    most = tables[OVERLAP_BY["operation"].name].iloc[0]
    what = f"exposed communication takes {format_share(float(share))} of {of_what}"
    return share, f"{what}; most of it is {most['op']}, {format_duration(most['exposed_ns'])}"


def _overlap(tables: Tables, operation: str) -> Measured:
    table = tables[OVERLAP_BY["operation"].name]
    row = table[table["op"] == operation]
    if not len(row) or not is_known(row["overlap"].iloc[0]):
        known = ", ".join(table["op"]) or "none"
        what = f"it is not known how much of {operation} is hidden, but of: {known}"
        return None, what if len(table) else _NOT_KNOWN
    share = Fraction(int(row["hidden_ns"].iloc[0]), int(row["communication_ns"].iloc[0]))
    return share, f"computation hides {format_share(float(share))} of {operation}"


def _wait(tables: Tables, operation: str) -> Measured:
    waiting = tables["waiting"]
    if not len(waiting) or not is_known(waiting["wait_share"].iloc[0]):
        return None, "no wait is known: this needs the ends of calls on all ranks of their groups"
    share = Fraction(int(waiting["wait_ns"].iloc[0]), int(waiting["duration_ns"].iloc[0]))
    return share, f"ranks wait for others for {format_share(float(share))} of the time in calls"


MEASURES: Final[Mapping[str, tuple[Callable[[Tables, str], Measured], bool]]] = {
    "max-exposed": (_exposed, True),
    "max-wait": (_wait, True),
    "min-overlap": (_overlap, False),
}
"""For each measure, the function that reads it from the tables of a report, and whether the limit is a maximum."""


def check_limits(tables: Tables, limits: Sequence[Limit]) -> Iterator[LimitVerdict]:
    """Yield whether a run keeps each limit, given the tables of its report."""
    for limit in limits:
        measure, is_maximum = MEASURES[limit.measure]
        value, what = measure(tables, limit.operation)
        if value is None:
            yield LimitVerdict(None, f"not compared: {limit.measure}: {what}")
            continue
        is_kept = value <= limit.fraction if is_maximum else value >= limit.fraction
        verdict = "within" if is_kept else "exceeds" if is_maximum else "below"
        bound = f"the {'maximum' if is_maximum else 'minimum'} of {format_share(float(limit.fraction))}"
        yield LimitVerdict(is_kept, f"{verdict} {bound}: {what}")
