"""A plan's two predictions as rows: the closed form, and every call.

Volumes are bytes, of one rank and of all ranks together. Payload is nccl-tests' size, counted once on every rank that
takes part; wire bytes are what ranks must at least send (`commtrace.volume`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from commtrace.theory import ExpectedCall, NotPredictedError, Prediction, predict
from commtrace.theory.configs.job_plan import DEFAULT_OPTIONS, JobPlan, PlanError, PlanOptions, plan_job
from commtrace.theory.expected_calls import exact_wire_bytes
from commtrace.volume import size_bins

START: Final = "start-up"


@dataclass(frozen=True)
class Forecast:
    """What every rank is going to communicate."""

    plan: JobPlan
    prediction: Prediction
    stages: tuple[Prediction, ...] = ()
    """Of a pipeline those of the ranks of each stage, the first of which is `prediction`."""

    @property
    def kinds(self) -> tuple[Prediction, ...]:
        """The predictions of ranks that communicate differently, each of as many ranks."""
        return self.stages or (self.prediction,)

    @property
    def ranks_of_a_kind(self) -> int:
        """How many ranks each of `kinds` is of."""
        return self.plan.layout.world // len(self.kinds)


def phases(prediction: Prediction) -> Iterator[tuple[str, tuple[ExpectedCall, ...]]]:
    """Start-up, the steps that differ, and the steps that are all alike: a name and the calls of a rank."""
    yield START, prediction.start
    for number in range(prediction.steady):
        yield f"step {number}", prediction.step(number)
    yield f"steps from {prediction.steady}", prediction.step(prediction.steady)


def forecast(files: Sequence[str], world: int, options: PlanOptions = DEFAULT_OPTIONS) -> Forecast:
    """The predictions for these files on `world` ranks. Raises PlanError where there is no job, or no rules for it."""
    try:
        found = plan_job(files, world, options)
        stages = tuple(predict(row) for row in found.stages)
        return Forecast(found, stages[0] if stages else predict(found.row), stages)
    except NotPredictedError as error:
        raise PlanError(f"{', '.join(files)}: not predicted: {error}") from error


def volume_rows(found: Forecast) -> Iterator[dict[str, Any]]:
    """A row for each part, role and operation, and one for the whole part, whose operation is "all".

    Of a pipeline for each stage, whose number is `stage`; `all_ranks` are then all of that stage.
    """
    for number, prediction in enumerate(found.kinds):
        stage = {"stage": number} if found.stages else {}
        for name, messages in phases(prediction):
            groups: dict[tuple[str, str], list[ExpectedCall]] = {}
            for one in messages:
                groups.setdefault((one.role, one.op), []).append(one)
            for (role, op), some in sorted(groups.items()):
                yield {**stage, "when": name, "role": role, "op": op, **_volume(found, prediction, some)}
            yield {**stage, "when": name, "role": "all", "op": "all", **_volume(found, prediction, messages)}


def _volume(found: Forecast, prediction: Prediction, messages: Iterable[ExpectedCall]) -> dict[str, Any]:
    some = list(messages)
    bounds = any(one.most is not None for one in some)
    ranks = found.ranks_of_a_kind
    payload, wire = sum(one.bytes for one in some), _wire(prediction, some)
    return {
        "calls": sum(one.calls for one in some),
        "calls_max": sum(one.calls if one.most is None else one.most for one in some) if bounds else None,
        "payload_bytes": payload,
        "wire_bytes": number(wire),
        "all_ranks_payload_bytes": payload * ranks,
        "all_ranks_wire_bytes": number(wire * ranks),
    }


def _wire(prediction: Prediction, messages: Iterable[ExpectedCall]) -> Fraction:
    ranks = prediction.ranks_of
    return sum(
        (exact_wire_bytes(one.op, one.payload, one.ranks or ranks(one.role)) * one.calls for one in messages),
        Fraction(0),
    )


def size_rows(found: Forecast) -> Iterator[dict[str, Any]]:
    """A row for each operation and message size of a rank in a step once steps are alike; of a pipeline by stage."""
    for stage, prediction in enumerate(found.kinds):
        counts: dict[tuple[str, str, int], int] = {}
        for one in prediction.step(prediction.steady):
            counts[one.role, one.op, one.payload] = counts.get((one.role, one.op, one.payload), 0) + one.calls
        for (role, op, payload), calls in sorted(counts.items()):
            row = {"role": role, "op": op, "payload_bytes": payload, "calls": calls, "sum_bytes": payload * calls}
            yield {"stage": stage, **row} if found.stages else row


def size_bin_rows(found: Forecast) -> Iterator[dict[str, Any]]:
    """The same by powers of two: a message of `from_bytes` up to, but not, `below_bytes`; without payload: 0 to 1."""
    sums: dict[tuple[int, str, str, int], list[int]] = {}
    for row in size_rows(found):
        low = int(size_bins(row["payload_bytes"])[0])
        held = sums.setdefault((row.get("stage", 0), row["role"], row["op"], low), [0, 0])
        held[0] += row["calls"]
        held[1] += row["sum_bytes"]
    for (stage, role, op, low), (calls, total) in sorted(sums.items()):
        row = {
            "role": role, "op": op, "from_bytes": low, "below_bytes": low * 2 or 1, "calls": calls, "sum_bytes": total
        }  # fmt: skip
        yield {"stage": stage, **row} if found.stages else row


def waterfall_rows(found: Forecast) -> Iterator[dict[str, Any]]:
    """From the closed form to the wire bytes of a step, a cause a row; of a pipeline for each stage."""
    for stage, prediction in enumerate(found.kinds):
        for at, bar in enumerate((prediction.closed_form, *prediction.bars)):
            if bar.bytes or not at:
                row = {"label": bar.label, "wire_bytes": number(bar.bytes)}
                yield {"stage": stage, "role": bar.role if at else "all", **row} if found.stages else row


def number(value: Fraction) -> int | float:
    """A whole number where it is one."""
    return int(value) if value.denominator == 1 else float(value)


def json_document(found: Forecast) -> dict[str, Any]:
    """Everything, as JSON has it."""
    row, layout, form = found.plan.row, found.plan.layout, found.prediction.closed_form
    elements = [sum(_product(one["shape"]) for one in of["parameters"]) for of in found.plan.stages or (row,)]
    pipeline = {"pipeline_stages": len(found.stages), "stage_parameters": elements} if found.stages else {}
    return {
        "scheme": found.prediction.scheme,
        "world_size": layout.world,
        "data_parallel_size": layout.data,
        "tensor_parallel_size": layout.tensor,
        **pipeline,
        "sequence_parallel_size": layout.sequence,
        "context_parallel_size": layout.context,
        "micro_batch_size": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
        "parameters": sum(elements),
        "assumed": [*found.plan.assumed],
        "closed_form": {
            "label": form.label,
            "wire_bytes": number(form.bytes),
            "all_ranks_wire_bytes": number(form.bytes * layout.world),
        },
        "waterfall": [*waterfall_rows(found)],
        "volumes": [*volume_rows(found)],
        "message_sizes": [*size_rows(found)],
        "message_size_bins": [*size_bin_rows(found)],
    }


def _product(shape: Iterable[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
