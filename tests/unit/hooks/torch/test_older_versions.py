"""Job rows of older library versions: settings that they lack have the value that describes their behaviour."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from commtrace.hooks.torch import ddp_job


def test_ddp_without_capacities_of_each_bucket() -> None:
    replica: Any = SimpleNamespace(module=torch.nn.Linear(2, 2))
    assert ddp_job.describe(replica).bucket_bytes_caps == []


def test_deepspeed_before_its_newer_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("deepspeed.runtime.zero.utils")
    from commtrace.hooks.deepspeed import engine_job

    monkeypatch.delattr(utils, "get_norm_dtype", raising=False)
    settings = SimpleNamespace(model_dump=lambda mode: {"stage": 1, "compute_grad_norm": False})
    engine: Any = torch.nn.Identity()
    engine.module, engine._config = torch.nn.Linear(2, 2), SimpleNamespace(zero_config=settings)
    row = engine_job.describe(engine)
    assert row.norm_dtype == "float64"
    assert row.zero.to_json() == {
        "stage": 1, "enable_sanity_checks": False, "allgather_sequential": False, "parameter_alignment": False,
        "compute_grad_norm": False,
    }  # fmt: skip
