"""How frameworks put gradients into buckets: greedily, in the order in which they become ready.

Sizes and limits are in one unit, which the caller chooses (elements or bytes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .registry import DEEPSPEED, TORCH, rule


@rule("torch/csrc/distributed/c10d/reducer.cpp compute_bucket_assignment_by_size", TORCH)
def buckets_reaching_limit(sizes: Iterable[int], limits: Sequence[int]) -> list[list[int]]:
    """Return the sizes in each bucket, where a bucket is closed once it holds its limit or more.

    Args:
        sizes: Sizes of the gradients in order.
        limits: Limits of the first buckets; the last one is that of all later buckets.
    """
    buckets: list[list[int]] = []
    bucket: list[int] = []
    for size in sizes:
        bucket.append(size)
        if sum(bucket) >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(bucket)
            bucket = []
    return [*buckets, bucket] if bucket else buckets


def max_buckets_reaching_limit(total: int, limits: Sequence[int]) -> int:
    """Return the most buckets of `buckets_reaching_limit` for any order: each but the last holds its limit or more."""
    count, remaining = 1, total
    while remaining > limits[min(count - 1, len(limits) - 1)]:
        remaining -= limits[min(count - 1, len(limits) - 1)]
        count += 1
        if count > len(limits):
            return count + (remaining - 1) // limits[-1]
    return count


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.reduce_independent_p_g_buckets_and_remove_grads; "
      "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.reduce_independent_p_g_buckets_and_remove_grads",
      DEEPSPEED)  # fmt: skip
def buckets_within_limit(sizes: Iterable[int], limit: int) -> list[list[int]]:
    """Return the positions in each bucket, where a bucket is emptied before it would exceed the limit.

    A size above the limit has a bucket of its own.
    """
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


def max_buckets_within_limit(total: int, limit: int, count: int) -> int:
    """Return the most buckets of `buckets_within_limit` for any order of `count` sizes.

    Any two neighbouring buckets together exceed the limit.
    """
    return min(count, 2 * (max(total - 1, 0) // limit) + 1)


@rule("deepspeed.runtime.engine.DeepSpeedEngine.allreduce_no_retain; "
      "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.allreduce_and_scatter, allreduce_no_retain",
      DEEPSPEED)  # fmt: skip
def buckets_exceeding_limit(sizes: Iterable[int], limit: int) -> list[int]:
    """Return the sum of each bucket, where a bucket is closed once it holds more than the limit."""
    sums: list[int] = []
    held = 0
    for size in sizes:
        held += size
        if held > limit:
            sums.append(held)
            held = 0
    return [*sums, held] if held else sums
