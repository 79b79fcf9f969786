"""The schemes of the recorded logs as parameters of a test: one of them in `make quick`."""

from __future__ import annotations

import damaged_logs
import pytest

QUICK_AND_LONG = [
    pytest.param(scheme, marks=() if scheme == "zero3" else pytest.mark.long) for scheme in damaged_logs.SCHEMES
]

LONG_AND_EXHAUSTIVE = [
    pytest.param(scheme, marks=pytest.mark.long if scheme == "zero3" else pytest.mark.exhaustive)
    for scheme in damaged_logs.SCHEMES
]
"""For tests of seconds a scheme."""
