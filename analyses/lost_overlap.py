"""Overlap that a run has lost, compared with accepted runs of the same program (`check --overlap-as`).

Computation can hide an operation from its begin until the program waits for it. How much of a step's computation lies
between the two is a property of the program, whatever the network or other work on the machine do to the operation's
time: this share is compared. On devices, whose waits are not known, it is the computation that does hide the operation.

Steps vary, and neighbouring ones vary together, so each run is divided into PARTS of consecutive steps, whose medians
are compared. An operation, or its calls for one purpose, has lost overlap if

* the median over the parts is lower than that of the accepted runs, by a quarter of it at least,
* nearly all parts of the run are lower than nearly all of theirs,
* the difference exceeds MIN_DEVIATIONS times the deviation of their parts; or every part is lower than all of theirs,
  and the median is at most half: times on a busy machine deviate far, and still tell that nothing is hidden any more,
* what is exposed in addition may take MIN_SHARE of a step.

A single accepted run does not show how much equal runs differ: on a machine that others use, give several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from commtrace.formatting import format_share

from .analysed_run import AnalysedRun
from .grouping import Array
from .limits import LimitVerdict
from .overlap import overlap_by_step
from .robust_deviation import robust_deviation

PARTS: Final = 8
MIN_STEPS: Final = 2 * PARTS
"""Fewest steps of a run that is compared."""
MIN_AVAILABLE: Final = 0.02
"""Share of a step's computation that an operation has at least in the accepted runs, to have something to lose."""
MIN_DEVIATIONS: Final = 4.0
_QUARTERS: Final = (0.25, 0.75)
MIN_SHARE: Final = 0.01

WHOLE: Final = ""
"""In place of a purpose: all calls of an operation."""

_Key: TypeAlias = tuple[str, str]
"""Operation, and purpose or WHOLE."""


class _Overlap(NamedTuple):
    """Overlap of an operation for a purpose: medians of the parts of runs, each of shape (parts,)."""

    available: Array
    """Share of the computation that could hide it."""
    hidden: Array
    """Share of its communication that is hidden."""
    communication_ns: Array
    computation_ns: Array
    step_ns: Array


def compare_overlap(run: AnalysedRun, accepted: Mapping[str, AnalysedRun]) -> Iterator[LimitVerdict]:
    """Yield whether each operation keeps the overlap that it has in accepted runs, and purposes that do not.

    Args:
        run: The run.
        accepted: One or more accepted runs by the names in texts. With several, their differences count as noise.
    """
    names = ", ".join(accepted)
    others = {name: _by_part(other) for name, other in accepted.items()}
    own = _by_part(run)
    if unknown := [name for name, parts in others.items() if not parts] + ["this run"] * (not own):
        yield LimitVerdict(
            None, f"not compared: overlap is known in fewer than {MIN_STEPS} steps of {' and '.join(unknown)}"
        )
        return
    before = {
        key: _pooled([parts[key] for parts in others.values() if key in parts])
        for key in dict.fromkeys(key for parts in others.values() for key in parts)
    }
    hidden = {key: parts for key, parts in before.items() if np.median(parts.available) >= MIN_AVAILABLE}
    if not hidden:
        yield LimitVerdict(True, f"as accepted: computation hides no operation in {names}")
    for op in sorted({op for op, _ in hidden}):
        if (op, WHOLE) not in own:
            yield LimitVerdict(None, f"not compared: {op} is not in the steps of this run, but in {names}")
            continue
        keys = sorted(key for key in hidden if key[0] == op and key in own)  # WHOLE comes first
        of_all, *of_purposes = (_verdict(key, own[key], hidden[key], names) for key in keys)
        yield of_all
        if of_all.is_kept:
            yield from (verdict for verdict in of_purposes if not verdict.is_kept)


def _pooled(parts: Sequence[_Overlap]) -> _Overlap:
    return _Overlap(*map(np.concatenate, zip(*parts, strict=True)))


def _verdict(key: _Key, own: _Overlap, before: _Overlap, names: str) -> LimitVerdict:
    now, then = (float(np.median(overlap.available)) for overlap in (own, before))
    loss = then - now
    deviation = float(robust_deviation(before.available))
    is_clear = loss > MIN_DEVIATIONS * deviation or (now <= then / 2 and own.available.max() < before.available.min())
    not_hidden_ns = min(loss * float(np.median(own.computation_ns)), float(np.median(own.communication_ns)))
    is_lost = (
        loss >= then / 4
        and is_clear
        and np.quantile(own.available, _QUARTERS[1]) < np.quantile(before.available, _QUARTERS[0])
        and not_hidden_ns > MIN_SHARE * float(np.median(own.step_ns))
    )
    hidden = [format_share(float(np.median(overlap.hidden))) for overlap in (own, before)]
    text = (
        f"{_named(key)}: {format_share(now)} of the computation can hide it, and {format_share(then)} in {names} "
        f"({hidden[0]} and {hidden[1]} of its time are hidden)"
    )
    return LimitVerdict(not is_lost, f"{'lost overlap' if is_lost else 'as accepted'}: {text}")


def _named(key: _Key) -> str:
    op, purpose = key
    return f"{op} ({purpose})" if purpose else op


def _by_part(run: AnalysedRun) -> dict[_Key, _Overlap]:
    """Return the overlap of each operation, and of each of its purposes, that is in most steps of all parts."""
    table = overlap_by_step(run)
    table = table[table["communication_ns"] > 0]
    steps = np.unique(table["step"].to_numpy(np.int64))
    if len(steps) < MIN_STEPS:
        return {}
    of_step = dict.fromkeys(("step_ns", "computation_ns"), "max")
    of_calls = dict.fromkeys(("communication_ns", "hidden_ns", "available_ns"), "sum")
    by_operation = table.groupby(["step", "op"], as_index=False).agg({**of_step, **of_calls})
    rows = pd.concat([by_operation.assign(purpose=WHOLE), table], ignore_index=True)
    rows["available"] = (rows["available_ns"] / rows["computation_ns"].where(rows["computation_ns"] > 0)).astype(float)
    rows["hidden"] = (rows["hidden_ns"] / rows["communication_ns"]).astype(float)
    rows["part"] = np.searchsorted(steps, rows["step"].to_numpy(np.int64)) * PARTS // len(steps)
    found: dict[_Key, _Overlap] = {}
    for (op, purpose), own in rows.groupby(["op", "purpose"]):
        medians = own.groupby("part")[[*_Overlap._fields]].median()
        if len(medians) == PARTS and len(own) * 2 >= len(steps):
            found[str(op), str(purpose)] = _Overlap(*(medians[name].to_numpy(float) for name in medians.columns))
    return found
