"""DDP's rules for a captured job; tests/ranks compares sizes with the library."""

from __future__ import annotations

from typing import Any, Final

import pytest

from commtrace.theory import NotPredictedError, predict

JOB: Final[dict[str, Any]] = {
    "source": "ddp", "engine": "DistributedDataParallel", "data_parallel_size": 2, "static_graph": False,
    "find_unused_parameters": False, "broadcast_buffers": True, "mixed_precision": None, "ignored": [], "buffers": [],
    "bucket_bytes_cap": 25 << 20, "first_bucket_bytes_cap": 1 << 20, "bucket_bytes_caps": [],
    "broadcast_bucket_size": 250 << 20,
    "parameters": [{"name": name, "shape": [8], "dtype": "float32", "trainable": True} for name in "ab"],
}  # fmt: skip


def test_two_ranks_reduce_all_gradients() -> None:
    prediction = predict(JOB)
    assert [(call.op, call.bytes) for call in prediction.steps[-1]] == [("all_reduce", 2 * 8 * 4)]


def test_one_rank_has_nothing_to_communicate() -> None:
    with pytest.raises(NotPredictedError, match="one data-parallel rank has nothing to communicate"):
        predict({**JOB, "data_parallel_size": 1})
