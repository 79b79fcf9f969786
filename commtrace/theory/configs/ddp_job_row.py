"""Row of the `job` table for a model under DistributedDataParallel, from a configuration."""

from __future__ import annotations

from typing import Any

from commtrace.theory.model_shapes import ModuleSpec, model_lists
from commtrace.theory.rules.registry import TORCH, rule

from .rank_layout import ELEMENT_TYPES, RankLayout


def ddp_row(model: ModuleSpec, precision: str, layout: RankLayout) -> dict[str, Any]:
    """A model under DistributedDataParallel with default settings, all of it in one element type."""
    found = model_lists(model, ELEMENT_TYPES[precision])
    return {
        "source": "ddp",
        "engine": "DistributedDataParallel",
        **ddp_defaults(),
        "data_parallel_size": layout.reducing,
        "ignored": [],
        "mixed_precision": None,
        "parameters": found.parameters,
        "buffers": found.buffers,
    }


@rule("torch.nn.parallel.DistributedDataParallel.__init__ (its defaults)", TORCH)
def ddp_defaults() -> dict[str, Any]:
    """Buckets of 25 MiB, the first of 1 MiB; broadcasts of 250 MiB."""
    return {
        "broadcast_buffers": True,
        "broadcast_bucket_size": 250 << 20,
        "bucket_bytes_cap": 25 << 20,
        "first_bucket_bytes_cap": 1 << 20,
        "bucket_bytes_caps": [],
        "find_unused_parameters": False,
        "static_graph": False,
    }
