"""The reconciliation is no longer clean when any rule is broken or any call is hidden."""

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
from matched_calls import unmatched_calls
from record_blocks import block_of

from commtrace.analyses.compare import counted_calls as measured
from commtrace.analyses.compare.run_calls import EqualCalls
from commtrace.run import Run
from commtrace.schema import Records
from commtrace.theory import NotPredictedError, predict
from commtrace.theory.rules.registry import DEEPSPEED, GPT_NEOX, RULES, TORCH, WORKLOAD, Rule

pytestmark = trainings.TIMEOUT

Steps = dict[int, list[EqualCalls]]


def measured_steps(run: Run, records: Records, rank: int = 0) -> Steps:
    """Return the calls of one rank by step."""
    table = measured.merge([measured.partial(block_of(run, records, rank))])
    texts = {name: run.labels.distinct(name)[table[name]] for name in ("role", "op", "phase", "site", "dtype")}
    table = table.assign(**texts)
    contents, by_process = measured.count_steps(table, run.labels, len(run.processes))
    steps = np.arange(-1, by_process[rank].last_step + 1)
    rows = zip(steps.tolist(), by_process[rank].at(steps).tolist(), strict=True)
    return {step: [*contents[row].calls] for step, row in rows if row}


def records_of(run: Run, rank: int = 0) -> Records:
    """Return all records of one rank."""
    assert run.processes[rank].rank == rank
    return np.concatenate([block for segment in run.processes[rank].segments for block in segment.blocks()])


class Family(NamedTuple):
    """Trainings that run in one start."""

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
    """Return the family of a training."""
    return next(candidate for candidate in FAMILIES if name in candidate.wanted)


@functools.cache
def known(name: str) -> tuple[dict[str, Any], Steps]:
    """Return the job of a training, and what rank 0 communicated."""
    run = family(name).runs()[name]
    assert run.job is not None
    return run.job, measured_steps(run, records_of(run))


@functools.cache
def known_stage(name: str, stage: int) -> tuple[dict[str, Any], Steps]:
    """Return the job of a pipeline stage, and what its first rank communicated."""
    run = pipelines.run(name)
    rank = stage * len(run.ranks) // stages_of(name)
    (job,) = run.processes[rank].tables.jobs.values()
    return job, measured_steps(run, records_of(run, rank), rank)


def stages_of(name: str) -> int:
    """Return the number of stages of a pipeline."""
    return int(pipelines.WANTED[pipelines.NAMES[name]][name]["model"]["pipe_parallel_size"])


STAGED = [name for name in pipelines.STAGED if pipelines.NAMES[name] < 8 and not name.startswith("drawn")]


def pipeline_is_clean(name: str) -> bool:
    """Return whether theory predicts what each stage communicated."""
    return all(is_clean(*known_stage(name, stage)) for stage in range(stages_of(name)))


def pipeline_is_clean_as_described(name: str) -> bool:
    """Return whether theory predicts what each stage communicated, from the configuration alone."""
    ranks = pipelines.NAMES[name]
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows = pipelines.described(pipelines.WANTED[ranks][name], ranks, Path(folder))
        except NotPredictedError:
            return False
    return all(is_clean(row, known_stage(name, stage)[1]) for stage, row in enumerate(rows))


NAMES = [name for start in FAMILIES for name in start.wanted]
CONFIGURED = [name for start in FAMILIES for name, wanted in start.wanted.items() if "model" in wanted]


def is_clean_as_described(name: str) -> bool:
    """Return whether theory predicts what was measured, from the configuration alone."""
    start = family(name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            row = trainings.described(start.wanted[name], start.ranks, Path(folder))
        except NotPredictedError:
            return False
    return is_clean(row, known(name)[1])


def is_clean(job: dict[str, Any], steps: Steps) -> bool:
    """Return whether theory predicts exactly what was measured."""
    try:
        prediction = predict(job)
    except NotPredictedError:
        return False
    return not differs(prediction, steps, {-1, *steps})


def rule_id(rule: Rule) -> str:
    return f"{rule.module.rpartition('.')[2]}.{rule.name}"


def of_gpt_neox_alone(rule: Rule) -> bool:
    """Return whether only GPT-NeoX's program makes its calls; tests/unit/theory/rules/test_gpt_neox.py breaks it."""
    functions = ("norm_gradients", "embedding_all_reduce", "segment_all_gathers", "recomputed_segments", "saved_state")
    modules = ("megatron.gpt_neox", "megatron.sequential_model", "gpt_neox.program_modules")
    return rule.module.endswith(modules) or rule.name in functions


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if not (of_gpt_neox_alone(rule) or rule.name in OF_EVALUATIONS)], ids=rule_id
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
    assert not all(clean(name) for names, clean in checks for name in names)


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


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.library == "deepspeed"], ids=rule_id)
def test_the_functions_that_deepspeed_s_rules_mirror_exist(rule: Rule) -> None:
    """The functions exist in the installed version: a rule without its function has no basis."""
    where = ""
    for part in rule.mirrors.replace(";", ",").split(","):
        name = part.strip().partition(" (")[0]
        where = name.rpartition(".")[0] if "." in name else where
        assert exists(name if "." in name else f"{where}.{name}"), name


def exists(dotted: str) -> bool:
    """Return whether a dotted name exists. Names nested in a method are not looked up."""
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(value, part) and not hasattr(value, f"_{getattr(value, '__name__', '')}{part}"):
                return callable(value) and not isinstance(value, type)
            value = getattr(value, part, None) or getattr(value, f"_{value.__name__}{part}")
        return True
    return False


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    trainings.parameters(
        ["ddp", "ddp-unused", "zero0", "zero2-owners", "zero3-limits"], trainings.VARIANT_OF_EACH_SCHEME
    ),
)
def test_a_call_that_is_hidden_shows(name: str) -> None:
    """This holds for every call, including barriers and empty broadcasts."""
    job, _ = known(name)
    run = trainings.variants()[name]
    records = records_of(run)
    prediction = predict(job)
    clean = [
        number
        for number in range(len(records))
        if not differs(prediction, steps := measured_steps(run, np.delete(records, number)), {-1, 0, 1, 2, *steps})
    ]
    assert clean == []


def differs(prediction: Any, steps: Steps, numbers: set[int]) -> bool:
    """Return whether calls of the steps with these numbers are left unmatched."""
    return any(unmatched_calls(prediction.step(step), steps.get(step, []), prediction) for step in numbers)
