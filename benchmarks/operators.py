"""Times torch's operators that communicate, in the thread that trains, and may pad those that compute.

On a machine that others share, a computation takes 5 to 10 % more or less from one second to the next, a hundred times
what recording adds to a step. A padded operator waits, when it has been computed, until it has taken as long as nearly
all of its latest calls with arguments of these sizes. So its calls take the same time, and what is left of the step
varies less; nothing else is changed. Times are of the thread's processor: what another thread of the process takes on
its core is not hidden. What recording displaces from caches is hidden in the operators, and not outside of them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class Counters(NamedTuple):
    """Sums since the start of this thread."""

    communication_ns: int
    """Processor time in operators that communicate, which includes what a recorder adds to them."""
    communication_calls: int
    padding_ns: int


@cache
def native() -> Any:
    """Return the compiled part, which is built once for a version of torch."""
    from torch.utils.cpp_extension import load

    source = Path(__file__).with_name("operators.cpp")
    flags = ["-O2", "-DNDEBUG"]  # as torch is built: without it, its RecordFunction has another layout
    return load(name="commtrace_benchmark_operators", sources=[str(source)], extra_cflags=flags)


def begin(*, pads: bool) -> None:
    """Time the operators of this process from now on, and pad them once they are settled."""
    native().begin(pads)


def settle() -> None:
    """Take the lengths to which operators are padded from their latest calls."""
    native().settle()


def counters() -> Counters:
    """Return what this thread has counted."""
    return Counters(*native().counters())
