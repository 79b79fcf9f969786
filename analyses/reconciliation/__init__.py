"""Measured against theory, cell by cell: what the captured job must communicate (`theory`), and what the log has.

Only processes that trained one model, of a scheme with rules, are compared; `theory` says which, and why not. Payload
is nccl-tests' size, in bytes; step -1 is start-up.

`theory`, a row per process: `rank`, `scheme`, `not_predicted` (the reason, else missing), `other_versions` (libraries
whose version is not the one that the rules were written from), then payload over all steps and start-up:
`expected_bytes`, `measured_bytes`, `matched_bytes` (calls found as expected), `named_bytes` and `unexplained_bytes`
(what was left over or missing, both counted as positive), `matched_share` (matched of measured).

`expected`, a row per `rank`, `step`, `role`, `op`: `calls`, `calls_max` (the most that could be made in another order
of modules and gradients, which the job does not say; missing where calls are certain), `payload_bytes` (exact in any
order; at the most where it depends on the data), `payload_bytes_min` (at the least; missing where bytes are certain).

`reconciliation`, rows per `rank`, `step`, `role`, `op`, `cause`: `expected_calls`, `measured_calls`, `expected_bytes`,
`measured_bytes`, `difference_bytes` (measured - expected), `cause`, `sites` (lines of code of the measured calls).
Calls are compared by message size, and where a role has groups of several sizes by that of the group as well; those
that are there as expected, or of a size within its bounds, have the cause "expected". The others are leftovers, with
the sentence of a cause (`causes.CAUSES`) or "unexplained". From step 64 on sizes are not compared, only calls and
bytes.

`waterfall`, `label`, `bytes`, `kind`: from the paper's closed form (equation 2 or 3 with the real number of
parameters, times the bytes of a parameter's element) to what was measured, for the last whole step of the lowest rank
that is compared. It is the wire volume that this rank must at least send (2S(d-1)/d for an all_reduce, S(d-1)/d for
others, `commtrace.volume`), as the closed form counts it. Kinds: "closed form" (the first row), "cause",
"unexplained", "measured" (the last row, the sum of all rows before it). Sums are exact; running sums are rounded to
whole bytes.

`waterfall_by_role`, the same with a `role` in front, where the closed form has parts of several roles: from each part
to what was measured in that role. Roles for which the paper has no formula begin at 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Final

import pandas as pd

from commtrace.analyses.engine import Analysis, NamedTables
from commtrace.reading.log import Process
from commtrace.reading.run import RecordedRun
from commtrace.reading.table_reader import integer_or_none
from commtrace.theory import ExpectedCall, NotPredictedError, Prediction, predict
from commtrace.theory.expected_calls import WaterfallBar, exact_wire_bytes
from commtrace.theory.rules.registry import DEEPSPEED, TORCH

from . import measured_calls
from .causes import UNEXPLAINED, Context, Leftover, explain

EXPECTED: Final = "expected"
BELOW: Final = "sizes that depend on the data: below their bound"
COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "theory": (
        "rank",
        "scheme",
        "not_predicted",
        "other_versions",
        "expected_bytes",
        "measured_bytes",
        "matched_bytes",
        "named_bytes",
        "unexplained_bytes",
        "matched_share",
    ),
    "expected": ("rank", "step", "role", "op", "calls", "calls_max", "payload_bytes", "payload_bytes_min"),
    "reconciliation": (
        "rank",
        "step",
        "role",
        "op",
        "expected_calls",
        "measured_calls",
        "expected_bytes",
        "measured_bytes",
        "difference_bytes",
        "cause",
        "sites",
    ),
    "waterfall": ("label", "bytes", "kind"),
    "waterfall_by_role": ("role", "label", "bytes", "kind"),
}

Key = tuple[str, str]  # role, operation
Wanted = dict[tuple[int, int], int]  # calls by payload and ranks; 0: however many the role's group has


@dataclass(frozen=True)
class Calls:
    """Measured calls that are alike, of one role and operation."""

    size: int
    calls: int
    bytes: int
    wire: Fraction | None
    phase: str
    site: str
    ranks: int = 0
    """Of their group."""


@dataclass(frozen=True)
class Cell:
    """One operation of one role, in one step of one rank: what matched, and what is left over, with its cause."""

    key: Key
    matched_calls: int
    matched_bytes: int
    sites: tuple[str, ...]
    leftovers: tuple[Leftover, ...]
    below: Fraction = Fraction(0)
    """Wire bytes of calls whose size was only bounded, less those of the most: 0 or below."""


def _finish(table: pd.DataFrame, run: RecordedRun, jobs: Sequence[Mapping[str, Any]] = ()) -> NamedTables:
    rows: dict[str, list[dict[str, object]]] = {name: [] for name in COLUMNS}
    last = int(max(table["step"], default=-1))
    measured_of = dict(iter(table.groupby("process")))
    for number, process in enumerate(run.processes):
        # Stages are of as many ranks each, and in the order of the ranks.
        job = jobs[process.rank * len(jobs) // (run.world_size or len(run.processes))] if jobs else None
        _process(process, measured_of.get(number, table.iloc[:0]), last, rows, job)
    return {name: _typed(pd.DataFrame(rows[name], columns=[*columns])) for name, columns in COLUMNS.items()}


def _typed(table: pd.DataFrame) -> pd.DataFrame:
    words = ("role", "op", "scheme", "not_predicted", "other_versions", "cause", "sites", "label", "kind")
    types: dict[str, Any] = {name: object if name in words else "Int64" for name in table.columns}
    sure = {"rank": "int64", "step": "int64", "bytes": "int64", "matched_share": "float64"}
    types |= {name: kind for name, kind in sure.items() if name in types}
    return table.astype(types)


def _process(
    process: Process, table: pd.DataFrame, last: int, rows: dict[str, list[Any]], given: Mapping[str, Any] | None
) -> None:
    """Append the rows of one process to `rows`, from its measured calls. `last`: the run's last step."""
    summary: dict[str, object] = {"rank": process.rank, "other_versions": _other_versions(process)}
    try:
        job = _job(process) if given is None else given
        prediction = predict(job)
    except NotPredictedError as reason:
        rows["theory"].append({**summary, "not_predicted": str(reason)})
        return
    found = steps_of(table)
    steps = range(-1, last + 1)
    own_last = max(found, default=-1)
    sums: dict[str, int] = defaultdict(int)
    for step in steps:
        context = Context(
            prediction, job, step, own_last, process.tables.end is not None, _lost(process), bool(found.get(step))
        )
        cells = compare(prediction.step(step), found.get(step, []), prediction.ranks_of)
        rows["expected"] += _expected(process.rank, step, prediction.step(step))
        rows["reconciliation"] += _rows(process.rank, step, cells, context, sums)
    measured_bytes = sum(calls.bytes for of_step in found.values() for _, calls in of_step)
    rows["theory"].append(
        {
            **summary,
            "scheme": prediction.scheme,
            "expected_bytes": sum(one.bytes for step in steps for one in prediction.step(step)),
            "measured_bytes": measured_bytes,
            "matched_bytes": sums[EXPECTED],
            "named_bytes": sum(size for cause, size in sums.items() if cause not in (EXPECTED, UNEXPLAINED)),
            "unexplained_bytes": sums[UNEXPLAINED],
            "matched_share": sums[EXPECTED] / measured_bytes if measured_bytes else None,
        }
    )
    if not rows["waterfall"]:
        parts = waterfall(process, job, prediction, found)
        rows["waterfall"] += parts[0]
        rows["waterfall_by_role"] += parts[1]


