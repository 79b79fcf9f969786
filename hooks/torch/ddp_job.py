"""The job row of DistributedDataParallel: what determines its all_reduces and broadcasts."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed

from .model_facts import model_row, read_available

_SETTINGS = (
    "broadcast_buffers",
    "broadcast_bucket_size",
    "bucket_bytes_cap",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "skip_all_reduce_unused_params",
    "static_graph",
)


def describe(replica: Any) -> dict[str, Any]:
    """Return a row of the `job` table, without settings that this torch does not have."""
    return {
        "source": "ddp",
        "engine": type(replica).__name__,
        **read_available({name: functools.partial(getattr, replica, name) for name in _SETTINGS}),
        "bucket_bytes_caps": list(getattr(replica, "bucket_bytes_cap_list", ())),  # a setting of torch 2.11
        **read_available(
            {
                "data_parallel_size": lambda: replica.process_group.size(),
                "first_bucket_bytes_cap": lambda: _first_bucket_bytes_cap(replica),
                # Initially: DDP rebuilds them in the order in which gradients became ready.
                "first_buckets_bytes": lambda: [
                    int(size) for size in replica._get_ddp_logging_data()["bucket_sizes"].replace(",", " ").split()
                ],
                "ignored": lambda: sorted(replica.parameters_to_ignore),
                "mixed_precision": lambda: None if replica.mixed_precision is None else str(replica.mixed_precision),
            }
        ),
        **model_row(replica.module),
    }


def _first_bucket_bytes_cap(replica: Any) -> int:
    """Return the first bucket's capacity, which is smaller if the program sets no size."""
    dist: Any = torch.distributed
    return int(dist._DEFAULT_FIRST_BUCKET_BYTES if replica.bucket_bytes_cap_default else replica.bucket_bytes_cap)
