"""Closed forms of a training step by purpose: what one rank sends for each purpose, from the sizes in the job alone.

FSDP2 and HSDP have a form for every unit, from shapes, placements, types and the passes of a step (when a unit is
gathered: `rules.torch.fsdp.gathered_over`), whatever other parallel dimension the job has. Other jobs have the forms of
their rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from commtrace.job_row import JobRow, ScheduledStageRow
from commtrace.schema import Purpose

from .expected_calls import ExpectedCall
from .job import Job, NotPredictedError, only_job, reading_job
from .rules.schemes import predict_parameters
from .rules.torch import fsdp

_FORWARD: Final = (Purpose.PARAMETERS_FORWARD, Purpose.PARAMETERS_STAGE, Purpose.PARAMETERS_ON_REQUEST)
"""Purposes before a forward pass: a pipeline stage, or the program, may call `unshard` before it."""
_BACKWARD: Final = (Purpose.PARAMETERS_BACKWARD, Purpose.PARAMETERS_RECOMPUTATION)
"""Purposes before a backward pass: with recomputed activations, a unit's own forward may gather its parameters."""

ROOT: Final = "(root)"
"""Place of a model itself, as reports show it."""

_PURPOSES: Final[Mapping[str, tuple[Purpose, ...]]] = {
    "gradients": (Purpose.GRADIENTS,),
    "gradients of tied weights": (Purpose.GRADIENTS,),
    "gradients of norms and biases, which see a part of the sequence": (Purpose.GRADIENTS,),
    "norm of the gradients": (Purpose.GRADIENT_NORM,),
    "overflow check": (Purpose.GRADIENT_OVERFLOW,),
    "small parameters": (Purpose.PARAMETERS_AFTER_OPTIMIZER,),
    "buffers (broadcast_buffers)": (Purpose.BUFFERS,),
    "parameters that were used (find_unused_parameters)": (Purpose.USED_PARAMETERS,),
    "activations of tensor-parallel layers": (
        Purpose.ACTIVATIONS,
        Purpose.ACTIVATIONS_RECOMPUTED,
        Purpose.ACTIVATION_GRADIENTS,
    ),
    "inputs of recomputed layers": (Purpose.ACTIVATIONS_RECOMPUTED,),
    "the batch, for the ranks that share a model": (Purpose.DATA,),
    "losses, averaged": (Purpose.METRICS,),
    **dict.fromkeys(
        (
            "activations and their gradients",
            "metadata of partitioned activations",
            "the attention mask, as 16-bit numbers",
            "activations gathered from partitions",
        ),
        (Purpose.PIPELINE_ACTIVATIONS, Purpose.PIPELINE_GRADIENTS),
    ),
    **dict.fromkeys(
        ("vocabulary-parallel loss", "the loss, averaged", "the loss, broadcast to all stages"), (Purpose.LOSS,)
    ),
}
"""What rules say that calls are for -> the purposes that hooks record for them."""


@dataclass(frozen=True)
class PurposeForm:
    """What one rank communicates in a training step for one purpose, or for several whose shares are not known.

    Attributes:
        purposes: The purposes, in the order in which they get their share of the calls.
        role: Parallel dimension.
        op: Operation.
        place: Unit, as the hooks name it; "": the whole model.
        calls: Calls per step.
        payload_bytes: Their payload.
        formula: The closed form, in a few words.
        is_optional: Whether a program may do without these calls.
    """

    purposes: tuple[Purpose, ...]
    role: str
    op: str
    place: str
    calls: int
    payload_bytes: int
    formula: str
    is_optional: bool = False


def purpose_forms(rows: Sequence[Mapping[str, Any]]) -> list[PurposeForm]:
    """Return the closed forms of the model that a process trains; with FSDP2, of each of its models.

    Args:
        rows: Its rows of the log's `job` table: stages of one pipeline are models of their own.

    Raises:
        NotPredictedError: With the missing fact, if the job has no sizes, or no rules.
    """
    jobs = [Job(JobRow.read(row)) for row in rows]
    with reading_job():
        if jobs and all(job.row.source == "fsdp" for job in jobs):
            return [*_of_units(jobs)]
        job = only_job(jobs)
        if job.row.source == "dtensor":
            return []  # the sizes of activations are not in the job
        return [*_of_rules(job)]


def stage_forms(rows: Iterable[Mapping[str, Any]]) -> list[PurposeForm]:
    """Return the closed forms of the messages between stages of torch.distributed.pipelining.

    Args:
        rows: Rows of the log's `stages` table.

    Raises:
        NotPredictedError: With the missing fact, if a row cannot be read.
    """
    with reading_job():
        return [form for row in rows for form in _of_stage(ScheduledStageRow.read(row))]


