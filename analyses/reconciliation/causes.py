"""Causes of differences between recorded and expected calls. Append to CAUSES to add one.

A cause is a sentence and a function that selects the leftovers of one rank and step that it explains. The first cause
of CAUSES that selects a leftover is its cause; a leftover that none selects is UNEXPLAINED.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from commtrace.theory import ExpectedCall, Prediction
from commtrace.theory.expected_calls import sorted_calls

from .measured_calls import EqualCalls

UNEXPLAINED: Final = "unexplained"
OTHER_PIECES: Final = "the same bytes, split into different calls (another order)"

_SCALAR_BYTES: Final = 64

# A name does not prove the cause: "checkpoint" may also mean activation checkpointing.
_CHECKPOINT: Final = "a call from a function or file named *checkpoint*, *consolidated* or *state_dict*"
_EVALUATION: Final = "an evaluation"
_BARRIER: Final = "a barrier called by the program"
_SMALL: Final = f"calls by the program, at most {_SCALAR_BYTES} bytes each"
_OTHER: Final = "other calls by the program"
PROGRAM_CAUSES: Final = frozenset({_EVALUATION, _CHECKPOINT, _BARRIER, _SMALL, _OTHER})
"""Causes of calls beyond the expected ones that the program itself may have made."""


@dataclass(frozen=True)
class StepContext:
    """Context of one step of one rank that causes can use besides its leftovers."""

    prediction: Prediction
    expected: Sequence[ExpectedCall]  # in this step
    is_start: bool  # before the first step
    has_calls: bool  # the log has a call of this step
    log_ends_within: bool  # the last step of this rank in the log, whose process did not exit normally
    log_ends_before: bool  # the rank has no later step in the log either
    loses_records: bool  # calls were counted whose records are not in the log


Select: TypeAlias = Callable[[Sequence[EqualCalls], StepContext], Sequence[EqualCalls]]


def _absent(applies: Callable[[StepContext], bool]) -> Select:
    """Return a selector of calls that were not recorded, in steps for which `applies` returns true."""
    return lambda leftovers, context: [leftover for leftover in leftovers if leftover.calls < 0 and applies(context)]


def _extra(fits: Callable[[EqualCalls], bool]) -> Select:
    """Return a selector of unexpected calls for which `fits` returns true."""
    return lambda leftovers, context: [leftover for leftover in leftovers if leftover.calls > 0 and fits(leftover)]


def _called_from(*names: str) -> Select:
    """Return a selector of unexpected calls with one of these names of functions or files in their call site."""
    return _extra(lambda leftover: any(name in leftover.site for name in names))


def _by_program(fits: Callable[[EqualCalls], bool]) -> Select:
    """Return a selector of unexpected calls from the program: not from a framework, nor from C++ in backward."""
    return _extra(lambda leftover: bool(leftover.site) and not is_of_library(leftover) and fits(leftover))


def is_of_library(calls: EqualCalls) -> bool:
    """Return whether calls are from a framework's code, or from C++ during backward."""
    return is_framework_site(calls.site) or calls.phase == "backward"


def is_framework_site(site: str) -> bool:
    """Return whether a call site is in DeepSpeed's or torch's code."""
    return path_in_packages(site).startswith(("deepspeed/", "torch/"))


def path_in_packages(site: str) -> str:
    """Return a call site without its site-packages prefix, which differs if ranks load a library from several."""
    return site.partition(" < ")[0].rpartition("-packages/")[2]


def _overflow(leftovers: Sequence[EqualCalls], context: StepContext) -> Sequence[EqualCalls]:
    """Select all if exactly the calls are missing that DeepSpeed leaves out after its overflow check."""
    if context.is_start or any(leftover.calls > 0 for leftover in leftovers):
        return ()
    missing: dict[tuple[str, int], int] = defaultdict(int)
    for leftover in leftovers:
        missing[leftover.op, leftover.payload] -= leftover.calls
    skipped = [sorted_calls(calls) for calls in context.prediction.skipped]
    return leftovers if sorted((op, size, calls) for (op, size), calls in missing.items()) in skipped else ()


def _other_pieces(leftovers: Sequence[EqualCalls], context: StepContext) -> Sequence[EqualCalls]:
    """Select the leftovers of an operation whose bytes add up to 0."""
    by_key: dict[tuple[str, str], list[EqualCalls]] = defaultdict(list)
    for leftover in leftovers:
        if leftover.calls < 0 or is_of_library(leftover):
            by_key[leftover.role, leftover.op].append(leftover)
    balanced = [same for same in by_key.values() if len(same) > 1 and not sum(leftover.bytes for leftover in same)]
    return [leftover for same in balanced for leftover in same]


def _several_reductions(leftovers: Sequence[EqualCalls], context: StepContext) -> Sequence[EqualCalls]:
    """Select reductions in DDP's backward that are a multiple of the step's gradients."""
    expected = sum(call.bytes for call in context.expected if call.op == "all_reduce")
    in_backward = _extra(lambda leftover: leftover.op == "all_reduce" and leftover.phase == "backward")
    extra = in_backward(leftovers, context)
    total = sum(leftover.bytes for leftover in extra)
    is_multiple = expected and total and total % expected == 0
    return extra if context.prediction.scheme == "DDP" and is_multiple else ()


CAUSES: Final[Mapping[str, Select]] = {
    "the log begins after start-up": _absent(lambda context: context.is_start and not context.has_calls),
    "the log ends within this step": _absent(lambda context: context.log_ends_within),
    "the log ends before this step, which other ranks have": _absent(lambda context: context.log_ends_before),
    _EVALUATION: _extra(lambda leftover: leftover.phase == "evaluation"),
    "optimizer skipped: gradients overflowed": _overflow,
    _CHECKPOINT: _called_from("checkpoint", "consolidated", "state_dict"),
    "a call site in DeepSpeed's access to full gradients or optimizer states": _called_from(
        "tensor_fragment.py", "_fp32_state_allgather"
    ),
    "a call site in DeepSpeed's GatheredParameters": _called_from("GatheredParameters"),
    _BARRIER: _by_program(lambda leftover: leftover.op == "barrier"),
    _SMALL: _by_program(lambda leftover: 0 <= leftover.bytes <= _SCALAR_BYTES * leftover.calls),
    _OTHER: _by_program(lambda leftover: True),
    OTHER_PIECES: _other_pieces,
    "gradients reduced several times: no_sync is not used": _several_reductions,
    "records missing from the log": _absent(lambda context: context.loses_records),
}
"""The sentence of each cause, for tables and reports, and what selects the leftovers that it explains."""


def explain(leftovers: Sequence[EqualCalls], context: StepContext) -> list[tuple[str, EqualCalls]]:
    """Return each leftover of one step of one rank with the sentence of its cause, or UNEXPLAINED."""
    explained: list[tuple[str, EqualCalls]] = []
    rest = list(leftovers)
    for sentence, select in CAUSES.items():
        selected = {id(leftover) for leftover in select(rest, context)} if rest else set()
        explained += [(sentence, leftover) for leftover in rest if id(leftover) in selected]
        rest = [leftover for leftover in rest if id(leftover) not in selected]
    return [*explained, *((UNEXPLAINED, leftover) for leftover in rest)]
