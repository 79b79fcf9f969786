"""Messages that a job sends with buckets of another size, where its calls block their rank (`blocking_buckets`).

    ZeRO-1, ZeRO-2  the closed form of the all_reduces of gradients with another `reduce_bucket_size`. If the recorded
                    ones are others than it says, since modules ran in another order, each of them counts as one
                    gradient, or as several equal ones
    FSDP2           consecutive units become one (`fully_shard([block, next_block])`) as soon as it holds that many
                    bytes of parameters. The root stays apart, and no unit is divided

Other jobs have no such calls, or sizes that follow from more than one setting.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from commtrace.job_row import JobRow
from commtrace.schema import Purpose
from commtrace.theory.expected_calls import ExpectedCall
from commtrace.theory.job import Job, element_size, reading_job
from commtrace.theory.rules.deepspeed import zero12
from commtrace.theory.rules.torch import fsdp
from commtrace.theory.rules.torch.fsdp import FsdpUnit

from .blocking_buckets import BlockingCalls, NewMessage
from .buckets import SIZES_UNKNOWN, new_buckets
from .changed_run import DoesNotApplyError

_UNDIVIDED: Final = "Units of FSDP2 are not divided, since it is not known into which modules."


class Planned(NamedTuple):
    """The messages of a pass, and a sentence on what they assume without proof."""

    messages: Sequence[NewMessage]
    remark: str = ""


Plan: TypeAlias = Callable[[BlockingCalls], Planned | None]
"""Returns the messages of a pass instead of recorded calls, None: these stay. Raises DoesNotApplyError."""


def message_plan(row: Mapping[str, Any], limit: int) -> Plan | None:
    """Return the messages of a captured job with buckets of another size; None: its calls do not block their rank.

    Args:
        row: Its row in the log's `job` table.
        limit: Bytes of a bucket.

    Raises:
        DoesNotApplyError: Its buckets have one size only.
        NotPredictedError: The row lacks what the closed forms need.
    """
    with reading_job():
        job = Job(JobRow.read(row))
        if job.row.engine == "fully_shard":
            units = fsdp.units_of(job)
            return _of_units(units, {unit.number for unit in units if not job.row.units[unit.number].name}, limit)
        if job.row.source != "deepspeed":
            return None
        if job.row.zero_stage not in (1, 2) or job.row.optimizer != "DeepSpeedZeroOptimizer":
            raise DoesNotApplyError(
                f"the job is DeepSpeed's with ZeRO-{job.row.zero_stage} and {job.row.optimizer}; of DeepSpeed, buckets "
                "of ZeRO-1 and ZeRO-2 (reduce_bucket_size) can be predicted"
            )
        elements = max(1, limit // element_size(zero12.bucket_dtype(job)))
        settings = {**row, "zero": {**row["zero"], "reduce_bucket_size": elements}}
        return _of_zero(zero12.reductions(job), zero12.reductions(Job(JobRow.read(settings))), limit)


def _of_zero(recorded: Sequence[ExpectedCall], wanted: Sequence[ExpectedCall], limit: int) -> Plan:
    def plan(calls: BlockingCalls) -> Planned | None:
        if calls.purpose is not Purpose.GRADIENTS:
            return None
        before, after = ([call.payload for call in form if call.op == calls.op] for form in (recorded, wanted))
        passes = len(calls.payload) // max(1, len(before))
        if calls.payload == before * passes and sum(before) == sum(after):
            return Planned(_last_of(calls.payload, after * passes))
        buckets = new_buckets(np.array(calls.payload), limit, [])
        return Planned([NewMessage(bucket.bucket, bucket.payload) for bucket in buckets], SIZES_UNKNOWN)

    return plan


def _last_of(recorded: Sequence[int], wanted: Sequence[int]) -> list[NewMessage]:
    """Return messages in the recorded calls that have the last bytes of each; both have the same bytes in all."""
    at = np.searchsorted(np.cumsum(recorded), np.cumsum(wanted))
    return [NewMessage(*message) for message in zip(at.tolist(), wanted, strict=True)]


def _of_units(units: Sequence[FsdpUnit], roots: Container[int], limit: int) -> Plan:
    combined = [*_combined(units, roots, limit)]
    divisible = (unit for unit in units if unit.number not in roots and fsdp.all_gather_bytes(unit) > limit)
    remark = _UNDIVIDED if any(divisible) else ""

    def plan(calls: BlockingCalls) -> Planned | None:
        is_reduced = calls.purpose is Purpose.GRADIENTS
        forward = calls.purpose is Purpose.PARAMETERS_FORWARD
        messages: list[NewMessage] = []
        recorded: list[int] = []
        for own in combined if forward else reversed(combined):
            members = [unit for unit in own if (unit.trained if is_reduced else forward or not unit.kept)]
            payload = [_payload(unit, calls) for unit in (members if forward else reversed(members))]
            if payload:
                at = len(recorded) + (len(payload) - 1) * is_reduced
                messages.append(NewMessage(at, sum(payload)))
                recorded += payload
        passes = len(calls.payload) // max(1, len(recorded))
        if calls.payload != recorded * passes:
            raise DoesNotApplyError(
                f'the calls for "{calls.purpose.value}" are not one for each unit of FSDP2 in the order of the model'
            )
        shifts = [number * len(recorded) for number in range(passes)]
        return Planned([NewMessage(shift + at, payload) for shift in shifts for at, payload in messages], remark)

    return plan


def _combined(units: Sequence[FsdpUnit], roots: Container[int], limit: int) -> Iterator[list[FsdpUnit]]:
    """Yield the recorded units that are one unit, in the order of forward."""
    own: list[FsdpUnit] = []
    for unit in units:
        own.append(unit)
        if unit.number in roots or sum(map(fsdp.all_gather_bytes, own)) >= limit:
            yield own
            own = []
    if own:
        yield own


def _payload(unit: FsdpUnit, calls: BlockingCalls) -> int:
    """Return the bytes of a unit's call."""
    if calls.purpose is not Purpose.GRADIENTS:
        return fsdp.all_gather_bytes(unit)
    return unit.gradient_bytes // (unit.shards if calls.op == "all_reduce" else 1)
