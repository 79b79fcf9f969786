"""The typical step of a rank by purpose and by place, beside closed forms.

A rank's typical step is its most frequent one without activities such as checkpoints, neither in it nor in the step
before, and not the first step of the training, in which libraries set up what they need. Numbers are means over ranks.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd

from commtrace.analyses.fold_engine import NamedTables
from commtrace.analyses.sections import Block, Paragraph, Report, ShownTable, first_of
from commtrace.analyses.table_specs import shared_columns as shared
from commtrace.analyses.table_specs.spec import TableSpec, bytes_column, column, count, text_column
from commtrace.formatting import format_bytes, format_count, format_signed, is_known
from commtrace.reading.labels import NOT_RECORDED
from commtrace.reading.process_reader import Process
from commtrace.schema import ACTIVITIES, OWN_PURPOSES, Purpose
from commtrace.theory import NotPredictedError
from commtrace.theory.activation_forms import TensorPlan, activation_forms, plans_of
from commtrace.theory.expert_forms import RoutedSteps, Routing, expert_forms
from commtrace.theory.purpose_forms import PurposeForm, purpose_forms, stage_forms

from .call_keys import UNKNOWN
from .own_calls import EVALUATION, is_activity
from .run_calls import NO_CALLS, RankCalls, StepCalls

_NUMBERS: Final = (
    count("calls", "calls", "Calls of a rank in its typical step."),
    bytes_column("payload_bytes", "payload", "Their payload; missing if that of some is not known."),
    count("expected_calls", "closed form", "Calls by the closed form; missing without one.", optional=True),
    bytes_column("expected_bytes", "payload of the form", "Payload by the closed form; missing without one."),
    column("bytes", lambda value: format_signed(value, format_bytes) if is_known(value) else "-", "difference_bytes",
        "difference", "payload_bytes - expected_bytes; missing without a closed form."),
    text_column("formula", "formula", "The closed form."),
    text_column("reason", "reason", "Why the step differs from the closed form, or why there is none.",
        shortenable=True, optional=True),
)  # fmt: skip
_PURPOSE: Final = text_column("purpose", "purpose", "Why the library made the calls, as recorded.", shortenable=True)
_PLACE: Final = text_column("place", "place", "Module or unit, with placements; bucket; stage.", shortenable=True)
_SHOWN: Final = "calls payload_bytes expected_calls difference_bytes reason"

STEP_BY_PURPOSE: Final = TableSpec("step_by_purpose", "Typical step of a rank, beside the closed form",
    "A row per purpose, dimension and operation, the largest payload first; means over ranks.", (
    _PURPOSE, shared.ROLE, shared.OP, *_NUMBERS,
), {"terminal": f"purpose role op {_SHOWN}", "page": f"purpose role op {_SHOWN}"})  # fmt: skip
STEP_BY_PLACE: Final = TableSpec("step_by_place", "The same by module, unit, bucket or stage",
    "A row per purpose, dimension, operation and place; means over ranks.", (
    _PURPOSE, shared.ROLE, shared.OP, _PLACE, *_NUMBERS,
), {"terminal": f"purpose op place {_SHOWN}", "page": f"purpose op place {_SHOWN}"})  # fmt: skip

_ANY_ROLE: Final = ("world", "unknown")
"""Dimensions of groups whose dimension is not known."""
_MAX_PLACES: Final = 3
_NO_FORM: Final = "no closed form: "
_OUTSIDE_TRAINING: Final = frozenset(purpose.value for purpose in (*ACTIVITIES, *OWN_PURPOSES))
_OF_ACTIVATIONS: Final = frozenset(
    purpose.value
    for purpose in (
        *(Purpose.ACTIVATIONS, Purpose.ACTIVATIONS_RECOMPUTED, Purpose.ACTIVATION_GRADIENTS, Purpose.LOSS),
        *(Purpose.PIPELINE_ACTIVATIONS, Purpose.PIPELINE_GRADIENTS, Purpose.EXPERT_TOKENS, Purpose.EXPERT_COUNTS),
        *(Purpose.EXPERT_DISPATCH, Purpose.EXPERT_COMBINE, Purpose.EXPERT_GRADIENTS, Purpose.BATCH_STATISTICS),
        *(Purpose.ATTENTION, Purpose.ATTENTION_GRADIENTS),
    )
)
_OF_PLANS: Final = (Purpose.ACTIVATIONS.value, Purpose.ACTIVATION_GRADIENTS.value)
_AFTER_EVALUATION: Final = "each step follows an evaluation, which may have left parameters gathered"
_SIZES_UNKNOWN: Final = "the sizes of activations are not in the job; `commtrace check DIR --dryrun -- CMD` has them"
_NOT_PLANNED: Final = "no module of the tensor-parallel plan makes such calls"


class _Key(NamedTuple):
    purpose: str
    role: str
    op: str
    place: str = ""


@dataclass
class _Volume:
    """Calls and payload of a step, recorded and by the closed form."""

    calls: float = 0
    size: float = 0
    is_size_known: bool = True
    expected_calls: float | None = None
    expected_size: float = 0
    formula: str = ""
    reasons: dict[str, None] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        """Whether the recorded step differs from the closed form."""
        differs = (self.calls, self.size) != (self.expected_calls, self.expected_size)
        return self.expected_calls is not None and self.is_size_known and differs

    def expect(self, calls: float, size: float, formula: str) -> None:
        """Add calls of a closed form."""
        self.expected_calls = (self.expected_calls or 0) + calls
        self.expected_size += size
        self.formula = formula


_Volumes = dict[_Key, _Volume]
_Rows = Sequence[Mapping[str, Any]]


def tables(
    contents: Sequence[StepCalls], ranks: Sequence[tuple[Process, RankCalls]], jobs: Sequence[Mapping[str, Any]] = ()
) -> NamedTables:
    """Return the tables STEP_BY_PURPOSE and STEP_BY_PLACE.

    Args:
        contents: The distinct steps of the run.
        ranks: The processes, and the calls of each by step.
        jobs: Job rows of all ranks in place of the captured ones.
    """
    equal: Counter[tuple[_TypicalStep, int, Routing]] = Counter()  # ranks by typical step and closed forms
    known: list[tuple[_Rows, _Rows]] = []
    activities = [*map(_Activities.of, contents)]
    for process, calls in ranks:
        routed = RoutedSteps(process.tables.experts, process.tables.routing)
        step = _typical_step(calls, contents, activities, routed.end) or _typical_step(calls, contents, activities)
        if step is None:
            continue
        of_process = jobs or [*process.tables.jobs.values()], [*process.tables.stages.values()]
        if of_process not in known:
            known.append(of_process)
        equal[step, known.index(of_process), routed.at(_number(calls, step))] += 1
    forms = [_forms(*rows) for rows in known]
    by_place: _Volumes = {}
    by_purpose: _Volumes = {}
    for (step, job, routing), number in equal.items():
        places, purposes = _compare(contents[step.content], forms[job], routing)
        if step.follows_evaluation and any(volume.differs for volume in (*places.values(), *purposes.values())):
            places, purposes = _compare(contents[step.content], _Forms([], _AFTER_EVALUATION), routing)
        _add(by_place, places, number)
        _add(by_purpose, purposes, number)
    total = equal.total()
    return {
        "step_by_purpose": _table(STEP_BY_PURPOSE, by_purpose, total),
        "step_by_place": _table(STEP_BY_PLACE, {key: at for key, at in by_place.items() if key.place}, total),
    }


class _TypicalStep(NamedTuple):
    """A rank's most frequent training step, the index of it in the distinct steps of the run."""

    content: int
    follows_evaluation: bool
    """Whether every such step follows an evaluation, which may have left parameters gathered for it."""


