"""The hook of SyncBatchNorm, whose functions run on accelerators only."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from commtrace.hooks import purposes
from commtrace.hooks.torch import batch_norm
from commtrace.schema import Purpose


def test_both_passes_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    class SyncBatchNorm:
        @staticmethod
        def forward(ctx: object) -> tuple[object, str]:
            return ctx, purposes.facts(purposes.current()).get("name", "")

        backward = forward

    monkeypatch.setitem(sys.modules, batch_norm.MODULE, SimpleNamespace(SyncBatchNorm=SyncBatchNorm))
    batch_norm.install()
    name = Purpose.BATCH_STATISTICS.value
    try:
        assert SyncBatchNorm.forward(1) == (1, name)
        assert SyncBatchNorm.backward(2) == (2, name)
    finally:
        batch_norm.uninstall()
    assert SyncBatchNorm.forward(3) == (3, "")
