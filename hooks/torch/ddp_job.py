"""The job row of DistributedDataParallel: what determines its all_reduces and broadcasts."""

from __future__ import annotations

from typing import Any

import torch.distributed

from commtrace.job_row import JobRow

from .model_facts import architecture, available, buffers, parameters


def describe(replica: Any) -> JobRow:
    """Return a row of the `job` table, without settings that this torch does not have."""
    return JobRow(
        source="ddp",
        engine=type(replica).__name__,
        broadcast_buffers=available(lambda: replica.broadcast_buffers),
        broadcast_bucket_size=available(lambda: replica.broadcast_bucket_size),
        bucket_bytes_cap=available(lambda: replica.bucket_bytes_cap),
        find_unused_parameters=available(lambda: replica.find_unused_parameters),
        gradient_as_bucket_view=available(lambda: replica.gradient_as_bucket_view),
        skip_all_reduce_unused_params=available(lambda: replica.skip_all_reduce_unused_params),
        static_graph=available(lambda: replica.static_graph),
        bucket_bytes_caps=list(getattr(replica, "bucket_bytes_cap_list", ())),  # a setting of torch 2.11
        data_parallel_size=available(lambda: replica.process_group.size()),
        first_bucket_bytes_cap=available(lambda: _first_bucket_bytes_cap(replica)),
        # Initially: DDP rebuilds them in the order in which gradients became ready.
        first_buckets_bytes=available(
            lambda: [int(size) for size in replica._get_ddp_logging_data()["bucket_sizes"].replace(",", " ").split()]
        ),
        ignored=available(lambda: sorted(replica.parameters_to_ignore)),
        mixed_precision=available(lambda: None if replica.mixed_precision is None else str(replica.mixed_precision)),
        parameters=available(lambda: parameters(replica.module)),
        buffers=available(lambda: buffers(replica.module)),
        model=available(lambda: architecture(replica.module)),
    )


def _first_bucket_bytes_cap(replica: Any) -> int:
    """Return the first bucket's capacity, which is smaller if the program sets no size."""
    dist: Any = torch.distributed
    return int(dist._DEFAULT_FIRST_BUCKET_BYTES if replica.bucket_bytes_cap_default else replica.bucket_bytes_cap)
