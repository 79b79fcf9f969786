"""Schedules: the order in which a pipeline stage processes its micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple


class Task(NamedTuple):
    """A pass over one micro-batch."""

    forward: bool
    micro_batch: int


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Task]:
    """Return GPipe's schedule (1811.06965): all forward, then all backward, last first. All activations are kept."""
    numbers = range(micro_batches)
    return [*(Task(True, number) for number in numbers), *(Task(False, number) for number in reversed(numbers))]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Task]:
    """Return the 1F1B schedule (1806.03377), which keeps at most one activation more than there are later stages."""
    ahead = min(stages - stage - 1, micro_batches)
    tasks = [Task(True, number) for number in range(ahead)]
    for number in range(ahead, micro_batches):
        tasks += [Task(True, number), Task(False, number - ahead)]
    return [*tasks, *(Task(False, number) for number in range(micro_batches - ahead, micro_batches))]


SCHEDULES: Final[dict[str, Callable[[int, int, int], list[Task]]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}
"""Schedules by name."""
