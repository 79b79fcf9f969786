"""When an operation runs in the background, if it overlaps with computation as much as dependencies allow.

    gradients      the rank waits for them before its first call after backward, or at the end of the step
    parameters     gathered for a pass: they may begin with the pass (prefetched without limit); the rank waits for them
                   before its first call after the pass
    others         until the pass ends; messages also until the next message

Everything else is waited for when it is called: the next computation uses what it returns. Recorded runs
(`overlapped_step`) and dry runs (`layout_graph`) share these rules. All of a group run one after the other, in the
order in which they may begin: whatever the order, they are over at the same time, and none is needed before its pass is
over.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from commtrace.analyses.across_ranks.matching import MatchedCalls
from commtrace.analyses.grouping import Array
from commtrace.operations import MESSAGES
from commtrace.schema import Phase, Purpose

END_OF_STEP: Final = -1
_PARAMETERS: Final = (
    Purpose.PARAMETERS_FORWARD, Purpose.PARAMETERS_BACKWARD, Purpose.PARAMETERS_RECOMPUTATION, Purpose.PARAMETERS_STAGE,
)  # fmt: skip
_PASSES: Final = (int(Phase.FORWARD), int(Phase.BACKWARD))
_REDUCTIONS: Final = ("all_reduce", "reduce_scatter", "reduce")
_ROLES_OF_GRADIENTS: Final = ("data", "world")


class OverlapSpans(NamedTuple):
    """When operations may run: positions in the order of calls, each of shape (n,).

    Attributes:
        begin: The call before whose computation each may begin if it is a parameter, else its own call.
        until: The call before which its rank waits for it, or `END_OF_STEP`.
        order: The operations in the order in which they may begin.
    """

    begin: Array
    until: Array
    order: Array


class OverlapRules(NamedTuple):
    """What may overlap, bool, each of shape (calls,)."""

    is_gradient: Array
    is_parameters: Array
    is_message: Array
    is_assumed: Array
    """Gradients by assumption: reductions of the program's own, in backward, over data-parallel ranks."""

    @staticmethod
    def of(calls: MatchedCalls) -> OverlapRules:
        """Return the rules of calls with the columns "op", "role", "purpose" and "phase"."""
        is_assumed = calls.has_label("purpose", Purpose.PROGRAM.value) & calls.has_label("op", *_REDUCTIONS)
        is_assumed &= calls.has_label("role", *_ROLES_OF_GRADIENTS) & (calls["phase"] == int(Phase.BACKWARD))
        return OverlapRules(
            calls.has_label("purpose", Purpose.GRADIENTS.value) | is_assumed,
            calls.has_label("purpose", *(purpose.value for purpose in _PARAMETERS)),
            calls.has_label("op", *MESSAGES),
            is_assumed,
        )

    def only(self, selected: Array) -> OverlapRules:
        """Return the rules with which only these calls overlap, bool, shape (calls,)."""
        return OverlapRules(
            self.is_gradient & selected, self.is_parameters & selected, self.is_message, self.is_assumed & selected
        )  # fmt: skip

    def spans(self, call: Array, step: Array, phase: Array) -> OverlapSpans:
        """Return when operations may begin, and until when their rank does not wait for them.

        Args:
            call: Calls of a rank, or of several ranks one after the other, in their order, shape (n,).
            step: A number of each one's rank and step, shape (n,).
            phase: The phase of each, shape (n,).
        """
        own = np.arange(len(call))
        first_of_step = np.diff(step, prepend=-1) != 0
        first_of_pass = first_of_step | (np.diff(phase, prepend=-1) != 0)
        pass_begin = np.maximum.accumulate(np.where(first_of_pass, own, 0))
        until = np.where(
            self.is_gradient[call], _next(first_of_step | ~np.isin(phase, _PASSES)), _next(first_of_pass)
        )  # fmt: skip
        is_message = self.is_message[call]
        until = np.where(is_message, np.minimum(until, _next(first_of_step | is_message)), until)
        is_early = self.is_parameters[call]
        begin = np.where(is_early, pass_begin, own)
        until = np.where(until < _next(first_of_step), until, END_OF_STEP)
        return OverlapSpans(begin, until, np.lexsort((own, ~is_early, begin)))


def _next(is_stop: Array) -> Array:
    """Return the position of the first stop after each position, their number if there is none."""
    count = len(is_stop)
    stops = np.where(is_stop, np.arange(count), count)
    return np.append(np.minimum.accumulate(stops[::-1])[::-1][1:], count)
