"""Cuts steps of the thread that trains into torch's operators and what is between them, and times these pieces.

On a machine that others share, a step takes 5 to 10 % more or less from one to the next, a hundred times what
recording adds. But the code of a recorder runs in a few pieces only: in operators that communicate, and in those
between operators where a function of commtrace is called, which one turn shows that is not timed (`Steps.look`). What
runs between operators after such a piece takes longer, too: the way back, and what is not in the caches any more. All
other pieces are left out. Of each piece the median is taken in the steps of some rounds: in one call of many, the
thread that sends takes its core for a millisecond.

Times are of the thread's processor: neither what other threads take on its core, nor waiting, is part of them.
"""

from __future__ import annotations

import gc
import inspect
import pickle
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Pieces: TypeAlias = npt.NDArray[np.int64]
"""The pieces of a step in their order, 8 ns + `MARKED` + kind."""

Turns: TypeAlias = Sequence[Sequence[Pieces]]
"""The steps of each turn."""


class Kind(IntEnum):
    """What a piece of a step is."""

    OUTSIDE = 0
    """Outside of operators: Python, the autograd engine, and hooks."""
    COMPUTATION = 1
    COMMUNICATION = 2
    """An operator that communicates, until it returns, with what a recorder adds to it."""


MARKED: Final = 4
"""A function of commtrace has been called in the piece; only known where it is looked for."""


@cache
def native() -> Any:
    """Return the compiled part, which is built once for a version of torch."""
    from torch.utils.cpp_extension import load

    source = Path(__file__).with_name("operators.cpp")
    flags = ["-O2", "-DNDEBUG"]  # as torch is built: without it, its RecordFunction has another layout
    return load(name="commtrace_benchmark_operators", sources=[str(source)], extra_cflags=flags)


class Steps:
    """Keeps the pieces of steps of this thread."""

    def __init__(self) -> None:
        """Begin to cut steps."""
        native().begin()
        self._turns: list[list[bytes]] = []

    def look(self, replacements: Iterable[object]) -> None:
        """Mark pieces in which a function of commtrace is called from now on, which makes them longer.

        `replacements` are in the place of functions of libraries. Those that are not in Python are found by what they
        replace, or by themselves if Python's profiler sees them.
        """
        replaced = list(replacements)
        ids = {id(getattr(one, "__func__", one)) for one in replaced}
        codes = {_own_code(one) for one in replaced}
        mark = native().mark

        def profile(frame: FrameType, event: str, called: object) -> None:
            if event == "call":
                if frame.f_code in codes or frame.f_globals.get("__name__", "").startswith("commtrace."):
                    mark()
            elif event == "c_call" and id(called) in ids:
                mark()

        sys.setprofile(profile)

    def look_away(self) -> None:
        """Mark no more pieces."""
        sys.setprofile(None)

    def turn_begins(self) -> None:
        """Keep the steps that follow as another turn."""
        self._turns.append([])
        native().step_begins()

    def step_ended(self) -> None:
        """Keep the pieces of the step that ends here; another one begins."""
        self._turns[-1].append(native().step_ended())
        native().step_begins()

    def write(self, path: Path) -> None:
        """Write all turns to a file, for `read`."""
        path.write_bytes(pickle.dumps(self._turns))


def _own_code(function: Any) -> CodeType | None:
    """Return the code of a function, within wrappers, too; None if it is not in Python.

    A decorator's wrappers share their code, and some do not name what they wrap: that is then in their closure.
    """
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(function):
        return None
    code = function.__code__
    if sum(map(inspect.isfunction, gc.get_referrers(code))) < 2:
        return code
    within = (cell.cell_contents for cell in function.__closure__ or ())
    return next((_own_code(one) for one in within if inspect.isfunction(one)), code)


def read(path: Path) -> Turns:
    """Return the steps of each turn that have the most frequent sequence of kinds. Raise if that is a third of them.

    Steps have another sequence if they write a line, or if a buffer is used in each other step.
    """
    turns = [[np.frombuffer(step, np.int64) for step in turn] for turn in pickle.loads(path.read_bytes())]
    kinds = Counter(kinds_of(step).tobytes() for turn in turns for step in turn)
    (most, count), *_ = kinds.most_common(1)
    if count <= kinds.total() / 3:
        raise RuntimeError(f"of {kinds.total()} steps, only {count} have the same operators")
    return [[step for step in turn if kinds_of(step).tobytes() == most] for turn in turns]


def kinds_of(step: Pieces) -> Pieces:
    """Return the kind of each piece."""
    return step & 3


class Selected(NamedTuple):
    """The pieces of each step in which a recorder runs, of a rank."""

    calls: npt.NDArray[np.bool_]
    """Operators that communicate."""
    others: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, marked: Sequence[Pieces]) -> Selected:
        """Return those of the pieces of steps with marks."""
        kinds = kinds_of(marked[0])
        calls = kinds == Kind.COMMUNICATION
        runs = calls | np.any([step & MARKED for step in marked], axis=0)
        follows = np.roll(runs, 1) & (kinds == Kind.OUTSIDE)  # the first piece follows the last one of a step
        return cls(calls, (runs | follows) & ~calls)

    def times(self, steps: Sequence[Pieces]) -> tuple[float, float]:
        """Return the ms of both in a step: sums of each piece's median in these steps."""
        ms = 1e-6 * np.median([step >> 3 for step in steps], axis=0)
        return float(ms[self.calls].sum()), float(ms[self.others].sum())