class _Activities(NamedTuple):
    """Whether a step has an activity among its training calls, an evaluation, and training calls at all."""

    among_training: bool
    evaluation: bool
    others: bool

    @property
    def any(self) -> bool:
        """Whether it has any activity."""
        return self.among_training or self.evaluation

    @staticmethod
    def of(step: StepCalls) -> _Activities:
        return _Activities(
            any(is_activity(equal.purpose, equal.key.phase) for equal in step.calls if equal.key.phase != EVALUATION),
            any(equal.key.phase == EVALUATION for equal in step.calls),
            any(equal.key.phase != EVALUATION for equal in step.calls),
        )


class _Against(NamedTuple):
    """What is against taking a step for the typical one, the worst first."""

    among_training: bool
    is_first: bool
    follows_evaluation: bool
    own: bool
    before: bool

    @staticmethod
    def of(own: _Activities, before: _Activities, *, is_first: bool = False) -> _Against:
        """Return it for a step with these activities, after a step with those."""
        return _Against(own.among_training, is_first, before.evaluation, own.any, before.any)


def _typical_step(
    calls: RankCalls, contents: Sequence[StepCalls], activities: Sequence[_Activities], end: int | None = None
) -> _TypicalStep | None:
    """Return a rank's most frequent training step, before `end` if there are facts only of these; None without any.

    It is not the first one and has no activities, nor has the step before it, if there is such a step. Of several, it
    is the latest, or if these are many, the one with the median payload. A step that was cut off by the end of the
    process does not count.
    """
    last = calls.last_step + calls.ended
    begins = np.maximum(calls.first, 0)
    last = last if end is None else min(last, end)
    ends = np.minimum(np.append(begins[1:], calls.last_step + 1), last)[: len(begins)]
    lengths: dict[_Against, Counter[int]] = defaultdict(Counter)
    before = _Activities.of(NO_CALLS)
    for content, begin, length in zip(calls.content.tolist(), begins.tolist(), (ends - begins).tolist(), strict=True):
        own = activities[content]
        if own.others and length > 0:
            _add_last(lengths[_Against.of(own, before, is_first=begin == 0)], content, 1)
            if length > 1:
                _add_last(lengths[_Against.of(own, own)], content, length - 1)
        before = own
    if not lengths:
        return None
    against = min(lengths)
    frequent = lengths[against]
    most = max(frequent.values())
    candidates = [content for content, length in frequent.items() if length == most]
    if len(candidates) > 2:
        candidates.sort(key=lambda content: contents[content].volume[1])
        return _TypicalStep(candidates[len(candidates) // 2], against.follows_evaluation)
    return _TypicalStep(candidates[-1], against.follows_evaluation)


def _number(calls: RankCalls, step: _TypicalStep) -> int:
    """Return the number of the first step of a rank that equals its typical one."""
    return max(0, int(calls.first[calls.content == step.content][0]))


def _add_last(lengths: Counter[int], content: int, length: int) -> None:
    """Add to a content's length, and make it the last one."""
    lengths[content] = lengths.pop(content, 0) + length


class _Forms(NamedTuple):
    """Closed forms of a process: those of each step, why there are no other ones, and plans, which have more."""

    of_steps: list[PurposeForm]
    problem: str = ""
    plans: tuple[TensorPlan, ...] = ()

    def of(self, places: _Volumes, routing: Routing) -> list[PurposeForm]:
        """Return the closed forms of a step with these volumes by place, and these tokens for experts."""
        recorded = {(key.purpose, key.op, key.place): (volume.calls, volume.size) for key, volume in places.items()}
        of_plans = (form for plan in self.plans for form in activation_forms(plan, recorded))
        return [*self.of_steps, *of_plans, *expert_forms(routing)]


def _forms(jobs: _Rows, stages: _Rows) -> _Forms:
    """Return the closed forms of the jobs of a process and of its stages."""
    of_stages: list[PurposeForm] = []
    plans = plans_of(jobs)
    try:
        of_stages = stage_forms(stages)
        return _Forms([*purpose_forms(jobs), *of_stages], "", plans)
    except NotPredictedError as reason:
        (problem,) = map(str, reason.args)
    return _Forms(of_stages, problem, plans)


def _compare(step: StepCalls, process_forms: _Forms, routing: Routing) -> tuple[_Volumes, _Volumes]:
    """Return the volumes of a step by place and by purpose, beside closed forms."""
    places: _Volumes = defaultdict(_Volume)
    for calls in step.calls:
        if calls.key.phase != EVALUATION:
            volume = places[_Key(calls.purpose, calls.key.role, calls.key.op, calls.place)]
            volume.calls += calls.calls
            volume.size += calls.bytes
            volume.is_size_known &= calls.key.payload != UNKNOWN
    forms, problem = process_forms.of(places, routing), process_forms.problem
    purposes: _Volumes = defaultdict(_Volume)
    for key, volume in places.items():
        total = purposes[key._replace(place="")]
        total.calls, total.size = total.calls + volume.calls, total.size + volume.size
        total.is_size_known &= volume.is_size_known
    for form in forms:
        _expect(places if form.place else purposes, form)
    for key, volume in places.items():
        if volume.expected_calls is not None:
            purposes[key._replace(place="")].expect(volume.expected_calls, volume.expected_size, volume.formula)
    with_forms = {(purpose.value, form.role, form.op) for form in forms if form.place for purpose in form.purposes}
    for key, volume in places.items():
        if volume.expected_calls is None and key[:3] in with_forms:
            volume.expect(0, 0, "")
    differing: dict[_Key, list[tuple[str, _Volume]]] = defaultdict(list)
    for key, volume in places.items():
        if volume.differs:
            unplanned = not volume.expected_calls and key.purpose in _OF_PLANS
            volume.reasons = {_NOT_PLANNED if unplanned else _reason(volume): None}
            differing[key._replace(place="")].append((key.place, volume))
    for key, volume in purposes.items():
        if volume.expected_calls is None and key.purpose not in _OUTSIDE_TRAINING | {NOT_RECORDED}:
            text = problem or (_SIZES_UNKNOWN if key.purpose in _OF_ACTIVATIONS else "")
            volume.reasons = {_NO_FORM + text: None} if text else {}
        elif differing[key]:
            volume.reasons = {_places(differing[key]): None}
        elif volume.differs:
            volume.reasons = {_reason(volume): None}
    return places, purposes


def _expect(volumes: _Volumes, form: PurposeForm) -> None:
    """Add the calls of a form to those of its purposes; the last one that has calls gets what is left."""
    keys = [
        key
        for purpose in form.purposes
        for key in [*volumes]
        if (key.purpose, key.op) == (purpose.value, form.op)
        and key.place in ("", form.place)
        and key.role in (form.role, *_ANY_ROLE)
    ]
    if not keys and form.is_optional:
        return
    keys = keys or [_Key(form.purposes[0].value, form.role, form.op, form.place if _has_places(volumes) else "")]
    calls, size = form.calls, form.payload_bytes
    for key in keys[:-1]:
        volume = volumes[key]
        taken = min(calls, int(volume.calls - (volume.expected_calls or 0)))
        taken_size = min(size, int(volume.size - volume.expected_size))
        volume.expect(taken, taken_size, form.formula)
        calls, size = calls - taken, size - taken_size
    volumes[keys[-1]].expect(calls, size, form.formula)


def _has_places(volumes: _Volumes) -> bool:
    return any(key.place for key in volumes)


def _reason(volume: _Volume) -> str:
    """Return how the recorded calls differ from the closed form."""
    calls, expected = volume.calls, volume.expected_calls or 0
    if not calls:
        return "not called: the module did not run, or it had nothing to communicate"
    if not expected:
        return "the closed form has no such calls"
    same_size = volume.size * expected == volume.expected_size * calls
    times = f"{calls:,.10g} calls for {expected:,.10g}"
    if same_size:
        return f"{times} of the same size: the module runs, or its gradients are reduced, another number of times"
    return "as many calls, of another size" if calls == expected else f"{times}, of other sizes"


def _places(differing: Sequence[tuple[str, _Volume]]) -> str:
    """Return the places that differ, the largest difference first."""
    ordered = sorted(differing, key=lambda item: abs(item[1].size - item[1].expected_size), reverse=True)
    texts = [
        f"{place}: {format_signed(volume.calls - (volume.expected_calls or 0), format_count)} calls, "
        f"{format_signed(volume.size - volume.expected_size, format_bytes)}"
        for place, volume in ordered[:_MAX_PLACES]
    ]
    return "; ".join([*texts, *([f"and {len(ordered) - _MAX_PLACES:,} more"] if len(ordered) > _MAX_PLACES else [])])


def _add(sums: _Volumes, volumes: _Volumes, times: int) -> None:
    for key, volume in volumes.items():
        total = sums.setdefault(key, _Volume())
        total.calls += volume.calls * times
        total.size += volume.size * times
        total.is_size_known &= volume.is_size_known
        total.reasons |= volume.reasons
        if volume.expected_calls is not None:
            total.expect(volume.expected_calls * times, volume.expected_size * times, volume.formula)


def _table(spec: TableSpec, volumes: _Volumes, ranks: int) -> pd.DataFrame:
    rows = [
        {
            **key._asdict(),
            "calls": volume.calls / ranks,
            "payload_bytes": volume.size / ranks if volume.is_size_known else None,
            "expected_calls": None if volume.expected_calls is None else volume.expected_calls / ranks,
            "expected_bytes": None if volume.expected_calls is None else volume.expected_size / ranks,
            "difference_bytes": (
                (volume.size - volume.expected_size) / ranks
                if volume.expected_calls is not None and volume.is_size_known
                else None
            ),
            "formula": volume.formula,
            "reason": "; ".join(volume.reasons),
        }
        for key, volume in sorted(volumes.items(), key=lambda item: (-item[1].size, item[0]))
    ]
    types = {shown.name: "float64" if shown.kind == "number" else object for shown in spec.columns}
    return pd.DataFrame(rows, columns=[*types]).astype(types)


# ---- showing ---------------------------------------------------------------------------------------------------------


def show(report: Report) -> Iterator[Block]:
    """Yield the table by purpose if there is a closed form, and by place what differs or was chosen."""
    purposes, places = report.tables["step_by_purpose"], report.tables["step_by_place"]
    if not len(purposes) or not (purposes["purpose"] != NOT_RECORDED).any():
        return
    without_form = purposes["reason"].str.startswith(_NO_FORM)
    shown = purposes.assign(reason=purposes["reason"].mask(without_form, "no closed form"))
    yield ShownTable(STEP_BY_PURPOSE, shown, STEP_BY_PURPOSE.title)
    reasons = purposes.loc[without_form].groupby("reason")["purpose"].unique()
    for reason, names in reasons.items():
        text = str(reason).removeprefix(_NO_FORM)
        yield Paragraph(f"No closed form of {', '.join(names)}: {text}.")
    rows = _merged_places(places)
    if len(rows):
        first = rows.head(report.max_rows)
        yield ShownTable(STEP_BY_PLACE, first, STEP_BY_PLACE.title + first_of(len(first), len(rows)))


def _merged_places(places: pd.DataFrame) -> pd.DataFrame:
    """Merge equal rows of modules that differ in numbers: "layers.*.attention (32)"."""
    numbered = places.assign(pattern=[re.sub(r"(?<=\.)\d+(?=\.|,|$)", "*", str(place)) for place in places["place"]])
    keys = ["purpose", "role", "op", "pattern", "calls", "payload_bytes", "expected_calls", "expected_bytes", "reason"]
    groups = numbered.groupby(keys, sort=False, dropna=False)
    first, sizes = groups.head(1).copy(), groups.ngroup()
    counts = sizes.value_counts()
    number = counts.loc[sizes.loc[first.index]].to_numpy()
    first["place"] = [
        f"{pattern} ({times:,})" if times > 1 else place
        for place, pattern, times in zip(first["place"], first["pattern"], number, strict=True)
    ]
    differs = first["difference_bytes"].fillna(0).abs() > 0
    order = np.lexsort((np.arange(len(first)), ~differs))
    return first.iloc[order].drop(columns="pattern")
