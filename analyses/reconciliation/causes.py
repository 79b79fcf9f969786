"""Why a call is there that theory does not expect, or is not there that it does: a list, to be made longer.

A cause is a sentence and a function that picks what it explains among the leftovers of one rank and step. The first
cause in CAUSES that takes a leftover has it; what nobody takes is UNEXPLAINED.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from commtrace.theory import Prediction
from commtrace.theory.expected_calls import sorted_calls

UNEXPLAINED: Final = "unexplained"
OTHER_PIECES: Final = "the same bytes in other pieces: another order"


@dataclass(frozen=True)
class Leftover:
    """Calls beyond what is expected (`calls` above 0), or expected and not found (below 0); bytes likewise."""

    role: str
    op: str
    size: int  # payload of one call, -1: not kept
    calls: int
    bytes: int
    wire: Fraction
    phase: str = ""
    site: str = ""


@dataclass(frozen=True)
class Context:
    """What is known of the rank and the step."""

    prediction: Prediction
    job: Mapping[str, Any]
    step: int
    last: int  # the rank's last step in the log
    ended: bool  # the process ended in order
    lost: int  # calls counted whose records are not in the log
    seen: bool  # some call of this step is in the log


Picks = Callable[[Sequence[Leftover], Context], Sequence[Leftover]]


@dataclass(frozen=True)
class Cause:
    """A sentence, and what it explains."""

    sentence: str
    picks: Picks


def _before_the_log(leftovers: Sequence[Leftover], context: Context) -> Sequence[Leftover]:
    return leftovers if context.step < 0 and not context.seen else ()


def _after_the_log(leftovers: Sequence[Leftover], context: Context) -> Sequence[Leftover]:
    cut = context.step == context.last and not context.ended
    return [one for one in leftovers if one.calls < 0] if cut else ()


def _behind_the_log(leftovers: Sequence[Leftover], context: Context) -> Sequence[Leftover]:
    return leftovers if context.step > context.last else ()


def _overflow(leftovers: Sequence[Leftover], context: Context) -> Sequence[Leftover]:
    """Exactly what DeepSpeed leaves out behind the check is missing, and nothing else differs."""
    if context.step < 0 or any(one.calls > 0 for one in leftovers):
        return ()
    sums: dict[tuple[str, int], int] = defaultdict(int)
    for one in leftovers:
        sums[one.op, one.size] -= one.calls
    missing = sorted((op, size, calls) for (op, size), calls in sums.items())
    left_out = [sorted_calls(messages) for messages in context.prediction.skipped]
    return leftovers if missing in left_out else ()


def _other_pieces(leftovers: Sequence[Leftover], context: Context) -> Sequence[Leftover]:
    """Of one operation as many bytes too many as too few."""
    found: dict[tuple[str, str], list[Leftover]] = defaultdict(list)
    for one in leftovers:
        if one.calls < 0 or is_framework(one) or one.phase == "backward":
            found[one.role, one.op].append(one)
    return [one for same in found.values() if len(same) > 1 and not sum(one.bytes for one in same) for one in same]


def _several_reductions(leftovers: Sequence[Leftover], context: Context) -> Sequence[Leftover]:
    """Under DDP the step's gradients once more, or several times."""
    once = sum(one.bytes for one in context.prediction.step(context.step) if one.op == "all_reduce")
    extra = [one for one in leftovers if one.calls > 0 and one.op == "all_reduce" and one.phase == "backward"]
    again = sum(one.bytes for one in extra)
    return extra if context.prediction.scheme == "DDP" and once and again and again % once == 0 else ()


def _lost(leftovers: Sequence[Leftover], context: Context) -> Sequence[Leftover]:
    return [one for one in leftovers if one.calls < 0] if context.lost > 0 else ()


def _at(*functions: str) -> Picks:
    """Calls that DeepSpeed or torch makes in one of these functions or files."""

    def picks(leftovers: Sequence[Leftover], context: Context) -> Sequence[Leftover]:
        return [one for one in leftovers if one.calls > 0 and any(name in one.site for name in functions)]

    return picks


def _programs(fits: Callable[[Leftover], bool]) -> Picks:
    """Calls that the program makes by itself: not within a framework, nor from C++ while its backward runs."""

    def picks(leftovers: Sequence[Leftover], context: Context) -> Sequence[Leftover]:
        own = (one for one in leftovers if one.calls > 0 and one.site and not is_framework(one))
        return [one for one in own if one.phase != "backward" and fits(one)]

    return picks


def is_framework(leftover: Leftover) -> bool:
    """The line is DeepSpeed's or torch's."""
    return leftover.site.startswith(("deepspeed/", "torch/"))


_SCALAR: Final = 64

CAUSES: Final[tuple[Cause, ...]] = (
    Cause("the log begins after start-up", _before_the_log),
    Cause("the log ends within this step", _after_the_log),
    Cause("the log ends before this step, which other ranks have", _behind_the_log),
    Cause("optimizer skipped: gradients overflowed", _overflow),
    Cause("saving or loading a checkpoint", _at("checkpoint", "consolidated", "state_dict")),
    Cause("whole gradients or optimizer states for the program", _at("tensor_fragment.py", "_fp32_state_allgather")),
    Cause("GatheredParameters of the program", _at("GatheredParameters")),
    Cause("a barrier of the program's own", _programs(lambda one: one.op == "barrier")),
    Cause(
        "numbers of the program's own, as a loss that it averages",
        _programs(lambda one: 0 <= one.bytes <= _SCALAR * one.calls),
    ),
    Cause("calls of the program's own", _programs(lambda one: True)),
    Cause(OTHER_PIECES, _other_pieces),
    Cause("gradients reduced several times: no_sync is not used", _several_reductions),
    Cause("records that the log has lost", _lost),
)


def explain(leftovers: Sequence[Leftover], context: Context) -> list[tuple[str, Leftover]]:
    """Each leftover with its cause."""
    found: list[tuple[str, Leftover]] = []
    rest = list(leftovers)
    for cause in CAUSES:
        picked = {id(one) for one in cause.picks(rest, context)} if rest else set()
        found += [(cause.sentence, one) for one in rest if id(one) in picked]
        rest = [one for one in rest if id(one) not in picked]
    return [*found, *((UNEXPLAINED, one) for one in rest)]
