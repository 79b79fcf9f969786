"""The schemes of the recorded logs as parameters of a test: one of them in `make quick`, three in `make test`."""

from __future__ import annotations

import damaged_logs
import pytest

_MARKS = {"zero3": [], "ddp": [pytest.mark.long], "pipeline": [pytest.mark.long]}

SCHEMES = [pytest.param(scheme, marks=_MARKS.get(scheme, [pytest.mark.exhaustive])) for scheme in damaged_logs.SCHEMES]

LONG_AND_EXHAUSTIVE = [
    pytest.param(scheme, marks=pytest.mark.long if scheme == "zero3" else pytest.mark.exhaustive)
    for scheme in damaged_logs.SCHEMES
]
"""For tests that take seconds per scheme."""
