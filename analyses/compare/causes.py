"""Causes of differences between recorded and expected calls. Append to CAUSES to add one.

A cause is a label and a function that selects the unmatched calls of one rank and step that it explains. Calls get
the first cause in CAUSES that selects them; calls that none selects are UNEXPLAINED.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from commtrace.theory import Prediction
from commtrace.theory.expected_calls import sorted_calls

from .own_calls import is_library_call, is_program_call
from .rules_run import RuledStep
from .run_calls import Call, EqualCalls, StepCalls

UNEXPLAINED: Final = "unexplained"
SPLIT_DIFFERENTLY: Final = "the same bytes, split into different calls (another order)"

_MAX_SMALL_BYTES: Final = 64

# A name does not prove the cause: "checkpoint" may also mean activation checkpointing.
_CHECKPOINT: Final = "a call from a function or file named *checkpoint*, *consolidated* or *state_dict*"
_EVALUATION: Final = "an evaluation"
_BARRIER: Final = "a barrier called by the program"
_SMALL: Final = f"calls by the program, at most {_MAX_SMALL_BYTES} bytes each"
_OTHER: Final = "other calls by the program"
PROGRAM_CAUSES: Final = frozenset({_EVALUATION, _CHECKPOINT, _BARRIER, _SMALL, _OTHER})
"""Causes of extra calls that the program itself may have made."""

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


def _fitting(fits: Callable[[EqualCalls], bool]) -> Selector:
    """Return a selector of calls for which `fits` returns true. Calls that rules expect have no call site or phase."""
    return lambda unmatched, context: [calls for calls in unmatched if fits(calls)]


def _called_from(*names: str) -> Selector:
    """Return a selector of calls whose call site contains one of these function or file names."""
    return _fitting(lambda calls: any(name in calls.site for name in names))


def _by_program(fits: Callable[[EqualCalls], bool]) -> Selector:
    """Return a selector of the program's own calls."""
    return _fitting(lambda calls: is_program_call(calls.site, calls.key.phase) and fits(calls))


def _overflow(unmatched: Sequence[EqualCalls], context: StepContext) -> Sequence[EqualCalls]:
    """Select all unmatched calls if they are exactly those that DeepSpeed skips after a gradient overflow."""
    if context.prediction is None or context.is_start or any(calls.calls > 0 for calls in unmatched):
        return ()
    missing: dict[tuple[str, int], int] = defaultdict(int)
    for calls in unmatched:
        missing[calls.key.op, calls.key.payload] -= calls.calls
    skipped = [sorted_calls(calls) for calls in context.prediction.skipped]
    return unmatched if sorted((op, size, calls) for (op, size), calls in missing.items()) in skipped else ()


def _split_differently(unmatched: Sequence[EqualCalls], context: StepContext) -> Sequence[EqualCalls]:
    """Select missing and library calls of one parallel dimension and operation if their bytes add up to 0."""
    by_key: dict[tuple[str, str], list[EqualCalls]] = defaultdict(list)
    for calls in unmatched:
        if calls.calls < 0 or is_library_call(calls.site, calls.key.phase):
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
    _EVALUATION: _fitting(lambda calls: calls.key.phase == "evaluation"),
    "optimizer skipped: gradients overflowed": _overflow,
    _CHECKPOINT: _called_from("checkpoint", "consolidated", "state_dict"),
    "a call site in DeepSpeed's functions for full gradients or optimizer states (safe_get_full_*)": _called_from(
        "tensor_fragment.py", "_fp32_state_allgather"
    ),
    "a call site in DeepSpeed's GatheredParameters": _called_from("GatheredParameters"),
    _BARRIER: _by_program(lambda calls: calls.key.op == "barrier"),
    _SMALL: _by_program(lambda calls: 0 <= calls.bytes / calls.calls <= _MAX_SMALL_BYTES),
    _OTHER: _by_program(lambda calls: True),
    SPLIT_DIFFERENTLY: _split_differently,
    "gradients reduced several times: no_sync is not used": _repeated_reductions,
    _LOST: _missing(lambda context: context.has_lost_records),
}
"""The label of each cause, for tables and reports, and the function that selects the calls that it explains."""


def explain(
    unmatched: Sequence[EqualCalls], context: StepContext, lines: Mapping[Call, frozenset[str]] | None = None
) -> list[tuple[str, EqualCalls]]:
    """Return the unmatched calls of one step of one rank, each with the label of its cause, or UNEXPLAINED.

    Args:
        unmatched: The calls.
        context: What causes depend on besides them.
        lines: Lines of code of calls whose site is only a function: they name the file's folder.
    """
    explained: list[tuple[str, EqualCalls]] = []
    rest = [(calls, _at_line(calls, lines)) for calls in unmatched]
    for label, select in CAUSES.items():
        selected = {id(calls) for calls in select([at_line for _, at_line in rest], context)} if rest else set()
        explained += [(label, calls) for calls, at_line in rest if id(at_line) in selected]
        rest = [(calls, at_line) for calls, at_line in rest if id(at_line) not in selected]
    return [*explained, *((UNEXPLAINED, calls) for calls, _ in rest)]


def _at_line(calls: EqualCalls, lines: Mapping[Call, frozenset[str]] | None) -> EqualCalls:
    known = lines.get(Call(calls.key, calls.site)) if lines else None
    return replace(calls, site="; ".join(sorted(known))) if known else calls
