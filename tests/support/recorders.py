"""The two recorders, and what docs/explanation/recorders.md says about them; tests expect exactly that."""

from __future__ import annotations

import functools
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest

from commtrace.errors import CommtraceError
from commtrace.schema import Clock, State

RECORDERS: Final = ("python", "native")
PAGE: Final = (Path(__file__).parents[2] / "docs" / "explanation" / "recorders.md").read_text()

CLOCKS: Final = {"return": Clock.RETURN, "wait": Clock.WAIT, "callback": Clock.FUTURE, "poll": Clock.TEST}
"""Clocks by the names that the page and the reports use."""

End = tuple[State, Clock]


@functools.cache
def obstacle() -> str:
    """Return why the native recorder cannot be used here; "" if it can. It is built in the user's cache."""
    from commtrace.hooks.native.libraries import TORCH

    try:
        TORCH.build()
        library()
    except (CommtraceError, ImportError) as error:
        return str(error)
    return ""


def built_for_mpi() -> Path:
    """Return the path of the native recorder of MPI. Skip the test without a compiler."""
    from commtrace.hooks.native.libraries import MPI

    try:
        return MPI.build()
    except CommtraceError as error:
        lacking(str(error))


def lacking(why: str) -> NoReturn:
    """Skip the test, which lacks a library in C++, if there is no compiler. With one, the library's code is wrong."""
    from commtrace.hooks.native.libraries import missing_compiler

    (pytest.skip if missing_compiler() else pytest.fail)(f"no native recorder: {why}")


@functools.cache
def library() -> Any:
    """Return the native recorder's library, loaded into this process."""
    from commtrace.hooks.native.libraries import TORCH

    return TORCH.load()


def needs(recorder: str) -> None:
    """Skip the test if this recorder cannot be used."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    if recorder == "native" and obstacle():
        lacking(obstacle())


def table(heading: str) -> list[list[str]]:
    """Return the cells of the page's table whose header begins with `heading`, without the header."""
    match = re.search(rf"^\| {re.escape(heading)} \|.*\n\|[- |]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert match, heading
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in match[1].splitlines()]


def _end(cell: str) -> End:
    state, _, clock = cell.rstrip(")").partition(" (")
    return State[state.upper()], CLOCKS[clock] if clock else Clock.NONE


ENDS: Final[dict[str, dict[str, End]]] = {
    what: dict(zip(RECORDERS, map(_end, cells), strict=True)) for what, *cells in table("a call on the host that")
}
"""What happens to a call -> recorder -> what its record says."""

WAITED: Final = "is waited for"
POLLED: Final = "is polled until it is complete"
FORGOTTEN: Final = "is waited for by C++ only (DDP's reducer), or is dropped without a wait"
KEPT: Final = "is kept, without a wait"
BLOCKS: Final = "blocks until it is complete"
REFUSED: Final = "raised an exception on entry"
FAILED: Final = "failed while it was waited for"
FAILED_AND_FORGOTTEN: Final = "failed, and is dropped without a wait"
NO_WORK: Final = "returns no Work"

FUTURELESS_POLLED: Final = "has no future, and is polled until it is complete"

_WITHOUT_FUTURE: Final = {
    WAITED: "has no future, and is waited for",
    POLLED: FUTURELESS_POLLED,
    FORGOTTEN: "has no future, and is dropped without a wait",
    KEPT: "has no future, and is kept, without a wait",
}


def _operators(rows: str) -> frozenset[str]:
    return frozenset(name for row in rows.splitlines() for name in names(row.split(" | ")[0]))


def names(text: str) -> list[str]:
    """Return the names in backquotes."""
    return re.findall(r"`(\w+)`", text)


FUTURELESS, BLOCKING = map(_operators, re.findall(r"^\| operator \|.*\n\|[- |]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE))
"""Operators whose Works have no future on gloo, and those that are complete when they return."""

DIFFERENT: Final[dict[str, set[str]]] = {}
"""Table (or `records`) -> keys that may differ between two logs of the same program."""
for _where, _what in table("where"):
    DIFFERENT.setdefault(_where.strip("`"), set()).update(names(_what))


def end(how: str, variant: str, recorder: str) -> End:
    """Return what a record says about the end of an operator's call on gloo to which `how` happened."""
    if variant in BLOCKING and how == WAITED:
        how = BLOCKS
    if variant in FUTURELESS:
        how = _WITHOUT_FUTURE.get(how, how)
    return ENDS[how][recorder]


def pairs(variant: str, *, gloo: bool = True) -> set[tuple[End, ...]]:
    """Return what the two records of a call may say, in the order of RECORDERS. `gloo`: whether Works have futures."""
    hows = {REFUSED, FAILED}
    if variant in BLOCKING:
        hows |= {BLOCKS}
    elif variant in FUTURELESS or not gloo:
        hows |= {*_WITHOUT_FUTURE.values()} | ({NO_WORK, WAITED} if not gloo else set())
    else:
        hows |= {WAITED, POLLED, FORGOTTEN, KEPT, FAILED_AND_FORGOTTEN}
    return {tuple(ENDS[how][recorder] for recorder in RECORDERS) for how in hows}
