"""Breaking any rule, or hiding any call, shows: the reconciliation is no longer clean."""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("yaml")

import pipelines
import sequence_trainings
import sharding
import trainings
from broken_rules import OF_EVALUATIONS, break_rule
from record_blocks import block_of

from commtrace.analyses.reconciliation import measured_calls as measured
from commtrace.analyses.reconciliation.matching import compare
from commtrace.analyses.reconciliation.measured_calls import EqualCalls
from commtrace.run import Run
from commtrace.schema import Records
from commtrace.theory import NotPredictedError, predict
from commtrace.theory.rules.registry import DEEPSPEED, GPT_NEOX, RULES, TORCH, WORKLOAD, Rule

pytestmark = trainings.TIMEOUT

Steps = dict[int, list[EqualCalls]]


def measured_steps(run: Run, records: Records, rank: int = 0) -> Steps:
    """Calls of one rank by step."""
    table = measured.merge([measured.partial(block_of(run, records, rank))])
    texts = {name: run.labels.distinct(name)[table[name]] for name in ("role", "op", "phase", "site")}
    table = table.assign(**texts)
    own = measured.measured_steps(table, len(run.processes))
    steps = np.arange(-1, measured.last_steps(table, len(run.processes))[rank] + 1)
    calls = {step: [*own.calls[at]] for step, at in zip(steps.tolist(), own.of(rank, steps).tolist(), strict=True)}
    return {step: of_step for step, of_step in calls.items() if of_step}


def records_of(run: Run, rank: int = 0) -> Records:
    """All records of one rank."""
    assert run.processes[rank].rank == rank
    return np.concatenate([block for segment in run.processes[rank].segments for block in segment.blocks()])


class Family(NamedTuple):
    """Trainings of one start."""

    wanted: dict[str, dict[str, Any]]
    runs: Callable[[], Mapping[str, Run]]
    ranks: int


FAMILIES = (
    Family(trainings.VARIANTS, trainings.variants, 3),
    Family(trainings.SHARED, trainings.shared, 4),
    Family(sharding.SHARDED, sharding.sharded, sharding.RANKS),
    Family(sequence_trainings.FIXED, sequence_trainings.runs, sequence_trainings.RANKS),
)


def family(name: str) -> Family:
    """The one that a training is in."""
    return next(one for one in FAMILIES if name in one.wanted)


@functools.cache
def known(name: str) -> tuple[dict[str, Any], Steps]:
    """The job of a variant, and what rank 0 communicated."""
    run = family(name).runs()[name]
    assert run.job is not None
    return run.job, measured_steps(run, records_of(run))


@functools.cache
def known_stage(name: str, stage: int) -> tuple[dict[str, Any], Steps]:
    """The job of a stage of a pipeline, and what its first rank communicated."""
    run = pipelines.run(name)
    rank = stage * len(run.ranks) // stages_of(name)
    (job,) = run.processes[rank].tables.jobs.values()
    return job, measured_steps(run, records_of(run, rank), rank)


def stages_of(name: str) -> int:
    """Of a pipeline."""
    return int(pipelines.WANTED[pipelines.NAMES[name]][name]["model"]["pipe_parallel_size"])


STAGED = [name for name in pipelines.STAGED if pipelines.NAMES[name] < 8 and not name.startswith("drawn")]


def pipeline_is_clean(name: str) -> bool:
    """Whether theory says what each stage communicated."""
    return all(is_clean(*known_stage(name, stage)) for stage in range(stages_of(name)))


def pipeline_is_clean_as_described(name: str) -> bool:
    """The same from the configuration alone."""
    ranks = pipelines.NAMES[name]
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows = pipelines.described(pipelines.WANTED[ranks][name], ranks, Path(folder))
        except NotPredictedError:
            return False
    return all(is_clean(row, known_stage(name, stage)[1]) for stage, row in enumerate(rows))


NAMES = [name for one in FAMILIES for name in one.wanted]
CONFIGURED = [name for one in FAMILIES for name, wanted in one.wanted.items() if "model" in wanted]


