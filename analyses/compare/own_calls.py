"""Which calls are the program's own or of its activities, not of its training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

from commtrace.library_frames import path_below_packages
from commtrace.schema import ACTIVITIES, OWN_PURPOSES

ACTIVITY_NAMES: Final = frozenset(purpose.value for purpose in ACTIVITIES)
EVALUATION: Final = "evaluation"
"""Name of an activity whose calls have any purpose; they are recorded with this phase."""

_OWN_NAMES: Final = ACTIVITY_NAMES | {purpose.value for purpose in OWN_PURPOSES}
_LIBRARIES_WITH_RULES: Final = (
    "deepspeed/", "torch/", "mpu/mappings.py", "mpu/layers.py", "mpu/cross_entropy.py",
    "megatron/core/tensor_parallel/", "tensor_parallel/",
)  # fmt: skip
"""Prefixes of call sites in these libraries, for Megatron both in a checkout and installed."""

OwnKey: TypeAlias = tuple[str, str, str]
"""Purpose, call site and operation."""
OwnRow: TypeAlias = tuple[OwnKey, int, int, int]
"""Origin, rank, calls and bytes."""


@dataclass(frozen=True)
class OwnCalls:
    """Calls of the program itself or of its activities, which are not compared."""

    calls: int
    payload_bytes: int
    ranks: frozenset[int]


def is_activity(purpose: str, phase: str) -> bool:
    """Return whether calls are of something that a program does beside training: a checkpoint, an evaluation."""
    return phase == EVALUATION or purpose in ACTIVITY_NAMES


def is_own(site: str, purpose: str, phase: str) -> bool:
    """Return whether the program itself requests calls, by their purpose or, for others, by their call site.

    Calls in backward are never the program's own: DDP's have the call site of the program's
    `backward()`.
    """
    if phase == "backward":
        return False
    return purpose in _OWN_NAMES or (bool(site) and not is_library_site(site))


def is_library_site(site: str) -> bool:
    """Return whether a call site is in a library that has rules."""
    return path_in_packages(site).startswith(_LIBRARIES_WITH_RULES)


def is_declared(patterns: Iterable[str], phase: str, *names: str) -> bool:
    """Return whether a shell pattern or a part of a name declares a call as the program's own."""
    return phase != "backward" and any(fnmatchcase(name, f"*{pattern}*") for pattern in patterns for name in names)


def path_in_packages(site: str) -> str:
    """Return a call site without its site-packages prefix, which may differ between ranks."""
    inner = site.partition(" < ")[0]
    return path_below_packages(inner) or inner


def sum_own_calls(rows: Iterable[OwnRow]) -> dict[OwnKey, OwnCalls]:
    """Sum calls by purpose, call site and operation."""
    sums: dict[OwnKey, OwnCalls] = {}
    for key, rank, calls, size in rows:
        before = sums.get(key, OwnCalls(0, 0, frozenset()))
        sums[key] = OwnCalls(before.calls + calls, before.payload_bytes + size, before.ranks | {rank})
    return sums
