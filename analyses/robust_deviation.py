"""The deviation of values of which a few lie far away, from their median absolute deviation."""

from __future__ import annotations

from typing import Final

import numpy as np

from .grouping import Array

NORMAL: Final = 1.4826
"""Standard deviation of a normal distribution with a median absolute deviation of 1."""


def robust_deviation(values: Array) -> Array:
    """Return the deviation of values, shape (..., n), along the last axis: a standard deviation if they are normal."""
    return np.asarray(NORMAL * np.median(np.abs(values - np.median(values, axis=-1, keepdims=True)), axis=-1))
