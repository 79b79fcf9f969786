"""Causes of differences between recorded and expected calls. Append to CAUSES to add one.

A cause is a label and a function that selects the unmatched calls of one rank and step that it explains. Calls get
the first cause in CAUSES that selects them. The cause of any other call that was recorded is its recorded purpose;
a call without a purpose, and an expected one that no cause explains, are UNEXPLAINED.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from commtrace.reading.labels import NOT_RECORDED
from commtrace.theory import Prediction
from commtrace.theory.expected_calls import sorted_calls

from .own_calls import EVALUATION, is_own
from .rules_run import RuledStep
from .run_calls import EqualCalls, StepCalls

UNEXPLAINED: Final = "unexplained"
SPLIT_DIFFERENTLY: Final = "the same bytes, split into different calls (another order)"

_BEGINS_LATE: Final = "the log begins after start-up"
ENDS_WITHIN: Final = "the log ends within this step"
_ENDS_BEFORE: Final = "the log ends before this step, unlike the logs of other ranks"
_LOST: Final = "records missing from the log"


@dataclass(frozen=True)
class StepContext:
    """Context of one step of one rank that causes can use besides its unmatched calls."""

    expected: StepCalls
    has_calls: bool = True  # the log has a call of this step
    is_start: bool = False  # before the first step
    log_ends_within: bool = False  # this is the rank's last step in the log, and its process did not exit normally
    log_ends_before: bool = False  # the log has neither this step of the rank nor a later one
    has_ended: bool = True  # the rank's process exited normally
    has_lost_records: bool = False  # some counted calls have no record in the log

    @property
    def prediction(self) -> Prediction | None:
        """The prediction that the expected calls are from; None if a run expects them."""
        return self.expected.prediction if isinstance(self.expected, RuledStep) else None

    def is_incomplete(self, cause: str) -> bool:
        """Return whether calls with this cause may have been made, but are not in the log."""
        return cause in (_BEGINS_LATE, ENDS_WITHIN, _LOST) or (cause == _ENDS_BEFORE and not self.has_ended)


Selector: TypeAlias = Callable[[Sequence[EqualCalls], StepContext], Sequence[EqualCalls]]


def _missing(applies: Callable[[StepContext], bool]) -> Selector:
    """Return a selector of calls that were not recorded, in steps for which `applies` returns true."""
    return lambda unmatched, context: [calls for calls in unmatched if calls.calls < 0 and applies(context)]


def _overflow(unmatched: Sequence[EqualCalls], context: StepContext) -> Sequence[EqualCalls]:
    """Select all unmatched calls if they are exactly those that DeepSpeed skips after a gradient overflow."""
    if context.prediction is None or context.is_start or any(calls.calls > 0 for calls in unmatched):
        return ()
    missing: dict[tuple[str, int], int] = defaultdict(int)
    for calls in unmatched:
        missing[calls.key.op, calls.key.payload] -= calls.calls
    skipped = [sorted_calls(calls) for calls in context.prediction.skipped]
    return unmatched if sorted((op, size, calls) for (op, size), calls in missing.items()) in skipped else ()


def _is_own(calls: EqualCalls) -> bool:
    return is_own(calls.site, calls.purpose, calls.key.phase) or calls.key.phase == EVALUATION


def _split_differently(unmatched: Sequence[EqualCalls], context: StepContext) -> Sequence[EqualCalls]:
    """Select missing and library calls of one parallel dimension and operation if their bytes add up to 0."""
    by_key: dict[tuple[str, str], list[EqualCalls]] = defaultdict(list)
    for calls in unmatched:
        if calls.calls < 0 or not _is_own(calls):
            by_key[calls.key.cell].append(calls)
    balanced = [group for group in by_key.values() if len(group) > 1 and not sum(calls.bytes for calls in group)]
    return [calls for group in balanced for calls in group]


def _repeated_reductions(unmatched: Sequence[EqualCalls], context: StepContext) -> Sequence[EqualCalls]:
    """Select extra all_reduces of DDP's backward pass if their bytes are a multiple of those expected in the step."""
    expected = sum(calls.bytes for calls in context.expected.calls if calls.key.op == "all_reduce")
    extra = [calls for calls in unmatched if (calls.key.op, calls.key.phase) == ("all_reduce", "backward")]
    total = sum(calls.bytes for calls in extra)
    is_ddp = context.prediction is not None and context.prediction.scheme == "DDP"
    return extra if is_ddp and expected and total and total % expected == 0 else ()


CAUSES: Final[Mapping[str, Selector]] = {
    _BEGINS_LATE: _missing(lambda context: context.is_start and not context.has_calls),
    ENDS_WITHIN: _missing(lambda context: context.log_ends_within),
    _ENDS_BEFORE: _missing(lambda context: context.log_ends_before),
    "optimizer skipped: gradients overflowed": _overflow,
    SPLIT_DIFFERENTLY: _split_differently,
    "gradients reduced several times: no_sync is not used": _repeated_reductions,
    _LOST: _missing(lambda context: context.has_lost_records),
}
"""The label of each cause, for tables and reports, and the function that selects the calls that it explains."""


def explain(unmatched: Sequence[EqualCalls], context: StepContext) -> list[tuple[str, EqualCalls]]:
    """Return the unmatched calls of one step of one rank, each with the label of its cause, or UNEXPLAINED."""
    explained: list[tuple[str, EqualCalls]] = []
    rest = unmatched
    for label, select in CAUSES.items():
        selected = {id(calls) for calls in select(rest, context)} if rest else set()
        explained += [(label, calls) for calls in rest if id(calls) in selected]
        rest = [calls for calls in rest if id(calls) not in selected]
    return [*explained, *((purpose_label(calls) or UNEXPLAINED, calls) for calls in rest)]


def purpose_label(calls: EqualCalls) -> str:
    """Return why recorded calls were made; "" for calls that were not made, and library calls without a purpose."""
    if calls.calls < 0:
        return ""
    if calls.key.phase == EVALUATION:
        return EVALUATION
    of_library = not is_own(calls.site, calls.purpose, calls.key.phase)
    return "" if of_library and calls.purpose == NOT_RECORDED else calls.purpose
