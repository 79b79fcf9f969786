"""Row of the `job` table for a model under DistributedDataParallel, from a configuration."""

from __future__ import annotations

from typing import Any

from commtrace.theory.model_shapes import ModuleSpec, model_lists
from commtrace.theory.rules.registry import TORCH, rule

from .rank_layout import ELEMENT_TYPES, RankLayout


def ddp_row(model: ModuleSpec, precision: str, layout: RankLayout) -> dict[str, Any]:
    """Return the row of a model in one element type, under DDP with default settings."""
    lists = model_lists(model, ELEMENT_TYPES[precision])
    return {
        "source": "ddp",
        "engine": "DistributedDataParallel",
        **ddp_defaults(),
        "data_parallel_size": layout.reducing,
        "ignored": [],
        "mixed_precision": None,
        "parameters": lists.parameters,
        "buffers": lists.buffers,
    }


@rule("torch.nn.parallel.DistributedDataParallel.__init__ (its defaults)", TORCH)
def ddp_defaults() -> dict[str, Any]:
    """By default buckets have 25 MiB, the first one 1 MiB, and broadcasts 250 MiB."""
    return {
        "broadcast_buffers": True,
        "broadcast_bucket_size": 250 << 20,
        "bucket_bytes_cap": 25 << 20,
        "first_bucket_bytes_cap": 1 << 20,
        "bucket_bytes_caps": [],
        "find_unused_parameters": False,
        "static_graph": False,
    }