def _job(process: Process) -> Mapping[str, Any]:
    jobs = list(process.tables.jobs.values())
    if len(jobs) != 1:
        raise NotPredictedError(f"the process trained {len(jobs)} models" if jobs else "no job was captured")
    return jobs[0]


def _lost(process: Process) -> int:
    stats = process.tables.stats or {}
    return sum(integer_or_none(stats.get(name)) or 0 for name in ("dropped", "removed", "lost"))


def _other_versions(process: Process) -> str | None:
    known = process.tables.process.get("versions")
    versions = known if isinstance(known, Mapping) else {}
    other = [
        f"{name} {versions[name]} (rules: {version})"
        for name, version in (TORCH, DEEPSPEED)
        if name in versions and str(versions[name]).partition("+")[0] != version
    ]
    return ", ".join(other) or None


def steps_of(table: pd.DataFrame) -> dict[int, list[tuple[Key, Calls]]]:
    """The measured calls of one process by step."""
    found: dict[int, list[tuple[Key, Calls]]] = defaultdict(list)
    rows: Iterable[Any] = table.itertuples(index=False)
    for row in rows:
        wire = Fraction(int(row.wire_parts), int(row.ranks)) if row.ranks and not row.wire_unknown else None
        counts = int(row.size), int(row.calls), int(row.payload_bytes)
        calls = Calls(*counts, wire, str(row.phase), str(row.site), int(row.ranks))
        found[int(row.step)].append(((str(row.role), str(row.op)), calls))
    return found


