"""DistributedDataParallel: buckets of gradients are all_reduced during the backward pass.

Assumptions that the captured job cannot confirm: gradients become ready in reverse registration order (this affects
bucket sizes, not total bytes), and are reduced once per step (the program uses `no_sync` in all micro-batches but the
last).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from commtrace.theory.closed_forms import data_parallel
from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import ALONE, Job, ModelTensor, grouped, refuse
from commtrace.theory.rules.gradients import backward_order, buckets_reaching_limit, max_buckets_reaching_limit
from commtrace.theory.rules.registry import TORCH, rule

GRADIENTS: Final = "gradients"

_STEPS: Final = 4
_UNLIMITED: Final = 1 << 62
_INT32, _INT64 = 4, 8


def predict(job: Job) -> Prediction:
    """Predict what a rank communicates.

    Raises:
        NotPredictedError: If the job has a setting without rules.
    """
    refuse(
        (job.row.mixed_precision is not None, "DDP's own mixed precision has no rules yet"),
        (job.ranks < 2, ALONE),
    )
    start = (*verification(job), *initial_broadcasts(job))
    steps = tuple(_step(job, number) for number in range(_STEPS))
    steady = steps[-1]
    form = data_parallel(job.elements, job.ranks) * job.parameter_size
    levels = {
        "frozen parameters have no gradients": data_parallel(job.trainable_elements, job.ranks) * job.parameter_size,
        "gradients of smaller types": total_wire_bytes(steady, job.ranks, GRADIENTS),
    }
    bars = (*level_bars(form, levels), *cause_bars(steady, job.ranks, GRADIENTS))
    return Prediction("DDP", job.ranks, start, steps, WaterfallBar("equation 2: 2 P (d-1)/d", form), bars)


def _step(job: Job, number: int) -> tuple[ExpectedCall, ...]:
    rebuild_at = rebuild_step(job)
    new_buckets = bucket_assignment_broadcasts(job) if number == rebuild_at else []
    is_rebuilt = rebuild_at is not None and number >= rebuild_at
    reduced = rebuilt_bucket_all_reduces(job) if is_rebuilt else initial_bucket_all_reduces(job)
    return (*new_buckets, *buffer_broadcasts(job), *reduced, *used_map(job, number))


@rule("torch/csrc/distributed/c10d/reducer.cpp verify_params_across_processes", TORCH)
def verification(job: Job) -> list[ExpectedCall]:
    """Return the calls that compare the number, shapes and strides of trainable parameters across ranks."""
    cause = "comparison of the parameters' shapes"
    count = sum(2 * len(parameter.shape) for parameter in _trained(job))
    return [ExpectedCall("all_gather", _INT64 * job.ranks, cause), ExpectedCall("broadcast", _INT64 * count, cause)]


@rule("torch.distributed.utils._sync_module_states; torch/csrc/distributed/c10d/comm.cpp broadcast_coalesced", TORCH)
def initial_broadcasts(job: Job) -> list[ExpectedCall]:
    """Return the broadcasts of rank 0's parameters and buffers at construction, one dtype at a time."""
    tensors = [*job.parameters, *(job.buffers if job.row.broadcast_buffers else ())]
    return _broadcasts(job, tensors, "first parameters and buffers")


@rule("torch.nn.parallel.DistributedDataParallel._sync_buffers", TORCH)
def buffer_broadcasts(job: Job) -> list[ExpectedCall]:
    """Return the broadcasts of rank 0's buffers before the first forward pass of a step."""
    tensors = job.buffers if job.row.broadcast_buffers else ()
    return _broadcasts(job, tensors, "buffers (broadcast_buffers)")


def _broadcasts(job: Job, tensors: Iterable[ModelTensor], cause: str) -> list[ExpectedCall]:
    limits = [job.row.broadcast_bucket_size]
    groups = _bytes_by_dtype(_not_ignored(job, tensors))
    buckets = (bucket for sizes in groups for bucket in buckets_reaching_limit(sizes, limits))
    return [ExpectedCall("broadcast", sum(bucket), cause) for bucket in buckets]


@rule("torch.nn.parallel.distributed.BucketCapacityConfig.compute_bucket_size_limits", TORCH)
def initial_bucket_limits(job: Job) -> list[int]:
    """Return the size limits in bytes of the initial buckets, which DDP uses until it rebuilds them."""
    if job.row.bucket_bytes_caps:
        return job.row.bucket_bytes_caps
    if job.row.static_graph or not job.row.find_unused_parameters:
        return [_UNLIMITED]
    return rebuilt_bucket_limits(job)


