"""How times of a step change with the number of ranks, where nothing but this number changes.

    transfer    a latency, which stays, and the time of its bytes, which grow by the closed form of the operation
                (`bus_bytes`): a network has the same bandwidth for every number of ranks
    late ranks  ranks wait for the last of n. If their computation varies independently, by a normal distribution, the
                last of n is later than their mean by `expected_maximum` standard deviations (Tippett 1925,
                doi:10.1093/biomet/17.3-4.364)

`commtrace scaling` and `commtrace whatif --world-size` use the same.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_REACH = 9.0
"""Standard deviations up to which the expected maximum is integrated: enough for a million ranks."""


@lru_cache
def expected_maximum(ranks: int) -> float:
    """Return the expected maximum of so many independent values, in standard deviations from their mean."""
    x, width = np.linspace(-_REACH, _REACH, 20_001, retstep=True)
    if ranks < 2:
        return 0.0
    density = np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    below = np.cumsum(density) * width
    below = np.clip(below - density * width / 2, 0, 1)  # the trapezoidal rule
    return float(np.sum(x * ranks * density * below ** (ranks - 1)) * width)
