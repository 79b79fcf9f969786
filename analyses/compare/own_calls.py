"""Which calls are the program's own, not those of a library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

_LIBRARIES_WITH_RULES: Final = (
    "deepspeed/", "torch/", "mpu/mappings.py", "mpu/layers.py", "mpu/cross_entropy.py",
    "megatron/core/tensor_parallel/", "tensor_parallel/",
)  # fmt: skip
"""Prefixes of call sites in these libraries, for Megatron both in a checkout and installed."""

OwnRow: TypeAlias = tuple[str, str, int, int, int]
"""Call site, operation, rank, calls and bytes."""


@dataclass(frozen=True)
class OwnCalls:
    """The program's own calls, which are not compared."""

    calls: int
    payload_bytes: int
    ranks: frozenset[int]


def is_library_call(site: str, phase: str) -> bool:
    """Return whether a call is from a library with rules, or in backward.

    Calls in backward are never the program's own: DDP's have the call site of the program's
    `backward()`.
    """
    return phase == "backward" or is_library_site(site)


def is_library_site(site: str) -> bool:
    """Return whether a call site is in a library that has rules."""
    return path_in_packages(site).startswith(_LIBRARIES_WITH_RULES)


def is_program_call(site: str, phase: str) -> bool:
    """Return whether a call is the program's own: its call site is known, and it is not from a library."""
    return bool(site) and not is_library_call(site, phase)


def is_declared(patterns: Iterable[str], phase: str, *names: str) -> bool:
    """Return whether a shell pattern or a part of a name declares a call as the program's own."""
    return phase != "backward" and any(fnmatchcase(name, f"*{pattern}*") for pattern in patterns for name in names)


def path_in_packages(site: str) -> str:
    """Return a call site without its site-packages prefix, which may differ between ranks."""
    return site.partition(" < ")[0].rpartition("-packages/")[2]


def sum_own_calls(rows: Iterable[OwnRow]) -> dict[tuple[str, str], OwnCalls]:
    """Sum calls by call site and operation."""
    sums: dict[tuple[str, str], OwnCalls] = {}
    for site, op, rank, calls, size in rows:
        before = sums.get((site, op), OwnCalls(0, 0, frozenset()))
        sums[site, op] = OwnCalls(before.calls + calls, before.payload_bytes + size, before.ranks | {rank})
    return sums
