"""Reports and checks of small trainings: no cause in those without a fault, and of a fault exactly what it changes."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

pytest.importorskip("torch")

from ranks import Nursery

from commtrace.analyses.compare.recorded_calls import read_calls
from commtrace.analyses.compare.rules_verdict import check_by_rules
from commtrace.analyses.compare.two_runs import compare_calls
from commtrace.run import Run, open_run
from commtrace.schema import Purpose

RANKS: Final = {"hsdp": 4, "experts": 4}
DRAWS: Final = int(os.environ.get("DRAWS", "20"))
SCHEMES: Final = ("ddp", "fsdp2", "hsdp", "tensor", "pipeline", "experts")


def run_training(nursery: Nursery, log: Path, **settings: Any) -> Run:
    """Run a training and return its run."""
    ranks = RANKS.get(settings["scheme"], 2)
    statuses, outputs = nursery.run("small_training", log, json.dumps(settings), ranks=ranks)
    assert statuses == [0] * ranks, outputs
    return open_run(log)


def draw(seed: int) -> dict[str, Any]:
    """Return the settings of a training without a fault."""
    drawn = random.Random(seed)
    scheme = SCHEMES[seed % len(SCHEMES)]
    steps = drawn.randint(3, 6)
    settings: dict[str, Any] = {
        "scheme": scheme,
        "blocks": drawn.randint(1, 4),
        "width": drawn.choice((4, 6, 8, 10)),
        "steps": steps,
        "micro_batches": drawn.randint(1, 3),
        "syncs_last": drawn.random() < 0.7,
        "recomputes": drawn.random() < 0.3,
        "clips": drawn.random() < 0.5,
        "logs": drawn.random() < 0.5,
        "saves": sorted(drawn.sample(range(steps), drawn.randint(0, 2))),
        "evaluates": sorted(drawn.sample(range(steps), drawn.randint(0, 2))),
    }
    if scheme in ("fsdp2", "hsdp"):
        settings |= {
            "dtype": drawn.choice(("float32", "bfloat16")),
            "reduce_dtype": drawn.choice(("float32", "bfloat16")),
            "reshards": drawn.random() < 0.7,
        }
    if scheme == "ddp":
        settings |= {"bucket_mb": drawn.choice((0.001, 1.0)), "syncs_last": True}
    return settings


@pytest.mark.long
@pytest.mark.parametrize(
    "seed",
    [
        1,
        2,
        4,
        5,
        *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(10, 10 + DRAWS)),
    ],
)
def test_a_training_without_a_fault_has_no_difference(seed: int, nursery: Nursery, tmp_path: Path) -> None:
    settings = draw(seed)
    run = run_training(nursery, tmp_path / "log", **settings)
    verdict, _ = check_by_rules(run)
    assert verdict.equal, (settings, verdict.table.to_dict("records"))
    assert {purpose for purpose, *_ in verdict.own} <= _own_purposes(settings), settings
    step = run.table("step_by_purpose")
    with_form = step.loc[step["expected_calls"].notna()]
    assert (with_form["difference_bytes"] == 0).all(), (settings, with_form.to_dict("records"))
    if settings["scheme"] != "ddp":  # its number of buckets depends on the order of gradients
        assert (with_form["calls"] == with_form["expected_calls"]).all(), (settings, with_form.to_dict("records"))
    if settings["scheme"] != "tensor":
        assert len(with_form), settings
    unexplained = run.table("theory")["unexplained_bytes"].fillna(0)
    assert (unexplained == 0).all(), settings


def _own_purposes(settings: dict[str, Any]) -> set[str]:
    """Return the purposes of calls outside of the expected ones that a training may have."""
    purposes = {Purpose.PROGRAM, Purpose.OBJECTS, Purpose.GRADIENT_NORM}
    if settings["saves"]:
        purposes |= {Purpose.CHECKPOINT_SAVED, Purpose.STATE_DICT}
    names = {purpose.value for purpose in purposes}
    return names | {"evaluation"} if settings["evaluates"] else names


class Fault(NamedTuple):
    """A fault, and what differs from the same training without it."""

    scheme: str
    fault: str
    purposes: frozenset[tuple[str, str]]
    """Purposes, and units or modules ("": not known)."""
    step_bytes: int
    """Payload of a rank and step, beside that without the fault."""
    settings: dict[str, Any] = {}  # noqa: RUF012


FORWARD, BACKWARD, GRADIENTS = (
    Purpose.PARAMETERS_FORWARD,
    Purpose.PARAMETERS_BACKWARD,
    Purpose.GRADIENTS,
)
DISPATCH, COMBINE, OF_TOKENS = Purpose.EXPERT_DISPATCH, Purpose.EXPERT_COMBINE, Purpose.EXPERT_GRADIENTS
BLOCK: Final = "blocks.1"
ROOT: Final = "(root)"
WIDTH: Final = 8
BLOCK_BYTES: Final = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH + 2 * WIDTH * WIDTH + WIDTH)
"""float32 bytes of a block: two matrices and two biases, whose rows are even, so that no padding is needed."""
HEAD_BYTES: Final = 4 * WIDTH * WIDTH
MODEL_BYTES: Final = 3 * BLOCK_BYTES + HEAD_BYTES
TOKEN_BYTES: Final = 4 * WIDTH
"""A token of the scheme with experts, whose ranks have six, four of them for the expert of the first of two ranks."""
COUNTS_BYTES: Final = 2 * 8
UNITS: Final = ("blocks.0", BLOCK, "blocks.2", ROOT)
STEPS: Final = 4
LAST: Final = STEPS - 2
"""A step that equals the steps before it, but for its checkpoint and evaluation."""
ACTIVITIES: Final = {"saves": [LAST], "evaluates": [LAST]}


def places(*pairs: tuple[Purpose, str]) -> frozenset[tuple[str, str]]:
    return frozenset((purpose.value, place) for purpose, place in pairs)


FAULTS: Final = [
    Fault("fsdp2", "unsharded block", places(*((of, place) for of in (FORWARD, GRADIENTS) for place in (BLOCK, ROOT)),
        (BACKWARD, BLOCK)), -BLOCK_BYTES),
    Fault("fsdp2", "16-bit block", places(*((of, BLOCK) for of in (FORWARD, BACKWARD))), -BLOCK_BYTES),
    Fault("fsdp2", "64-bit reduction", places((GRADIENTS, BLOCK)), BLOCK_BYTES),
    Fault("fsdp2", "unresharded block", places((BACKWARD, BLOCK)), -BLOCK_BYTES),
    Fault("fsdp2", "resharded root", places((BACKWARD, ROOT)), HEAD_BYTES),
    Fault("fsdp2", "frozen block", places((GRADIENTS, BLOCK)), -BLOCK_BYTES),
    Fault("fsdp2", "doubled reduction", places((Purpose.PROGRAM, "")), MODEL_BYTES // 2),
    Fault("fsdp2", "full tensor", places((Purpose.TENSORS, "S(0) -> R")), 4 * 2 * WIDTH * WIDTH),
    Fault("fsdp2", "gathered block", places((Purpose.PARAMETERS_ON_REQUEST, BLOCK)), BLOCK_BYTES),
    Fault("fsdp2", "reduced loss", places((Purpose.PROGRAM, "")), 4),
    Fault("fsdp2", "unclipped", places((Purpose.GRADIENT_NORM, "")), -4 * 13, {"clips": True}),
    Fault("fsdp2", "forgotten no_sync", places(*((GRADIENTS, place) for place in UNITS)),
        MODEL_BYTES, {"micro_batches": 2}),
    Fault("hsdp", "unresharded block", places((BACKWARD, BLOCK)), -BLOCK_BYTES),
    Fault("hsdp", "local replicas", places(*((GRADIENTS, place) for place in UNITS)),
        -MODEL_BYTES // 2),
    Fault("hsdp", "frozen block", places((GRADIENTS, BLOCK)), -BLOCK_BYTES - BLOCK_BYTES // 2),
    Fault("ddp", "16-bit gradients", places((GRADIENTS, ""), (GRADIENTS, "bucket 0")), -MODEL_BYTES // 2),
    Fault("ddp", "doubled reduction", places((Purpose.PROGRAM, "")), MODEL_BYTES),
    Fault("ddp", "unused parameters", places((Purpose.USED_PARAMETERS, "")), 4 * 13),
    Fault("ddp", "forgotten no_sync", places((GRADIENTS, "")), MODEL_BYTES, {"micro_batches": 2}),
    Fault("ddp", "frozen block", places((GRADIENTS, "")), -BLOCK_BYTES),
    Fault("ddp", "reduced loss", places((Purpose.PROGRAM, "")), 4),
    Fault("tensor", "unparallelized block",
        places((Purpose.ACTIVATIONS, "blocks.1.down, P -> R"), (Purpose.ACTIVATION_GRADIENTS, "P -> R")),
        -2 * 4 * 2 * WIDTH),
    Fault("tensor", "reduced loss", places((Purpose.PROGRAM, "")), 4),
    Fault("pipeline", "more micro-batches", places((Purpose.PIPELINE_ACTIVATIONS, "stage 0"),
        (Purpose.PIPELINE_GRADIENTS, "stage 0")), 2 * 4 * 2 * WIDTH, {"micro_batches": 1}),
    Fault("pipeline", "wider activations", places((Purpose.PIPELINE_ACTIVATIONS, "stage 0"),
        (Purpose.PIPELINE_GRADIENTS, "stage 0")), 2 * 2 * 4 * 2 * WIDTH, {"micro_batches": 1}),
    Fault("fsdp2", "kept block", places((FORWARD, BLOCK)), -BLOCK_BYTES),
    Fault("hsdp", "16-bit reduction", places((GRADIENTS, BLOCK)), -(BLOCK_BYTES + BLOCK_BYTES // 2) // 2),
    Fault("ddp", "smaller buckets", places((GRADIENTS, "")), 0),
    Fault("ddp", "doubled bucket", places((GRADIENTS, "bucket 0")), MODEL_BYTES),
    Fault("experts", "dropped token", places((DISPATCH, BLOCK), (OF_TOKENS, BLOCK)), -2 * TOKEN_BYTES),
    Fault("experts", "tokens sent twice", places((Purpose.EXPERT_COUNTS, BLOCK), (DISPATCH, BLOCK)),
        COUNTS_BYTES + 6 * TOKEN_BYTES),
    Fault("experts", "uneven batch", places(*((of, f"blocks.{number}") for of in (DISPATCH, COMBINE, OF_TOKENS)
        for number in range(3))), 3 * 4 * TOKEN_BYTES),
    Fault("experts", "whole experts", places(*((of, f"{BLOCK}.experts") for of in (FORWARD, BACKWARD, GRADIENTS))),
        -3 * BLOCK_BYTES),
]  # fmt: skip


def found_purposes(texts: Iterable[str]) -> set[tuple[str, str]]:
    """Return the purposes and places in the column `purpose` of differences."""
    found = set()
    for text in texts:
        for part in text.split("; "):
            match = re.fullmatch(r"([^(]+?)(?: \((.*)\))?", part)
            assert match is not None, part
            listed = re.split(r", (?=blocks|\(root)", match[2]) if match[2] else [""]
            found |= {(match[1], place) for place in listed}
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("activities", [{}, ACTIVITIES], ids=["plain", "saving"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.scheme}, {fault.fault}")
def test_a_fault_is_named(fault: Fault, activities: dict[str, Any], nursery: Nursery, tmp_path: Path) -> None:
    if fault.scheme == "pipeline":
        activities = {}
    settings = {"scheme": fault.scheme, "width": WIDTH, "steps": STEPS, **activities, **fault.settings}
    before = run_training(nursery, tmp_path / "before", **settings)
    after = run_training(nursery, tmp_path / "after", **settings, fault=fault.fault)
    table = compare_calls(read_calls(before), read_calls(after)).table
    of_training = table.loc[(table["kind"] == "calls") & (table["phase"] != "evaluation")]
    last = of_training.loc[[_has(row, 0, LAST) for row in of_training.to_dict("records")]]
    assert found_purposes(last["purpose"]) == {*fault.purposes}
    assert last["difference_bytes"].sum() == fault.step_bytes


def _has(row: dict[Hashable, Any], rank: int, step: int) -> bool:
    from commtrace.rank_ranges import parse_ranks

    steps = row["steps"].rpartition("step ")[2]
    return rank in parse_ranks(row["ranks"]) and "step " in row["steps"] and step in parse_ranks(steps)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("dropped token", {DISPATCH: (0, -TOKEN_BYTES), OF_TOKENS: (0, -TOKEN_BYTES)}),
        ("tokens sent twice", {DISPATCH: (1, 6 * TOKEN_BYTES), Purpose.EXPERT_COUNTS: (1, COUNTS_BYTES)}),
    ],
)
def test_a_fault_of_experts_differs_from_its_closed_form(
    fault: str, expected: dict[Purpose, tuple[int, int]], nursery: Nursery, tmp_path: Path
) -> None:
    """The log alone names calls, place and bytes, without another run."""
    run = run_training(nursery, tmp_path / "log", scheme="experts", width=WIDTH, fault=fault)
    table = run.table("step_by_place")
    differing = table.loc[table["difference_bytes"].fillna(0) != 0]
    assert {*differing["place"]} == {BLOCK}
    found = {
        row["purpose"]: (row["calls"] - row["expected_calls"], row["difference_bytes"])
        for row in differing.to_dict("records")
    }
    assert found == {purpose.value: difference for purpose, difference in expected.items()}
