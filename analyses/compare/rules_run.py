"""The run that rules expect: the calls of jobs by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from commtrace.analyses.grouping import Array
from commtrace.reading.process_reader import Process
from commtrace.theory import ExpectedCall, NotPredictedError, Prediction, predict
from commtrace.theory.expected_calls import exact_wire_bytes

from .call_keys import ANY, CallKey
from .run_calls import NO_CALLS, EqualCalls, RankCalls, StepCalls, periods

_MAX_BYTES: Final = 1 << 62


@dataclass(frozen=True, eq=False)
class RuledStep(StepCalls):
    """The calls that rules expect in a step. They leave some labels of calls open (ANY)."""

    prediction: Prediction = field(kw_only=True)
    predicted: Sequence[ExpectedCall] = field(kw_only=True)

    @classmethod
    def from_rules(cls, prediction: Prediction, predicted: Sequence[ExpectedCall]) -> RuledStep:
        """Return the calls of a step of a prediction."""
        by_key: dict[tuple[CallKey, str], EqualCalls] = {}
        for call in predicted:
            group = str(call.ranks) if call.ranks else ANY
            key = CallKey(call.op, call.payload, ANY, ANY, ANY, call.role, group, ANY)
            wire = exact_wire_bytes(call.op, call.payload, call.ranks or prediction.ranks_of(call.role)) * call.calls
            same = by_key.setdefault((key, call.cause), EqualCalls(key, 0, 0, purpose=call.cause))
            by_key[key, call.cause] = replace(
                same,
                calls=same.calls + call.calls,
                bytes=same.bytes + call.bytes,
                wire=wire + (same.wire or 0),
                min_payload=same.min_payload if call.min_payload is None else call.min_payload,
            )
        return cls(tuple(by_key.values()), max_calls=_max_calls(predicted), prediction=prediction, predicted=predicted)


@dataclass(frozen=True, eq=False)
class ExpectedSteps:
    """Expected calls of ranks with equal jobs: their prediction, calls by step, and payload of all steps."""

    prediction: Prediction
    calls: RankCalls
    payload_bytes: int


class ExpectedRun:
    """The expected calls of the ranks of a run in given steps (-1 is start-up). Equal jobs are predicted once.

    Attributes:
        contents: The distinct steps of all jobs. The first one is empty.
    """

    def __init__(self, steps: Array) -> None:
        self.contents: list[StepCalls] = [NO_CALLS]
        self._steps = steps
        self._by_job: list[tuple[Mapping[str, Any], ExpectedSteps | NotPredictedError]] = []

    def of(self, job: Mapping[str, Any]) -> ExpectedSteps:
        """Return the expected calls of a job, the same object for equal jobs. Raise NotPredictedError without rules."""
        expected = next((steps for known, steps in self._by_job if known == job), None)
        if expected is None:
            try:
                expected = self._predict(job)
            except NotPredictedError as reason:
                expected = reason
            self._by_job.append((job, expected))
        if isinstance(expected, NotPredictedError):
            raise expected
        return expected

    def _predict(self, job: Mapping[str, Any]) -> ExpectedSteps:
        """Return the expected calls of a job. Raise NotPredictedError without rules."""
        try:
            prediction = predict(job)
            predicted, content = _calls_by_step(prediction, self._steps)
            contents = [RuledStep.from_rules(prediction, calls) for calls in predicted]
            times = np.bincount(content, minlength=len(contents)).tolist()
            size = sum(number * step.volume[1] for number, step in zip(times, contents, strict=True))
        except NotPredictedError:
            raise
        except Exception as error:  # a job from a damaged log may hold anything
            raise NotPredictedError(f"the rules fail on the job in the log: {type(error).__name__}: {error}") from error
        if size > _MAX_BYTES or abs(prediction.closed_form.bytes) > _MAX_BYTES:
            raise NotPredictedError("the job in the log leads to more than 2^62 bytes")
        calls = RankCalls(*periods(self._steps, content + len(self.contents)))
        self.contents += contents
        return ExpectedSteps(prediction, calls, size)


def _max_calls(calls: Iterable[ExpectedCall]) -> dict[tuple[str, str], int]:
    """Return the most calls of each cell whose number depends on the order of modules and gradients."""
    most: dict[tuple[str, str], int] = defaultdict(int)
    for call in calls:
        most[call.role, call.op] += call.calls if call.max_calls is None else call.max_calls
    bounded = {(call.role, call.op) for call in calls if call.max_calls is not None}
    return {cell: most[cell] for cell in bounded}


def _calls_by_step(prediction: Prediction, steps: Array) -> tuple[list[tuple[ExpectedCall, ...]], Array]:
    """Return the distinct sets of calls that steps have, and the index of each step's set, int64, shape (steps,)."""
    if not prediction.has_special_steps:
        return [prediction.start, *prediction.steps], np.minimum(steps + 1, len(prediction.steps))
    index_of: dict[tuple[ExpectedCall, ...], int] = {}
    by_id: dict[int, tuple[tuple[ExpectedCall, ...], int]] = {}  # far faster than comparing calls
    content = []
    for step in steps.tolist():
        calls = prediction.step(step)
        if id(calls) not in by_id:
            by_id[id(calls)] = calls, index_of.setdefault(calls, len(index_of))
        content.append(by_id[id(calls)][1])
    return [*index_of], np.array(content, np.int64)


# ---- the job of a process --------------------------------------------------------------------------------------------


def versions_of(process: Process) -> Mapping[str, Any]:
    """Return the versions of libraries in a process, by name."""
    known = process.tables.process.get("versions")
    return known if isinstance(known, Mapping) else {}
