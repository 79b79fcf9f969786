"""Conventions for payload, wire bytes and bus bandwidth; `commtrace.operations` has the rule of each operation.

* **Payload** S is nccl-tests' size. Hooks measure S and `local`, the part of S that is this rank's own share and
  never leaves it.
* **Wire bytes** are the fewest bytes that this rank can send with any algorithm. They are computed from the payload,
  not measured.
* **busbw** is algbw (S / t, 1 GB = 1e9 bytes) times a factor that makes operations comparable.

All functions take numbers or numpy arrays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .operations import OPERATIONS, Number


def wire_bytes(op: str, payload: Number, local: Number, group_size: Number, *, peer_is_self: Number = 0) -> Number:
    """Return the fewest bytes that this rank can send for a call.

    All arguments but `op` are numbers, or arrays that broadcast together.

    Args:
        op: One of `operations.OPERATIONS`.
        payload: Bytes of the buffer, by nccl-tests' convention.
        local: Bytes of the payload that never leave this rank: its own share, even if shares are uneven.
        group_size: Number of ranks in the call's group.
        peer_is_self: 1 on the root, and for a message to its own sender, else 0.

    Returns:
        Bytes as float; exact if they are a whole number.

    Raises:
        ValueError: The operation has no rule.
    """
    operation = OPERATIONS.get(op)
    if operation is None:
        raise ValueError(f"no wire rule for the operation {op!r}; choose from {', '.join(sorted(OPERATIONS))}")
    return operation.wire(payload, local, group_size, peer_is_self) * 1.0


def busbw_factor(op: str, group_size: Number) -> Number | None:
    """Return busbw / algbw (nccl-tests doc/PERFORMANCE.md); None for an operation without busbw, such as barrier."""
    operation = OPERATIONS.get(op)
    return None if operation is None or operation.busbw is None else operation.busbw(group_size)


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
