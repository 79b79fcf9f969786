"""DistributedDataParallel: buckets of gradients are all_reduced while backward runs.

Assumptions, which no job row contains: gradients become ready in the reverse of the order in which parameters are
registered (sizes of buckets depend on it, total bytes do not), and are reduced once a step (with `no_sync` in the other
micro-batches).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from commtrace.theory.closed_forms import data_parallel
from commtrace.theory.expected_calls import ExpectedCall, Prediction, WaterfallBar, total_wire_bytes
from commtrace.theory.job import Job, ModelTensor, grouped, refuse
from commtrace.theory.rules.gradients import backward_order, buckets_reaching_limit, max_buckets_reaching_limit
from commtrace.theory.rules.registry import TORCH, rule
from commtrace.theory.waterfall import cause_bars, level_bars

GRADIENTS: Final = "gradients"

_STEPS: Final = 4
_UNLIMITED: Final = 1 << 62
_INT32, _INT64 = 4, 8


def predict(job: Job) -> Prediction:
    """Predict what a rank communicates. Raise NotPredictedError for settings without rules."""
    refuse((job.fact("mixed_precision") is not None, "DDP's own mixed precision has no rules yet"))
    start = (*verification(job), *first_broadcast(job))
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
    rebuilt = rebuilds_in(job)
    new_buckets = rebuilding(job) if number == rebuilt else []
    reduced = gradients(job) if rebuilt is not None and number >= rebuilt else first_gradients(job)
    return (*new_buckets, *buffers_broadcast(job), *reduced, *used_map(job, number))


@rule("torch/csrc/distributed/c10d/reducer.cpp verify_params_across_processes", TORCH)
def verification(job: Job) -> list[ExpectedCall]:
    """Ranks compare how many parameters they train, and the shapes and strides of these."""
    cause = "comparison of the parameters' shapes"
    numbers = sum(2 * len(parameter.shape) for parameter in _trained(job))
    return [ExpectedCall("all_gather", _INT64 * job.ranks, cause), ExpectedCall("broadcast", _INT64 * numbers, cause)]


@rule("torch.distributed.utils._sync_module_states; torch/csrc/distributed/c10d/comm.cpp broadcast_coalesced", TORCH)
def first_broadcast(job: Job) -> list[ExpectedCall]:
    """Rank 0 broadcasts its parameters and buffers, one element type after the other."""
    tensors = [*job.parameters, *(job.buffers if job.fact("broadcast_buffers") else ())]
    return _broadcasts(job, tensors, "first parameters and buffers")


@rule("torch.nn.parallel.DistributedDataParallel._sync_buffers", TORCH)
def buffers_broadcast(job: Job) -> list[ExpectedCall]:
    """Rank 0 broadcasts its buffers before the step's first forward pass."""
    tensors = job.buffers if job.fact("broadcast_buffers") else ()
    return _broadcasts(job, tensors, "buffers (broadcast_buffers)")


def _broadcasts(job: Job, tensors: Iterable[ModelTensor], cause: str) -> list[ExpectedCall]:
    limits = [int(job.fact("broadcast_bucket_size"))]
    buckets = (
        bucket for sizes in _by_type(_not_ignored(job, tensors)) for bucket in buckets_reaching_limit(sizes, limits)
    )
    return [ExpectedCall("broadcast", sum(bucket), cause) for bucket in buckets]


@rule("torch.nn.parallel.distributed.BucketCapacityConfig.compute_bucket_size_limits", TORCH)
def first_limits(job: Job) -> list[int]:
    """Until the first backward pass, buckets have these limits in bytes."""
    if job.fact("bucket_bytes_caps"):
        return [int(cap) for cap in job.fact("bucket_bytes_caps")]
    if job.fact("static_graph") or not job.fact("find_unused_parameters"):
        return [_UNLIMITED]
    return rebuilt_limits(job)


@rule("torch/csrc/distributed/c10d/reducer.cpp Reducer::rebuild_buckets", TORCH)
def rebuilt_limits(job: Job) -> list[int]:
    """Rebuilt buckets have these limits in bytes: a small first one, so that communication begins early."""
    caps = job.fact("bucket_bytes_caps") or [job.fact("first_bucket_bytes_cap"), job.fact("bucket_bytes_cap")]
    return [int(cap) for cap in caps]


@rule("torch/csrc/distributed/c10d/reducer.hpp Reducer::should_rebuild_buckets; reducer.cpp push_rebuilt_params", TORCH)
def rebuilds_in(job: Job) -> int | None:
    """Buckets are rebuilt in the step behind the first backward pass whose order is noted; None: never."""
    if job.fact("static_graph"):
        return 2  # the first backward pass learns the graph
    return None if job.fact("find_unused_parameters") else 1


@rule("torch/csrc/distributed/c10d/reducer.cpp Reducer::all_reduce_bucket", TORCH)
def first_gradients(job: Job) -> list[ExpectedCall]:
    """In the first step buckets are all_reduced in the order of registration."""
    return _reductions(_trained(job), first_limits(job))


@rule("torch/csrc/distributed/c10d/reducer.cpp Reducer::all_reduce_bucket (rebuilt)", TORCH)
def gradients(job: Job) -> list[ExpectedCall]:
    """Rebuilt buckets are all_reduced in backward order."""
    return _reductions(backward_order(job, _trained(job)), rebuilt_limits(job), ordered=True)


def _reductions(tensors: Iterable[ModelTensor], limits: list[int], *, ordered: bool = False) -> list[ExpectedCall]:
    calls = []
    for sizes in _by_type(tensors):
        buckets = buckets_reaching_limit(sizes, limits)
        most = max_buckets_reaching_limit(sum(sizes), limits) if ordered else len(buckets)
        for number, bucket in enumerate(buckets):
            room = 1 + max(0, most - len(buckets)) if number == 0 else 1
            calls.append(ExpectedCall("all_reduce", sum(bucket), GRADIENTS, most=room if ordered else None))
    return calls


@rule("torch/csrc/distributed/c10d/reducer.cpp Reducer::sync_bucket_indices", TORCH)
def rebuilding(job: Job) -> list[ExpectedCall]:
    """Rank 0 broadcasts the bucket of each parameter, and the number in each bucket (32-bit numbers)."""
    cause = "rebuilt buckets"
    trained = _trained(job)
    count = len(_reductions(backward_order(job, trained), rebuilt_limits(job)))
    return [
        ExpectedCall("broadcast", _INT32 * (len(trained) + 1), cause),
        ExpectedCall("broadcast", _INT32 * count, cause),
    ]


@rule("torch/csrc/distributed/c10d/reducer.cpp Reducer::all_reduce_local_used_map", TORCH)
def used_map(job: Job, step: int) -> list[ExpectedCall]:
    """Ranks sum which parameters were used, a 32-bit number each: in every step, or the first only (static_graph)."""
    if step > 0 if job.fact("static_graph") else not job.fact("find_unused_parameters"):
        return []
    cause = "parameters that were used (find_unused_parameters)"
    return [ExpectedCall("all_reduce", _INT32 * len(_trained(job)), cause)]


def _not_ignored(job: Job, tensors: Iterable[ModelTensor]) -> list[ModelTensor]:
    ignored = set(job.fact("ignored"))
    return [tensor for tensor in tensors if tensor.name not in ignored]


def _trained(job: Job) -> list[ModelTensor]:
    return _not_ignored(job, job.trainable)


def _by_type(tensors: Iterable[ModelTensor]) -> list[list[int]]:
    """Return the bytes of each tensor, those of one element type together."""
    return [[tensor.bytes for tensor in group] for group in grouped(tensors, lambda tensor: tensor.dtype)]
