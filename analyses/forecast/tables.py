"""A plan's two predictions as rows: the closed form, and every call.

Volumes are bytes, of one rank and of all ranks together. Payload is nccl-tests' size, counted once on every rank that
takes part; wire bytes are what ranks must at least send (`commtrace.volume`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from commtrace.analyses.theory import Message, NotPredictedError, Prediction, predict
from commtrace.analyses.theory.messages import sent

from .inputs import NOTHING_MORE, Options, Plan, PlanError, plan

START: Final = "start-up"


@dataclass(frozen=True)
class Forecast:
    """What every rank is going to communicate."""

    plan: Plan
    prediction: Prediction

    @property
    def parts(self) -> Iterator[tuple[str, tuple[Message, ...]]]:
        """Start-up, the steps that differ, and the steps that are all alike: a name and the calls of a rank."""
        yield START, self.prediction.start
        for number in range(self.prediction.steady):
            yield f"step {number}", self.prediction.step(number)
        yield f"steps from {self.prediction.steady}", self.prediction.step(self.prediction.steady)

    @property
    def steady(self) -> tuple[Message, ...]:
        """A step once steps are alike."""
        return self.prediction.step(self.prediction.steady)


def forecast(files: Sequence[str], world: int, options: Options = NOTHING_MORE) -> Forecast:
    """The predictions for these files on `world` ranks. Raises PlanError where there is no job, or no rules for it."""
    try:
        found = plan(files, world, options)
        return Forecast(found, predict(found.row))
    except NotPredictedError as error:
        raise PlanError(f"{', '.join(files)}: not predicted: {error}") from error


def volumes(found: Forecast) -> Iterator[dict[str, Any]]:
    """A row for each part, role and operation, and one for the whole part, whose operation is "all"."""
    for name, messages in found.parts:
        groups: dict[tuple[str, str], list[Message]] = {}
        for one in messages:
            groups.setdefault((one.role, one.op), []).append(one)
        for (role, op), some in sorted(groups.items()):
            yield {"when": name, "role": role, "op": op, **_volume(found, some)}
        yield {"when": name, "role": "all", "op": "all", **_volume(found, messages)}


def _volume(found: Forecast, messages: Iterable[Message]) -> dict[str, Any]:
    some = list(messages)
    bounds = any(one.most is not None for one in some)
    ranks = found.plan.layout.world
    payload, wire = sum(one.bytes for one in some), _wire(found, some)
    return {
        "calls": sum(one.calls for one in some),
        "calls_max": sum(one.calls if one.most is None else one.most for one in some) if bounds else None,
        "payload_bytes": payload,
        "wire_bytes": number(wire),
        "all_ranks_payload_bytes": payload * ranks,
        "all_ranks_wire_bytes": number(wire * ranks),
    }


def _wire(found: Forecast, messages: Iterable[Message]) -> Fraction:
    ranks = found.prediction.ranks_of
    return sum((sent(one.op, one.payload, one.ranks or ranks(one.role)) * one.calls for one in messages), Fraction(0))


def sizes(found: Forecast) -> Iterator[dict[str, Any]]:
    """A row for each operation and message size of a rank in a step once steps are alike."""
    counts: dict[tuple[str, str, int], int] = {}
    for one in found.steady:
        counts[one.role, one.op, one.payload] = counts.get((one.role, one.op, one.payload), 0) + one.calls
    for (role, op, payload), calls in sorted(counts.items()):
        yield {"role": role, "op": op, "payload_bytes": payload, "calls": calls, "sum_bytes": payload * calls}


def bins(found: Forecast) -> Iterator[dict[str, Any]]:
    """The same by powers of two: a message of `from_bytes` up to, but not, `below_bytes`; without payload: 0 to 1."""
    sums: dict[tuple[str, str, int], list[int]] = {}
    for row in sizes(found):
        low = 1 << (row["payload_bytes"].bit_length() - 1) if row["payload_bytes"] else 0
        held = sums.setdefault((row["role"], row["op"], low), [0, 0])
        held[0] += row["calls"]
        held[1] += row["sum_bytes"]
    for (role, op, low), (calls, total) in sorted(sums.items()):
        yield {
            "role": role, "op": op, "from_bytes": low, "below_bytes": low * 2 or 1, "calls": calls, "sum_bytes": total
        }  # fmt: skip


def waterfall(found: Forecast) -> Iterator[dict[str, Any]]:
    """From the closed form to the wire bytes of a step, a cause a row."""
    yield {"label": found.prediction.closed_form.label, "wire_bytes": number(found.prediction.closed_form.bytes)}
    for bar in found.prediction.bars:
        if bar.bytes:
            yield {"label": bar.label, "wire_bytes": number(bar.bytes)}


def number(value: Fraction) -> int | float:
    """A whole number where it is one."""
    return int(value) if value.denominator == 1 else float(value)


def document(found: Forecast) -> dict[str, Any]:
    """Everything, as JSON has it."""
    row, layout, form = found.plan.row, found.plan.layout, found.prediction.closed_form
    elements = sum(_product(one["shape"]) for one in row["parameters"])
    return {
        "scheme": found.prediction.scheme,
        "world_size": layout.world,
        "data_parallel_size": layout.data,
        "tensor_parallel_size": layout.tensor,
        "sequence_parallel_size": layout.sequence,
        "context_parallel_size": layout.context,
        "micro_batch_size": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
        "parameters": elements,
        "assumed": [*found.plan.assumed],
        "closed_form": {
            "label": form.label,
            "wire_bytes": number(form.bytes),
            "all_ranks_wire_bytes": number(form.bytes * layout.world),
        },
        "waterfall": [*waterfall(found)],
        "volumes": [*volumes(found)],
        "message_sizes": [*sizes(found)],
        "message_size_bins": [*bins(found)],
    }


def _product(shape: Iterable[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