# --- comparing ------------------------------------------------------------------------------------------------------


def compare(
    expected: Iterable[ExpectedCall], found: Iterable[tuple[Key, Calls]], ranks_of: Callable[[str], int]
) -> list[Cell]:
    """The cells of one step. `ranks_of`: the size of the group of a role."""
    wanted: dict[Key, Wanted] = defaultdict(lambda: defaultdict(int))
    least: dict[Key, dict[int, int]] = defaultdict(dict)
    for one in expected:
        wanted[one.role, one.op][one.payload, one.ranks or 0] += one.calls
        if one.least is not None:
            least[one.role, one.op][one.payload] = one.least
    there: dict[Key, list[Calls]] = defaultdict(list)
    for key, calls in found:
        there[key].append(calls)
    return [_cell(key, wanted[key], there[key], ranks_of(key[0]), least[key]) for key in sorted({*wanted, *there})]


def _cell(key: Key, wanted: Wanted, there: Sequence[Calls], ranks: int, least: Mapping[int, int]) -> Cell:
    """`ranks`: of the role's group; `least`: of sizes that are bounded only, by the most that they can be."""
    if any(calls.size < 0 for calls in there):
        return _cell_of_sums(key, wanted, there, ranks, least)
    missing = dict(wanted)
    below = Fraction(0)
    matched_calls = matched_bytes = 0
    sites, leftovers = [], []
    # A call of a framework's own line is sooner the expected one than one of the program's with the same size.
    for calls in sorted(there, key=lambda one: not one.site.startswith(("deepspeed/", "torch/"))):
        taken = 0
        for size, own in _alike(calls, wanted, least):
            some = min(calls.calls - taken, missing.get((size, own), 0))
            if some:
                missing[size, own] -= some
                taken += some
                below += some * _less(key[1], calls.size, size, own or ranks)
        if taken:
            matched_calls, matched_bytes = matched_calls + taken, matched_bytes + taken * calls.size
            sites.append(calls.site)
        if calls.calls > taken:
            leftovers.append(_extra(key, calls, calls.calls - taken))
    leftovers += [_missing(key, size, count, own or ranks) for (size, own), count in missing.items() if count]
    return Cell(key, matched_calls, matched_bytes, tuple(sites), tuple(leftovers), below)


