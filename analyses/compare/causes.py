"""Causes of differences between recorded and expected calls. Append to CAUSES to add one.

A cause is a label and a function that selects the unmatched calls of one rank and step that it explains. Calls get
the first cause in CAUSES that selects them; calls that none selects are UNEXPLAINED.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from commtrace.theory import ExpectedCall, Prediction
from commtrace.theory.expected_calls import sorted_calls

from .counted_calls import EqualCalls

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


@dataclass(frozen=True)
class StepContext:
    """Context of one step of one rank that causes can use besides its unmatched calls."""

    prediction: Prediction
    expected: Sequence[ExpectedCall]  # in this step
    is_start: bool  # before the first step
    has_calls: bool  # the log has a call of this step
    log_ends_within: bool  # this is the rank's last step in the log, and its process did not exit normally
    log_ends_before: bool  # the log has neither this step of the rank nor a later one
    has_lost_records: bool  # some counted calls have no record in the log


Selector: TypeAlias = Callable[[Sequence[EqualCalls], StepContext], Sequence[EqualCalls]]


def _missing(applies: Callable[[StepContext], bool]) -> Selector:
    """Return a selector of calls that were not recorded, in steps for which `applies` returns true."""
    return lambda unmatched, context: [calls for calls in unmatched if calls.calls < 0 and applies(context)]


def _extra(fits: Callable[[EqualCalls], bool]) -> Selector:
    """Return a selector of extra calls for which `fits` returns true."""
    return lambda unmatched, context: [calls for calls in unmatched if calls.calls > 0 and fits(calls)]


def _called_from(*names: str) -> Selector:
    """Return a selector of extra calls whose call site contains one of these function or file names."""
    return _extra(lambda calls: any(name in calls.site for name in names))


def _by_program(fits: Callable[[EqualCalls], bool]) -> Selector:
    """Return a selector of extra calls of the program: neither from a framework nor from C++ in the backward pass."""
    return _extra(lambda calls: bool(calls.site) and not is_framework_call(calls) and fits(calls))


def is_framework_call(calls: EqualCalls) -> bool:
    """Return whether calls are from a framework's code, or from C++ in the backward pass."""
    return is_framework_site(calls.site) or calls.phase == "backward"


def is_framework_site(site: str) -> bool:
    """Return whether a call site is in DeepSpeed's or torch's code."""
    return path_in_packages(site).startswith(("deepspeed/", "torch/"))


def path_in_packages(site: str) -> str:
    """Return a call site without its site-packages prefix, which may differ between ranks."""
    return site.partition(" < ")[0].rpartition("-packages/")[2]


def _overflow(unmatched: Sequence[EqualCalls], context: StepContext) -> Sequence[EqualCalls]:
    """Select all unmatched calls if they are exactly those that DeepSpeed skips after a gradient overflow."""
    if context.is_start or any(calls.calls > 0 for calls in unmatched):
        return ()
    missing: dict[tuple[str, int], int] = defaultdict(int)
    for calls in unmatched:
        missing[calls.op, calls.payload] -= calls.calls
    skipped = [sorted_calls(calls) for calls in context.prediction.skipped]
    return unmatched if sorted((op, size, calls) for (op, size), calls in missing.items()) in skipped else ()


def _split_differently(unmatched: Sequence[EqualCalls], context: StepContext) -> Sequence[EqualCalls]:
    """Select missing and framework calls of one parallel dimension and operation if their bytes add up to 0."""
    by_key: dict[tuple[str, str], list[EqualCalls]] = defaultdict(list)
    for calls in unmatched:
        if calls.calls < 0 or is_framework_call(calls):
            by_key[calls.role, calls.op].append(calls)
    balanced = [group for group in by_key.values() if len(group) > 1 and not sum(calls.bytes for calls in group)]
    return [calls for group in balanced for calls in group]


def _repeated_reductions(unmatched: Sequence[EqualCalls], context: StepContext) -> Sequence[EqualCalls]:
    """Select extra all_reduces of DDP's backward pass if their bytes are a multiple of those expected in the step."""
    expected = sum(call.bytes for call in context.expected if call.op == "all_reduce")
    in_backward = _extra(lambda calls: calls.op == "all_reduce" and calls.phase == "backward")
    extra = in_backward(unmatched, context)
    total = sum(calls.bytes for calls in extra)
    is_multiple = expected and total and total % expected == 0
    return extra if context.prediction.scheme == "DDP" and is_multiple else ()


CAUSES: Final[Mapping[str, Selector]] = {
    "the log begins after start-up": _missing(lambda context: context.is_start and not context.has_calls),
    "the log ends within this step": _missing(lambda context: context.log_ends_within),
    "the log ends before this step, unlike the logs of other ranks": _missing(lambda context: context.log_ends_before),
    _EVALUATION: _extra(lambda calls: calls.phase == "evaluation"),
    "optimizer skipped: gradients overflowed": _overflow,
    _CHECKPOINT: _called_from("checkpoint", "consolidated", "state_dict"),
    "a call site in DeepSpeed's functions for full gradients or optimizer states (safe_get_full_*)": _called_from(
        "tensor_fragment.py", "_fp32_state_allgather"
    ),
    "a call site in DeepSpeed's GatheredParameters": _called_from("GatheredParameters"),
    _BARRIER: _by_program(lambda calls: calls.op == "barrier"),
    _SMALL: _by_program(lambda calls: 0 <= calls.bytes <= _MAX_SMALL_BYTES * calls.calls),
    _OTHER: _by_program(lambda calls: True),
    SPLIT_DIFFERENTLY: _split_differently,
    "gradients reduced several times: no_sync is not used": _repeated_reductions,
    "records missing from the log": _missing(lambda context: context.has_lost_records),
}
"""The label of each cause, for tables and reports, and the function that selects the calls that it explains."""


def explain(unmatched: Sequence[EqualCalls], context: StepContext) -> list[tuple[str, EqualCalls]]:
    """Return the unmatched calls of one step of one rank, each with the label of its cause, or UNEXPLAINED."""
    explained: list[tuple[str, EqualCalls]] = []
    rest = list(unmatched)
    for label, select in CAUSES.items():
        selected = {id(calls) for calls in select(rest, context)} if rest else set()
        explained += [(label, calls) for calls in rest if id(calls) in selected]
        rest = [calls for calls in rest if id(calls) not in selected]
    return [*explained, *((UNEXPLAINED, calls) for calls in rest)]