def _of_stage(stage: ScheduledStageRow) -> Iterator[PurposeForm]:
    """Yield the forms of a stage's messages: as many of each tensor as there are micro-batches."""
    for purpose, op, sizes in (
        (Purpose.PIPELINE_ACTIVATIONS, "recv", stage.received),
        (Purpose.PIPELINE_ACTIVATIONS, "send", stage.sent),
        (Purpose.PIPELINE_GRADIENTS, "recv", stage.gradients_received),
        (Purpose.PIPELINE_GRADIENTS, "send", stage.gradients_sent),
    ):
        if sizes:
            times, place = stage.micro_batches, f"stage {stage.stage}"
            formula = "micro-batches x tensors between the stages"
            yield PurposeForm((purpose,), "pipeline", op, place, times * len(sizes), times * sum(sizes), formula)


def _of_units(jobs: Sequence[Job]) -> Iterator[PurposeForm]:
    """Yield the forms of each unit of `fully_shard`, and of the norm of all gradients."""
    for job in jobs:
        rows = [row for row in job.row.units if row.parameters]
        try:
            passes = fsdp.typical_passes(job)
        except NotPredictedError:  # pipelines, and passes of parts of the model
            passes = ((fsdp.Pass(), 1),)
        for row, unit in zip(rows, fsdp.units_of(job), strict=True):
            sums: dict[tuple[tuple[Purpose, ...], str], list[int]] = defaultdict(lambda: [0, 0])
            for purposes, call in _calls_of_unit(unit, passes):
                sums[purposes, call.op][0] += call.calls
                sums[purposes, call.op][1] += call.bytes
            for (purposes, op), (calls, size) in sums.items():
                yield PurposeForm(purposes, "data", op, row.name or ROOT, calls, size, _FORMULAS[op])
    if all(job.row.get(JobRow.tensor_parallel_size, 1) == 1 for job in jobs):
        size = sum(len(job.trainable) * job.parameter_size for job in jobs)
        formula = "a norm of each trained parameter, once a step"
        yield PurposeForm((Purpose.GRADIENT_NORM,), "data", "all_reduce", "", 1, size, formula, is_optional=True)


def _calls_of_unit(unit: fsdp.FsdpUnit, passes: fsdp.StepPasses) -> Iterator[tuple[tuple[Purpose, ...], ExpectedCall]]:
    """Yield the calls of a unit in a step that follows an equal one, with their purposes."""
    gather = ExpectedCall("all_gather", fsdp.all_gather_bytes(unit), fsdp.PARAMETERS)
    before = passes[-1][0]
    for model_pass, times in passes:
        for earlier, count in ((replace(before, unsharded=frozenset()), 1), (model_pass, times - 1)):
            gathers = zip((_FORWARD, _BACKWARD), fsdp.gathered_over(unit, earlier, model_pass), strict=True)
            yield from ((purposes, gather.times(count)) for purposes, ranks in gathers if ranks > 1 and count)
        if unit.trained:
            yield from (((Purpose.GRADIENTS,), call.times(times)) for call in fsdp.reductions(unit, model_pass))
        before = model_pass


_FORMULAS: Final = {
    "all_gather": "parameters of the unit, padded to equal shards",
    "reduce_scatter": "gradients of the unit, padded to equal shards",
    "all_reduce": "this rank's shard of the unit's gradients, among replicas",
}


def _of_rules(job: Job) -> Iterator[PurposeForm]:
    """Yield the forms that rules have for the calls of a step."""
    prediction = predict_parameters(job.row)
    alike: dict[tuple[tuple[Purpose, ...], str, str], list[ExpectedCall]] = defaultdict(list)
    for call in prediction.steps[-1]:
        alike[_purposes_of(job, call.cause), call.role, call.op].append(call)
    for (purposes, role, op), calls in alike.items():
        if purposes:
            formula = f"{prediction.scheme}: {'; '.join(dict.fromkeys(call.cause for call in calls))}"
            number, size = sum(call.calls for call in calls), sum(call.bytes for call in calls)
            yield PurposeForm(purposes, role, op, "", number, size, formula)


def _purposes_of(job: Job, cause: str) -> tuple[Purpose, ...]:
    if cause == "parameters":
        return (
            (Purpose.PARAMETERS_FORWARD, *_BACKWARD)
            if job.row.zero_stage == 3
            else (Purpose.PARAMETERS_AFTER_OPTIMIZER,)
        )
    return _PURPOSES.get(cause, ())
