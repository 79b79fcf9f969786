"""Library versions that are older than the supported ones."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from commtrace.startup import too_old


@pytest.mark.parametrize(
    ("version", "old"),
    [
        ("2.5.1+cu121", True),
        ("2.6.0", False),
        ("2.13.0+cpu", False),
        ("10.0", False),
        ("2.6.0a0", False),
        ("git", False),
    ],
)
def test_an_old_version_is_named(version: str, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "torch", library)
    sentence = f"torch {version} is not supported, only 2.6 and later: calls may be missing"
    assert too_old("torch") == (sentence if old else "")
    assert too_old("torch.distributed._local_tensor") == ""