def is_clean_as_described(name: str) -> bool:
    """Whether theory says what was measured, from the configuration alone."""
    of = family(name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            row = trainings.described(of.wanted[name], of.ranks, Path(folder))
        except NotPredictedError:
            return False
    return is_clean(row, known(name)[1])


def is_clean(job: dict[str, Any], steps: Steps) -> bool:
    """Whether theory says exactly what was measured."""
    try:
        prediction = predict(job)
    except NotPredictedError:
        return False
    cells = [
        cell
        for step in {-1, *steps}
        for cell in compare(prediction.step(step), steps.get(step, []), prediction.ranks_of)
    ]
    return not any(cell.unmatched for cell in cells)


def names(rule: Rule) -> str:
    return f"{rule.module.rpartition('.')[2]}.{rule.name}"


def of_gpt_neox_alone(rule: Rule) -> bool:
    """Whether only GPT-NeoX's own program makes its calls: tests/unit/theory/rules/test_gpt_neox.py breaks it."""
    functions = ("norm_gradients", "embedding_all_reduce", "segment_all_gathers", "recomputed_segments", "saved_state")
    modules = ("megatron.gpt_neox", "megatron.sequential_model", "gpt_neox.program_modules")
    return rule.module.endswith(modules) or rule.name in functions


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if not (of_gpt_neox_alone(rule) or rule.name in OF_EVALUATIONS)], ids=names
)
def test_a_wrong_rule_shows(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(rule, monkeypatch)
    checks: list[tuple[list[str], Callable[[str], bool]]] = [
        (NAMES, lambda name: is_clean(*known(name))),
        (CONFIGURED, is_clean_as_described),
        (STAGED, pipeline_is_clean_as_described),
        (STAGED, pipeline_is_clean),
    ]
    if "pipeline" in rule.module:
        checks.reverse()  # where it shows first
    assert not all(clean(name) for some, clean in checks for name in some)


@pytest.mark.exhaustive
def test_with_the_right_rules_all_is_clean() -> None:
    assert [name for name in NAMES if not is_clean(*known(name))] == []
    assert [name for name in CONFIGURED if not is_clean_as_described(name)] == []
    assert [name for name in STAGED if not pipeline_is_clean(name)] == []
    assert [name for name in STAGED if not pipeline_is_clean_as_described(name)] == []


def test_every_rule_names_a_function_and_a_version() -> None:
    assert len({(rule.module, rule.name) for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert (rule.library, rule.version) in (TORCH, DEEPSPEED, GPT_NEOX, WORKLOAD)
        assert rule.mirrors.startswith(("torch", "deepspeed", "megatron", "examples.gpt_neox"))


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.library == "deepspeed"], ids=names)
def test_the_functions_that_deepspeed_s_rules_mirror_exist(rule: Rule) -> None:
    """In the installed version: a function that is gone has taken its rule's ground with it."""
    where = ""
    for part in rule.mirrors.replace(";", ",").split(","):
        name = part.strip().partition(" (")[0]
        where = name.rpartition(".")[0] if "." in name else where
        assert exists(name if "." in name else f"{where}.{name}"), name


def exists(dotted: str) -> bool:
    """Whether a module has it. What is nested in a method is not looked for."""
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part) and not hasattr(found, f"_{getattr(found, '__name__', '')}{part}"):
                return callable(found) and not isinstance(found, type)
            found = getattr(found, part, None) or getattr(found, f"_{found.__name__}{part}")
        return True
    return False


@pytest.mark.parametrize(
    "name",
    trainings.parameters(
        ["ddp", "ddp-unused", "zero0", "zero2-owners", "zero3-limits"], trainings.VARIANT_OF_EACH_SCHEME
    ),
)
def test_a_call_that_is_hidden_shows(name: str) -> None:
    """Every one of them, barriers and empty broadcasts included."""
    job, _ = known(name)
    run = trainings.variants()[name]
    records = records_of(run)
    prediction = predict(job)
    clean = [
        number
        for number in range(len(records))
        if not differs(prediction, measured_steps(run, np.delete(records, number)))
    ]
    assert clean == []


def differs(prediction: Any, steps: Steps) -> bool:
    """Whether something is left over."""
    return any(
        cell.unmatched
        for step in {-1, 0, 1, 2, *steps}
        for cell in compare(prediction.step(step), steps.get(step, []), prediction.ranks_of)
    )