def _alike(calls: Calls, wanted: Wanted, least: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """What these calls may be: of their size, sooner than of bounds that it is within."""
    yield calls.size, calls.ranks
    yield calls.size, 0
    for most, own in wanted:
        if most != calls.size and own in (0, calls.ranks) and least.get(most, most) <= calls.size <= most:
            yield most, own


def _less(op: str, size: int, most: int, ranks: int) -> Fraction:
    """Wire bytes of a call of this size, less those of the most: 0 or below."""
    return Fraction(0) if size == most else exact_wire_bytes(op, size, ranks) - exact_wire_bytes(op, most, ranks)


def _cell_of_sums(key: Key, wanted: Wanted, there: Sequence[Calls], ranks: int, least: Mapping[int, int]) -> Cell:
    most = sum(size * count for (size, _), count in wanted.items())
    low = sum(least.get(size, size) * count for (size, _), count in wanted.items())
    found = sum(one.bytes for one in there)
    if sum(one.calls for one in there) == sum(wanted.values()) and low <= found <= most:
        group = max((own or ranks for _, own in wanted), default=ranks)
        sites = tuple(one.site for one in there)
        return Cell(key, sum(wanted.values()), found, sites, (), _less(key[1], found, most, group))
    extras = [_extra(key, one, one.calls) for one in there]
    gone = [_missing(key, size, count, own or ranks) for (size, own), count in wanted.items() if count]
    return Cell(key, 0, 0, (), (*extras, *gone))


def _extra(key: Key, calls: Calls, count: int) -> Leftover:
    wire = Fraction(0) if calls.wire is None else calls.wire * count / calls.calls
    size = calls.bytes * count // calls.calls
    return Leftover(*key, calls.size, count, size, wire, calls.phase, calls.site)


def _missing(key: Key, size: int, count: int, ranks: int) -> Leftover:
    return Leftover(*key, size, -count, -count * size, -exact_wire_bytes(key[1], size, ranks) * count)


# --- tables ---------------------------------------------------------------------------------------------------------


def _expected(rank: int, step: int, messages: Iterable[ExpectedCall]) -> Iterator[dict[str, object]]:
    groups: dict[Key, list[ExpectedCall]] = defaultdict(list)
    for one in messages:
        groups[one.role, one.op].append(one)
    for (role, op), some in sorted(groups.items()):
        uncertain = any(one.most is not None for one in some)
        most = sum(one.calls if one.most is None else one.most for one in some)
        bounded = any(one.least is not None for one in some)
        least = sum(one.bytes if one.least is None else one.least * one.calls for one in some)
        yield {
            "rank": rank,
            "step": step,
            "role": role,
            "op": op,
            "calls": sum(one.calls for one in some),
            "calls_max": most if uncertain else None,
            "payload_bytes": sum(one.bytes for one in some),
            "payload_bytes_min": least if bounded else None,
        }


def _rows(
    rank: int, step: int, cells: Iterable[Cell], context: Context, sums: dict[str, int]
) -> Iterator[dict[str, object]]:
    everything = [one for cell in cells for one in cell.leftovers]
    causes: dict[tuple[Key, str], list[Leftover]] = defaultdict(list)
    for cause, leftover in explain(everything, context):
        causes[(leftover.role, leftover.op), cause].append(leftover)
        sums[cause] += abs(leftover.bytes)
    for cell in cells:
        sums[EXPECTED] += cell.matched_bytes
        both = (cell.matched_calls, cell.matched_calls, cell.matched_bytes, cell.matched_bytes)
        if cell.matched_calls:
            yield _row(rank, step, cell.key, both, EXPECTED, cell.sites)
    for (key, cause), some in causes.items():
        gone, extra = [one for one in some if one.calls < 0], [one for one in some if one.calls > 0]
        numbers = (
            -sum(one.calls for one in gone),
            sum(one.calls for one in extra),
            -sum(one.bytes for one in gone),
            sum(one.bytes for one in extra),
        )
        yield _row(rank, step, key, numbers, cause, [one.site for one in extra])


def _row(
    rank: int, step: int, key: Key, numbers: tuple[int, int, int, int], cause: str, sites: Iterable[str]
) -> dict[str, object]:
    role, op = key
    names = ("expected_calls", "measured_calls", "expected_bytes", "measured_bytes")
    return {
        "rank": rank,
        "step": step,
        "role": role,
        "op": op,
        **dict(zip(names, numbers, strict=True)),
        "difference_bytes": numbers[3] - numbers[2],
        "cause": cause,
        "sites": "; ".join(sorted({site for site in sites if site})),
    }


def waterfall(
    process: Process, job: Mapping[str, Any], prediction: Prediction, found: Mapping[int, list[tuple[Key, Calls]]]
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """The rows of one rank's last whole step, and those by role.

    None where no step is whole, or its wire bytes are not all known.
    """
    ended = process.tables.end is not None
    steps = [step for step in sorted(found) if step >= prediction.steady]
    whole_steps = steps if ended else steps[:-1]
    if not whole_steps or any(calls.wire is None for _, calls in found[whole_steps[-1]]):
        return [], []
    step = whole_steps[-1]
    cells = compare(prediction.step(step), found[step], prediction.ranks_of)
    context = Context(prediction, job, step, steps[-1], ended, _lost(process), seen=True)
    parts = [(bar.role, bar.label, bar.bytes, "cause") for bar in prediction.bars]
    for cause, leftover in explain([one for cell in cells for one in cell.leftovers], context):
        kind = UNEXPLAINED if cause == UNEXPLAINED else "cause"
        parts.append((leftover.role, cause, leftover.wire, kind))
    parts += [(cell.key[0], BELOW, cell.below, "cause") for cell in cells]
    totals: dict[str, Fraction] = defaultdict(Fraction)
    for (role, _), calls in found[step]:
        totals[role] += calls.wire or Fraction(0)
    label = f"measured, rank {process.rank}, step {step}"
    integer_or_none = _from_form_to_measured(
        prediction.closed_form, [part[1:] for part in parts], sum(totals.values(), Fraction(0)), label
    )
    return integer_or_none, [*_by_role(prediction, parts, totals, label)]


def _by_role(
    prediction: Prediction, parts: Sequence[tuple[str, str, Fraction, str]], totals: Mapping[str, Fraction], label: str
) -> Iterator[dict[str, object]]:
    """Nothing where the closed form is of one role."""
    forms = {form.role: form for form in prediction.forms}
    roles = [*forms, *sorted({role for role, *_ in parts} | {*totals} - {*forms})] if forms else []
    for role in dict.fromkeys(roles):
        form = forms.get(role, WaterfallBar("no closed form", Fraction(0), role))
        total = totals.get(role, Fraction(0))
        of_role = [part[1:] for part in parts if part[0] == role]
        if total or form.bytes or any(size for _, size, _ in of_role):
            yield from ({"role": role, **row} for row in _from_form_to_measured(form, of_role, total, label))


def _from_form_to_measured(
    form: WaterfallBar, parts: Sequence[tuple[str, Fraction, str]], total: Fraction, label: str
) -> list[dict[str, object]]:
    rest = total - form.bytes - sum(size for _, size, _ in parts)
    first = (form.label, form.bytes, "closed form")
    rows = _rounded([first, *_summed([*parts, (UNEXPLAINED, rest, UNEXPLAINED)])])
    return [*rows, {"label": label, "bytes": round(total), "kind": "measured"}]


def _summed(parts: Iterable[tuple[str, Fraction, str]]) -> list[tuple[str, Fraction, str]]:
    sums: dict[tuple[str, str], Fraction] = {}
    for label, size, kind in parts:
        sums[label, kind] = sums.get((label, kind), Fraction(0)) + size
    return [(label, size, kind) for (label, kind), size in sums.items() if size]


def _rounded(parts: Iterable[tuple[str, Fraction, str]]) -> list[dict[str, object]]:
    """Whole bytes: each bar leads from one rounded running sum to the next."""
    rows: list[dict[str, object]] = []
    before, running = 0, Fraction(0)
    for label, size, kind in parts:
        running += size
        rows.append({"label": label, "bytes": round(running) - before, "kind": kind})
        before = round(running)
    return rows


def _needed(run: RecordedRun) -> bool:
    """Some process tells of a model that it trained."""
    return any(process.tables.jobs for process in run.processes)


ANALYSIS: Final = Analysis("reconciliation", measured_calls.partial, measured_calls.merge, _finish, _needed)


def analysis_of(*jobs: Mapping[str, Any]) -> Analysis:
    """The same with a job row of one's own in place of those that were captured; of a pipeline one for each stage."""
    return Analysis("reconciliation", measured_calls.partial, measured_calls.merge, partial(_finish, jobs=jobs))