@rule("torch/csrc/distributed/c10d/reducer.cpp Reducer::rebuild_buckets", TORCH)
def rebuilt_bucket_limits(job: Job) -> list[int]:
    """Return the size limits in bytes of rebuilt buckets: the first is small, so that communication starts early."""
    return job.row.bucket_bytes_caps or [job.row.first_bucket_bytes_cap, job.row.bucket_bytes_cap]


@rule("torch/csrc/distributed/c10d/reducer.hpp Reducer::should_rebuild_buckets; reducer.cpp push_rebuilt_params", TORCH)
def rebuild_step(job: Job) -> int | None:
    """Return the step in which DDP rebuilds its buckets, after it has recorded the gradient order; None: never."""
    if job.row.static_graph:
        return 2  # the first backward pass only records the graph
    return None if job.row.find_unused_parameters else 1


@rule("torch/csrc/distributed/c10d/reducer.cpp Reducer::all_reduce_bucket", TORCH)
def initial_bucket_all_reduces(job: Job) -> list[ExpectedCall]:
    """Return the all_reduces of the initial buckets, which follow registration order."""
    return _all_reduces(_trained(job), initial_bucket_limits(job))


@rule("torch/csrc/distributed/c10d/reducer.cpp Reducer::all_reduce_bucket (rebuilt)", TORCH)
def rebuilt_bucket_all_reduces(job: Job) -> list[ExpectedCall]:
    """Return the all_reduces of the rebuilt buckets, which follow backward order."""
    return _all_reduces(backward_order(job, _trained(job)), rebuilt_bucket_limits(job), order_may_vary=True)


def gradient_bytes(job: Job) -> list[list[int]]:
    """Return the bytes of each gradient, in the order in which they become ready, for each dtype."""
    return _bytes_by_dtype(backward_order(job, _trained(job)))


def _all_reduces(tensors: Iterable[ModelTensor], limits: list[int], order_may_vary: bool = False) -> list[ExpectedCall]:
    calls = []
    for sizes in _bytes_by_dtype(tensors):
        buckets = buckets_reaching_limit(sizes, limits)
        max_buckets = max_buckets_reaching_limit(sum(sizes), limits) if order_may_vary else len(buckets)
        for number, bucket in enumerate(buckets):
            spare = max(0, max_buckets - len(buckets)) if number == 0 else 0
            max_calls = 1 + spare if order_may_vary else None
            calls.append(ExpectedCall("all_reduce", sum(bucket), GRADIENTS, max_calls=max_calls))
    return calls


@rule("torch/csrc/distributed/c10d/reducer.cpp Reducer::sync_bucket_indices", TORCH)
def bucket_assignment_broadcasts(job: Job) -> list[ExpectedCall]:
    """Return the int32 broadcasts of rebuilt buckets: the index of each parameter's bucket, then the bucket lengths."""
    cause = "rebuilt buckets"
    trained = _trained(job)
    count = len(_all_reduces(backward_order(job, trained), rebuilt_bucket_limits(job)))
    return [
        ExpectedCall("broadcast", _INT32 * (len(trained) + 1), cause),
        ExpectedCall("broadcast", _INT32 * count, cause),
    ]


@rule("torch/csrc/distributed/c10d/reducer.cpp Reducer::all_reduce_local_used_map", TORCH)
def used_map(job: Job, step: int) -> list[ExpectedCall]:
    """Return the all_reduce of the map of used parameters (int32 each), with static_graph in the first step only."""
    if step > 0 if job.row.static_graph else not job.row.find_unused_parameters:
        return []
    cause = "parameters that were used (find_unused_parameters)"
    return [ExpectedCall("all_reduce", _INT32 * len(_trained(job)), cause)]


def _not_ignored(job: Job, tensors: Iterable[ModelTensor]) -> list[ModelTensor]:
    ignored = set(job.row.ignored)
    return [tensor for tensor in tensors if tensor.name not in ignored]


def _trained(job: Job) -> list[ModelTensor]:
    return _not_ignored(job, job.trainable)


def _bytes_by_dtype(tensors: Iterable[ModelTensor]) -> list[list[int]]:
    """Return the bytes of each tensor, grouped by dtype."""
    return [[tensor.bytes for tensor in group] for group in grouped(tensors, lambda tensor: tensor.dtype)]
