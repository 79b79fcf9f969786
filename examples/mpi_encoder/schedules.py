"""In which order a stage of a pipeline works on its micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple


class Task(NamedTuple):
    """A pass over one micro-batch."""

    forward: bool
    micro_batch: int


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Task]:
    """All forward, then all backward, last first (1811.06965). All activations are kept until then."""
    numbers = range(micro_batches)
    return [*(Task(True, number) for number in numbers), *(Task(False, number) for number in reversed(numbers))]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Task]:
    """Backward as soon as possible (1806.03377): a stage keeps no more activations than there are stages after it."""
    ahead = min(stages - stage - 1, micro_batches)
    tasks = [Task(True, number) for number in range(ahead)]
    for number in range(ahead, micro_batches):
        tasks += [Task(True, number), Task(False, number - ahead)]
    return [*tasks, *(Task(False, number) for number in range(micro_batches - ahead, micro_batches))]


SCHEDULES: Final[dict[str, Callable[[int, int, int], list[Task]]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}
"""By name."""
