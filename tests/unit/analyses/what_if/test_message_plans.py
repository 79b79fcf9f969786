"""The messages that FSDP2 has with combined units."""

from __future__ import annotations

import numpy as np
import pytest

from commtrace.analyses.what_if.blocking_buckets import BlockingCalls
from commtrace.analyses.what_if.changed_run import DoesNotApplyError
from commtrace.analyses.what_if.message_plans import Plan, _of_units, message_plan
from commtrace.schema import Purpose
from commtrace.theory.rules.torch.fsdp import FsdpParameter, FsdpUnit

KB = 1024


def unit(number: int, kb: int, *, trained: bool = True, kept: bool = False, copies: int = 1) -> FsdpUnit:
    parameter = FsdpParameter((kb * KB // 4,), 0, "float32", trained)
    return FsdpUnit(number, (parameter,), None, 2, copies, kept, 2)


def planned(plan: Plan, op: str, purpose: Purpose, kb: list[int]) -> tuple[list[tuple[int, int]], str]:
    """Return the position and KiB of each message, and the remark."""
    calls = BlockingCalls(op, purpose, np.zeros((1, 2, len(kb)), int), [size * KB for size in kb])
    found = plan(calls)
    assert found is not None
    return [(message.at, message.payload // KB) for message in found.messages], found.remark


def test_units_are_combined_in_the_order_of_forward() -> None:
    """The root stays apart and is kept, a frozen unit has no gradients, and two passes of a step repeat."""
    units = [unit(0, 2, kept=True), unit(1, 4), unit(2, 4, trained=False), unit(3, 16), unit(4, 4)]
    plan = _of_units(units, {0}, 8 * KB)
    forward, remark = planned(plan, "all_gather", Purpose.PARAMETERS_FORWARD, [2, 4, 4, 16, 4] * 2)
    assert forward == [(0, 2), (1, 8), (3, 16), (4, 4), (5, 2), (6, 8), (8, 16), (9, 4)]
    assert "not divided" in remark
    backward, _ = planned(plan, "all_gather", Purpose.PARAMETERS_BACKWARD, [4, 16, 4, 4])
    assert backward == [(0, 4), (1, 16), (2, 8)]
    gradients, _ = planned(plan, "reduce_scatter", Purpose.GRADIENTS, [4, 16, 4, 2])
    assert gradients == [(0, 4), (1, 16), (2, 4), (3, 2)]


def test_replicas_reduce_shards() -> None:
    units = [unit(number, 8, copies=2) for number in (1, 2, 3)]
    plan = _of_units(units, set(), 12 * KB)
    assert planned(plan, "all_reduce", Purpose.GRADIENTS, [4, 4, 4]) == ([(0, 4), (2, 8)], "")


def test_other_calls_than_those_of_units_are_refused() -> None:
    plan = _of_units([unit(1, 4), unit(2, 8)], set(), 64 * KB)
    with pytest.raises(DoesNotApplyError, match='"parameters gathered for forward" are not one for each unit'):
        planned(plan, "all_gather", Purpose.PARAMETERS_FORWARD, [8, 4])


@pytest.mark.parametrize(("stage", "optimizer"), [(3, "DeepSpeedZeroOptimizer_Stage3"), (1, "BF16_Optimizer")])
def test_stages_whose_messages_have_no_size_to_choose(stage: int, optimizer: str) -> None:
    row = {"source": "deepspeed", "engine": "DeepSpeedEngine", "zero_stage": stage, "optimizer": optimizer}
    with pytest.raises(DoesNotApplyError, match=f"DeepSpeed's with ZeRO-{stage} and {optimizer}; of DeepSpeed"):
        message_plan(row, KB)
    assert message_plan({"source": "ddp", "engine": "DistributedDataParallel"}, KB) is None
