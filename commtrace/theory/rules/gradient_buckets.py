"""How frameworks put gradients into buckets: greedily, in the order in which they come. Sizes in any one unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .registry import DEEPSPEED, TORCH, rule


@rule("torch/csrc/distributed/c10d/reducer.cpp compute_bucket_assignment_by_size", TORCH)
def filled(sizes: Iterable[int], limits: Sequence[int]) -> list[list[int]]:
    """Buckets that are closed as soon as they hold their limit or more; the last limit is that of all later buckets."""
    buckets: list[list[int]] = []
    bucket: list[int] = []
    for size in sizes:
        bucket.append(size)
        if sum(bucket) >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(bucket)
            bucket = []
    return [*buckets, bucket] if bucket else buckets


def most_filled(total: int, limits: Sequence[int]) -> int:
    """Buckets of `filled` at the most, whatever the order: each but the last holds its limit or more."""
    count, left = 1, total
    while left > limits[min(count - 1, len(limits) - 1)]:
        left -= limits[min(count - 1, len(limits) - 1)]
        count += 1
        if count > len(limits):
            return count + (left - 1) // limits[-1]
    return count


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.reduce_independent_p_g_buckets_and_remove_grads; "
      "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.reduce_independent_p_g_buckets_and_remove_grads",
      DEEPSPEED)  # fmt: skip
def fitting(sizes: Iterable[int], limit: int) -> list[list[int]]:
    """Positions in buckets that are emptied before they would exceed the limit; what is larger is alone in one."""
    buckets: list[list[int]] = []
    held = 0
    for position, size in enumerate(sizes):
        if not size:
            continue
        if not buckets or held + size > limit:
            buckets.append([])
            held = 0
        buckets[-1].append(position)
        held += size
    return buckets


def most_fitting(total: int, limit: int, count: int) -> int:
    """Buckets of `fitting` at the most, whatever the order of `count` sizes: any two neighbours exceed the limit."""
    return min(count, 2 * (max(total - 1, 0) // limit) + 1)


@rule("deepspeed.runtime.engine.DeepSpeedEngine.allreduce_no_retain; "
      "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.allreduce_and_scatter, allreduce_no_retain",
      DEEPSPEED)  # fmt: skip
def overfull(sizes: Iterable[int], limit: int) -> list[int]:
    """Sums of buckets that are closed as soon as they hold more than their limit."""
    sums: list[int] = []
    held = 0
    for size in sizes:
        held += size
        if held > limit:
            sums.append(held)
            held = 0
    return [*sums, held] if held else sums
