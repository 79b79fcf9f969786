"""Conventions for payload, wire bytes and bus bandwidth.

* **Payload** S is nccl-tests' size (its doc/PERFORMANCE.md). all_reduce, broadcast, reduce, scan: the buffer;
  all_gather: the full output; reduce_scatter: the full input; all_to_all: the send buffer; gather, scatter: the
  shares of all ranks; send, recv: the message; barrier: 0. Hooks measure S and `local`, the part of S that is this
  rank's own share and never leaves it.
* **Wire bytes** are the fewest bytes that this rank can send with any algorithm. They are computed from the payload,
  not measured.
* **busbw** is algbw (S / t, 1 GB = 1e9 bytes) times a factor that makes operations comparable.

All functions take numbers or numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Number = Any  # a Python number or a numpy array; numpy's own types have no common name for both

# Bytes sent, in n-ths of S. broadcast and reduce: (n-1)S over the group, so (n-1)/n on average; which ranks send
# depends on the algorithm. all_reduce: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
_NTHS: Final[dict[str, Callable[[Number], Number]]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    **dict.fromkeys(("broadcast", "reduce", "scan", "exscan"), lambda n: n - 1),
    **dict.fromkeys(("send", "sendrecv", "put", "accumulate"), lambda n: n),
    **dict.fromkeys(("recv", "get", "barrier"), lambda n: 0 * n),
}

_UNEVEN: Final = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Operations whose wire bytes depend on this rank's own share (`local`)."""

_BUSBW: Final[dict[str, Callable[[Number], Number]]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(_UNEVEN, lambda n: (n - 1) / n),
    **dict.fromkeys(("broadcast", "reduce", "send", "recv", "sendrecv"), lambda n: n / n),
}


def wire_bytes(
    op: str, payload: Number, local: Number, group_size: Number, *, is_root: Number = 0, to_self: Number = 0
) -> Number:
    """Return the fewest bytes that this rank can send for a call.

    All arguments but `op` are numbers, or arrays that broadcast together.

    Args:
        op: One of `schema.OPERATIONS`.
        payload: Bytes of the buffer, by nccl-tests' convention.
        local: Bytes of the payload that never leave this rank: its own share, even if shares are uneven.
        group_size: Number of ranks in the call's group.
        is_root: 1 on the root of a gather or scatter, else 0.
        to_self: 1 for a message to its own sender, else 0.

    Returns:
        Bytes as float; exact if they are a whole number.

    Raises:
        ValueError: The operation has no rule.
    """
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        sent = payload - local
    elif op == "gather":
        sent = local * (1 - is_root)
    elif op == "scatter":
        sent = (payload - local) * is_root
    elif op in _NTHS:
        # The division comes last, so that the result is exact if it is a whole number of bytes.
        sent = payload * _NTHS[op](group_size) / group_size
    else:
        known = ", ".join(sorted({*_NTHS, *_UNEVEN}))
        raise ValueError(f"no wire rule for the operation {op!r}; choose from {known}")
    return sent * (1.0 - to_self)


def busbw_factor(op: str, group_size: Number) -> Number | None:
    """Return busbw / algbw (nccl-tests doc/PERFORMANCE.md); None for an operation without busbw, such as barrier."""
    rule = _BUSBW.get(op)
    return None if rule is None else rule(group_size)


def size_bins(payload: Number) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the power-of-two bin of each size.

    Args:
        payload: Sizes in bytes. Size 0 has a bin of its own, [0, 1).

    Returns:
        The lower bound (inclusive) and upper bound (exclusive) of each bin: int64, with the shape of `payload`.
    """
    # size = m * 2**e with 0.5 <= m < 1, so the power of two at or below it is 2**(e - 1).
    exponent = np.frexp(np.maximum(payload, 0).astype(float))[1].astype(np.int64) - 1
    low = np.where(exponent >= 0, np.int64(1) << np.maximum(exponent, 0), 0)
    return low, np.where(low > 0, low * 2, 1)
