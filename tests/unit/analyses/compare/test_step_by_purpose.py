"""The typical step by purpose and place, beside the closed form, and what it says of changed steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pandas as pd
import pytest
from factory import WORLD, LogFactory, record

from commtrace.analyses.compare.rules_verdict import check_by_rules
from commtrace.run import Run, open_run
from commtrace.schema import Phase, Purpose

RANKS: Final = 2
STEPS: Final = 4
GATHER, SCATTER, REDUCE = 2, 6, 1  # kinds
FORWARD, BACKWARD, GRADIENTS = Purpose.PARAMETERS_FORWARD, Purpose.PARAMETERS_BACKWARD, Purpose.GRADIENTS


class Made(NamedTuple):
    """A call of each rank."""

    kind: int
    purpose: Purpose
    module: str
    payload: int


def row_of(name: str, number: int, rows: int, *, reshards: bool) -> dict[str, Any]:
    return {
        "name": name, "parameters": [number], "shapes": [[rows, 8]], "dims": [0], "dtypes": ["float32"],
        "reduce_dtype": None, "shards": RANKS, "copies": 1, "reshard_after_forward": reshards,
        "unshard_in_backward": True,
    }  # fmt: skip


JOB: Final[dict[str, Any]] = {
    "source": "fsdp", "engine": "fully_shard", "data_parallel_size": RANKS,
    "reduce_grads": True, "all_reduce_grads": True, "reshard_after_backward": True,
    "units": [
        row_of("", 0, 4, reshards=False),
        *(row_of(f"layers.{layer}", layer + 1, 3, reshards=True) for layer in range(2)),
    ],
    "parameters": [
        {"name": name, "shape": [rows, 8], "dtype": "float32", "trainable": True}
        for name, rows in (("w", 4), ("layers.0.w", 3), ("layers.1.w", 3))
    ],
    "buffers": [],
}  # fmt: skip
BYTES: Final = {"": 128, "layers.0": 128, "layers.1": 128}
"""Bytes of each unit in float32: 4 rows of 8, and 3 rows of 8 that are padded to 4."""


def step() -> list[Made]:
    """Return the calls of a step as FSDP2 makes them."""
    return [
        *(Made(GATHER, FORWARD, name, BYTES[name]) for name in BYTES),
        *(Made(GATHER, BACKWARD, name, BYTES[name]) for name in ("layers.1", "layers.0")),
        *(Made(SCATTER, GRADIENTS, name, BYTES[name]) for name in BYTES),
    ]


def write(
    directory: Path, steps: Sequence[Sequence[Made]], jobs: Sequence[dict[str, Any]] = (JOB,), role: str = "data"
) -> Run:
    """Write a log with the calls of each step on every rank."""
    log = LogFactory(directory)
    for rank in range(RANKS):
        process = log.process(rank, pid=rank + 1, world_size=RANKS)
        process.known({WORLD: [*range(RANKS)]}, {WORLD: role})
        sites: dict[tuple[Purpose, str], int] = {}
        rows = []
        for number, calls in enumerate(steps):
            for call in calls:
                key = call.purpose, call.module
                if key not in sites:
                    sites[key] = 100 + len(sites)
                    facts = {"name": call.purpose.value, "module": call.module}
                    file = "/opt/lib/site-packages/torch/distributed/fsdp/x.py"
                    process.add("sites", id=sites[key], file=file, line=1, function="f", purpose=facts)
                phase = Phase.FORWARD if call.purpose is FORWARD else Phase.BACKWARD
                phase = Phase.OTHER if call.purpose is Purpose.CHECKPOINT_SAVED else phase
                phase = Phase.EVALUATION if call.purpose is Purpose.EVALUATION else phase
                local = call.payload // RANKS if call.kind == GATHER else 0
                rows.append(
                    record(kind=call.kind, payload=call.payload, local=local, step=number, site=sites[key], phase=phase)
                )
        for number, job in enumerate(jobs, 1):
            process.add("job", id=number, **job)
        process.write(rows).end()
    return open_run(directory)


def numbers(table: pd.DataFrame, *keys: str) -> dict[tuple[str, ...], tuple[float, ...]]:
    columns = ["calls", "payload_bytes", "expected_calls", "expected_bytes"]
    return {tuple(row[name] for name in keys): tuple(row[columns]) for _, row in table.iterrows()}


def test_every_unit_is_as_its_closed_form(tmp_path: Path) -> None:
    run = write(tmp_path, [step()] * STEPS)
    places = run.table("step_by_place")
    gathered = dict.fromkeys(("(root)", "layers.0", "layers.1"), (1, 128, 1, 128))
    assert numbers(places, "purpose", "place") == {
        **{(FORWARD.value, name): of for name, of in gathered.items()},
        **{(BACKWARD.value, name): of for name, of in gathered.items() if name != "(root)"},
        **{(GRADIENTS.value, name): of for name, of in gathered.items()},
    }
    assert (places["reason"] == "").all()
    assert numbers(run.table("step_by_purpose"), "purpose") == {
        (FORWARD.value,): (3, 384, 3, 384),
        (BACKWARD.value,): (2, 256, 2, 256),
        (GRADIENTS.value,): (3, 384, 3, 384),
    }


def test_steps_with_a_checkpoint_are_not_typical(tmp_path: Path) -> None:
    saved = [*step(), Made(GATHER, Purpose.CHECKPOINT_SAVED, "", 4000)]
    run = write(tmp_path, [step(), saved, saved, saved])
    assert (run.table("step_by_purpose")["difference_bytes"] == 0).all()
    assert Purpose.CHECKPOINT_SAVED.value not in set(run.table("step_by_purpose")["purpose"])


def test_a_step_after_an_evaluation_is_typical_only_if_all_are(tmp_path: Path) -> None:
    """An evaluation leaves the parameters of the root gathered: the next step lacks a call."""
    evaluated = [*step(), Made(GATHER, Purpose.EVALUATION, "", 128)]
    after = step()[1:]
    table = write(tmp_path / "once", [step(), evaluated, after, step()]).table("step_by_purpose")
    assert (table["difference_bytes"] == 0).all()
    always = [evaluated, [*after, evaluated[-1]], after]
    for name, steps in (("always", always), ("resumed", [[evaluated[-1]], after])):
        table = write(tmp_path / name, steps).table("step_by_purpose")
        assert table["expected_calls"].isna().all()
        assert table["reason"].str.contains("each step follows an evaluation").all()


def test_the_first_step_is_typical_only_if_it_is_the_only_one(tmp_path: Path) -> None:
    """In the first step, ZeRO-3 gathers each parameter alone, and later several at once."""
    more = [*step(), *[Made(GATHER, FORWARD, LAST, 128)] * 3]
    evaluated = [*step(), Made(GATHER, Purpose.EVALUATION, "", 128)]
    table = write(tmp_path / "later", [more, evaluated, step()[1:]]).table("step_by_purpose")
    assert (table["difference_bytes"] == 0).all()
    table = write(tmp_path / "only", [more]).table("step_by_purpose")
    assert table["difference_bytes"].sum() == 3 * 128


Change = Callable[[list[Made]], list[Made]]


def with_call(call: Made, times: int = 1) -> Change:
    return lambda calls: [*calls, *[call] * times]


def without(purpose: Purpose, module: str) -> Change:
    return lambda calls: [call for call in calls if (call.purpose, call.module) != (purpose, module)]


def resized(purpose: Purpose, module: str, payload: int) -> Change:
    return lambda calls: [
        call._replace(payload=payload) if (call.purpose, call.module) == (purpose, module) else call for call in calls
    ]


LAST: Final = "layers.1"
FAULTS: Final[dict[str, tuple[Change, Purpose, str, float, float]]] = {
    "gathered three times more": (with_call(Made(GATHER, FORWARD, LAST, 128), 3), FORWARD, LAST, 3, 384),
    "reduced twice": (with_call(Made(SCATTER, GRADIENTS, LAST, 128)), GRADIENTS, LAST, 1, 128),
    "root resharded": (with_call(Made(GATHER, BACKWARD, "", 128)), BACKWARD, "(root)", 1, 128),
    "not resharded": (without(BACKWARD, LAST), BACKWARD, LAST, -1, -128),
    "not reduced": (without(GRADIENTS, "layers.0"), GRADIENTS, "layers.0", -1, -128),
    "gradients in 16 bits": (resized(GRADIENTS, LAST, 64), GRADIENTS, LAST, 0, -64),
    "parameters in 64 bits": (resized(FORWARD, "", 256), FORWARD, "(root)", 0, 128),
}
"""Change of every step -> the purpose and the unit that differ, with extra calls and bytes."""


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_where_it_is(fault: str, tmp_path: Path) -> None:
    change, purpose, place, calls, size = FAULTS[fault]
    run = write(tmp_path, [change(step())] * STEPS)
    for name, where in (("step_by_place", {"place": place}), ("step_by_purpose", {})):
        table = run.table(name)
        differs = (table["difference_bytes"] != 0) | (table["calls"] != table["expected_calls"])
        (found,) = table.loc[differs & table["expected_calls"].notna()].to_dict("records")
        expected = {"purpose": purpose.value, **where}
        assert {key: found[key] for key in expected} == expected
        assert (found["calls"] - found["expected_calls"], found["difference_bytes"]) == (calls, size)
        assert found["reason"]


def test_gathers_for_recomputation_take_the_place_of_those_for_backward(tmp_path: Path) -> None:
    recomputed = Purpose.PARAMETERS_RECOMPUTATION
    calls = [call._replace(purpose=recomputed) if call[1:3] == (BACKWARD, LAST) else call for call in step()]
    table = write(tmp_path, [calls] * STEPS).table("step_by_purpose")
    assert (table["difference_bytes"] == 0).all()
    assert numbers(table, "purpose")[recomputed.value,] == (1, 128, 1, 128)


def test_units_whose_modules_run_at_different_times_have_no_rules(tmp_path: Path) -> None:
    """A unit of the last norm and the head, as torchtitan has it, is gathered for each of them."""
    regular = write(tmp_path / "regular", [step()] * STEPS)
    assert check_by_rules(regular)[0].agrees
    verdict, _ = check_by_rules(write(tmp_path / "more", [[*step(), Made(GATHER, FORWARD, LAST, 128)]] * STEPS))
    assert verdict.equal
    assert not verdict.compared[0]
    assert LAST in " ".join(verdict.not_compared)


def test_a_job_without_sizes_says_so(tmp_path: Path) -> None:
    without_units = {name: value for name, value in JOB.items() if name != "units"}
    for job, text in ((None, "no job was captured"), (without_units, "units")):
        table = write(tmp_path / text.split()[0], [step()] * STEPS, [job] if job else []).table("step_by_purpose")
        assert table["expected_calls"].isna().all()
        assert table["reason"].str.startswith("no closed form: ").all()
        assert table["reason"].str.contains(text).all()


def write_stage(directory: Path, sent: Sequence[int], *, ends: bool = True) -> Run:
    """Write a log of the first of two stages, with four micro-batches, that sent so many activations in each step."""
    sends, receives = 3, 4  # kinds
    process = LogFactory(directory).process(0, world_size=2).known({WORLD: [*range(RANKS)]}, {WORLD: "pipeline"})
    sizes = {"received": [], "sent": [64], "gradients_received": [64], "gradients_sent": []}
    process.add("stages", id=1, stage=0, micro_batches=3, **sizes)
    process.add("stages", id=2, stage=0, micro_batches=4, **sizes)  # replaces it
    for site, purpose in ((101, Purpose.PIPELINE_ACTIVATIONS), (102, Purpose.PIPELINE_GRADIENTS)):
        facts = {"name": purpose.value, "stage": 0, "micro_batch": 0}
        process.add("sites", id=site, file="/opt/torch/stage.py", line=1, function="f", purpose=facts)
    message = {"payload": 64, "peer": 1, "local": 0}
    for step, number in enumerate(sent):
        process.write([record(kind=sends, site=101, step=step, seq=seq, **message) for seq in range(number)])
        process.write([record(kind=receives, site=102, step=step, seq=seq, **message) for seq in range(4)])
    if ends:
        process.end()
    return open_run(directory)


def test_messages_between_stages_are_as_their_closed_form(tmp_path: Path) -> None:
    table = write_stage(tmp_path, [4, 4]).table("step_by_place")
    assert numbers(table, "purpose", "op", "place") == {
        (Purpose.PIPELINE_ACTIVATIONS.value, "send", "stage 0"): (4, 256, 4, 256),
        (Purpose.PIPELINE_GRADIENTS.value, "recv", "stage 0"): (4, 256, 4, 256),
    }
    assert (table["reason"] == "").all()


def test_a_message_too_many_is_told(tmp_path: Path) -> None:
    table = write_stage(tmp_path, [5, 5]).table("step_by_purpose").set_index("op")
    assert table.loc["send", "difference_bytes"] == 64
    assert table.loc["send", "reason"] == "stage 0: +1 calls, +64 B"
    assert table.loc["recv", "difference_bytes"] == 0


def test_a_step_that_was_cut_off_is_not_typical(tmp_path: Path) -> None:
    assert not len(write_stage(tmp_path / "one", [2], ends=False).table("step_by_purpose"))
    table = write_stage(tmp_path / "two", [4, 2], ends=False).table("step_by_purpose").set_index("op")
    assert table.loc["send", "difference_bytes"] == 0


LAYERS: Final = ("layers.0", "layers.1")
TOKEN: Final = 32


def write_experts(
    directory: Path, received: Sequence[int], *, sent: int = 6, end: int | None = None, dropped: int = 0
) -> Run:
    """Write a log of two ranks whose layers send six tokens in each step, and get so many, or rank 1 all others.

    Args:
        received: Tokens that come to rank 0 in each step.
        sent: Tokens that the router has chosen experts for.
        end: First step of which the tokens are not in the log.
        dropped: Tokens that the second layer of rank 0 does not send.
    """
    exchange = 9  # kind
    log = LogFactory(directory)
    for rank in range(RANKS):
        process = log.process(rank, pid=rank + 1, world_size=RANKS).known({WORLD: [*range(RANKS)]}, {WORLD: "expert"})
        process.add("kinds", id=exchange, op="all_to_all", variant="a", api="torch", dtype="float32", reduce_op=None)
        for layer, module in enumerate(LAYERS):
            for number, purpose in enumerate((Purpose.EXPERT_DISPATCH, Purpose.EXPERT_COMBINE)):
                facts = {"name": purpose.value, "module": module, "token_bytes": TOKEN}
                process.add("sites", id=100 + 2 * layer + number, file="/opt/m.py", line=1, function="f", purpose=facts)
            process.add(
                "experts", id=layer + 1, module=module, token_bytes=TOKEN, weight_bytes=0, counts_op="", counts_bytes=0,
                passes=1, repeated=[0, 0, 0, 0], gradients=[0, 0, 0],
            )  # fmt: skip
        for step, of_first in enumerate(received):
            came = of_first if rank == 0 else 2 * sent - of_first
            if step != end:
                process.add("routing", id=step + 1, step=step, layers=[[1, sent, came], [2, sent, came]])
            else:
                process.add("routing", id=step + 1, step=step, layers=None)
                break
        for step, of_first in enumerate(received):
            came = of_first if rank == 0 else 2 * sent - of_first
            sizes = (sent, came, sent - dropped * (rank == 0), came)
            for number, size in enumerate(sizes):
                call = {"site": 100 + number, "step": step, "seq": 4 * step + number}
                process.write([record(kind=exchange, payload=TOKEN * size, local=0, **call)])
        process.end()
    return open_run(directory)


def test_tokens_of_experts_are_as_their_closed_form(tmp_path: Path) -> None:
    """Each step has other tokens: the typical one has the median of their bytes, and its own form."""
    table = write_experts(tmp_path, [5, 9, 8]).table("step_by_purpose")
    assert numbers(table, "purpose", "op") == {
        (Purpose.EXPERT_DISPATCH.value, "all_to_all"): (2, 2 * 6 * TOKEN, 2, 2 * 6 * TOKEN),
        (Purpose.EXPERT_COMBINE.value, "all_to_all"): (2, 2 * 6 * TOKEN, 2, 2 * 6 * TOKEN),
    }
    assert (table["reason"] == "").all()


def test_tokens_that_were_not_sent_are_named(tmp_path: Path) -> None:
    table = write_experts(tmp_path, [5, 5], dropped=2).table("step_by_purpose").set_index("purpose")
    assert table.loc[Purpose.EXPERT_DISPATCH.value, "difference_bytes"] == -2 * TOKEN / RANKS
    assert table.loc[Purpose.EXPERT_DISPATCH.value, "reason"] == f"layers.1: 0 calls, -{2 * TOKEN} B"
    assert table.loc[Purpose.EXPERT_COMBINE.value, "difference_bytes"] == 0


@pytest.mark.parametrize("received", [[5, 9, 10, 11, 12, 12, 12], [5, 5, 11, 12]])
def test_the_typical_step_is_one_whose_tokens_are_known(received: Sequence[int], tmp_path: Path) -> None:
    table = write_experts(tmp_path, received, end=2).table("step_by_place")
    assert len(table) == 4
    assert (table["difference_bytes"] == 0).all()


def test_without_known_tokens_there_is_no_form(tmp_path: Path) -> None:
    table = write_experts(tmp_path, [5, 6], end=0).table("step_by_purpose")
    assert table["expected_calls"].isna().all()
    assert table["reason"].str.contains("the sizes of activations are not in the job|no job was captured").all()


def test_models_of_one_process_have_the_forms_of_each(tmp_path: Path) -> None:
    """Two stages of a pipeline: the first model has the root and a layer, the second one the other layer."""
    models = []
    for units in (JOB["units"][:2], JOB["units"][2:]):
        models.append({**JOB, "units": [{**unit, "parameters": [n]} for n, unit in enumerate(units)]})
        models[-1]["parameters"] = JOB["parameters"][: len(units)]
    run = write(tmp_path, [step()] * STEPS, models)
    assert (run.table("step_by_place")["difference_bytes"] == 0).all()


# ---- tensor-parallel plans -------------------------------------------------------------------------------------------

ACTIVATIONS, ACTIVATION_GRADIENTS = Purpose.ACTIVATIONS, Purpose.ACTIVATION_GRADIENTS
TOKENS: Final = 4 * 6
"""Bytes of a float32 element times tokens of a micro-batch."""


def style(module: str, kind: str, inputs: str, outputs: str, weight: list[int] | None, **other: Any) -> dict[str, Any]:
    """Return a row of a tensor-parallel plan."""
    return {
        "module": module, "style": kind, "inputs": [inputs] if inputs else [], "outputs": [outputs] if outputs else [],
        "desired": ["Replicate"], "local": False, "embedding": False, "weight": weight, "bias": None, "sent": True,
        **other,
    }  # fmt: skip


PLAN: Final = [
    style("embedding", "RowwiseParallel", "Replicate", "Shard(1)", [32, 8], embedding=True),
    *(
        row
        for layer in range(3)
        for row in (
            style(f"layers.{layer}.mlp", "PrepareModuleInput", "Shard(1)", "", None),
            style(f"layers.{layer}.mlp.up", "ColwiseParallel", "Replicate", "Shard(-1)", [16, 8]),
            style(f"layers.{layer}.mlp.down", "RowwiseParallel", "Shard(-1)", "Shard(1)", [8, 16]),
        )
    ),
    style("head", "ColwiseParallel", "Shard(1)", "Replicate", [31, 8]),
]
PLANNED: Final = {
    "source": "dtensor", "engine": "parallelize_module", "data_parallel_size": 1, "tensor_parallel_size": RANKS,
    "tensor_plan": PLAN, "parameters": JOB["parameters"], "buffers": [],
}  # fmt: skip


def planned_step() -> list[Made]:
    """Return the calls of a step of two micro-batches under the plan; 31 words are padded to 32."""
    layers = [f"layers.{layer}.mlp" for layer in range(3)]
    once = [
        Made(SCATTER, ACTIVATIONS, "embedding, P -> S(1)", TOKENS * 8),
        *(Made(GATHER, ACTIVATIONS, f"{layer}, S(1) -> R", TOKENS * 8) for layer in layers),
        *(Made(SCATTER, ACTIVATIONS, f"{layer}.down, P -> S(1)", TOKENS * 8) for layer in layers),
        Made(GATHER, ACTIVATIONS, "head, S(1) -> R", TOKENS * 8),
        Made(GATHER, ACTIVATIONS, "head, S(2) -> R", TOKENS * 32),
        Made(SCATTER, ACTIVATION_GRADIENTS, "head, P -> S(1)", TOKENS * 8),
        *(Made(GATHER, ACTIVATION_GRADIENTS, f"{layer}.down, S(1) -> R", TOKENS * 8) for layer in layers),
        *(Made(SCATTER, ACTIVATION_GRADIENTS, f"{layer}, P -> S(1)", TOKENS * 8) for layer in layers),
        Made(GATHER, ACTIVATION_GRADIENTS, "embedding, S(1) -> R", TOKENS * 8),
    ]
    return once * 2


def differing(run: Run) -> list[tuple[str, float, float]]:
    """Return the places that differ from their closed form: place, extra calls, extra bytes."""
    table = run.table("step_by_place")
    differs = (table["difference_bytes"] != 0) | (table["calls"] != table["expected_calls"])
    rows = table.loc[differs].to_dict("records")
    return [(row["place"], row["calls"] - row["expected_calls"], row["difference_bytes"]) for row in rows]


def test_every_module_of_a_plan_is_as_its_closed_form(tmp_path: Path) -> None:
    run = write(tmp_path, [planned_step()] * STEPS, [PLANNED], "tensor")
    assert len(run.table("step_by_place")) == 17
    assert differing(run) == []


PLAN_FAULTS: Final[dict[str, tuple[Change, tuple[str, float, float]]]] = {
    "gathered again": (
        with_call(Made(GATHER, ACTIVATIONS, "layers.1.mlp, S(1) -> R", TOKENS * 8)),
        ("layers.1.mlp, S(1) -> R", 1, TOKENS * 8),
    ),
    "another width": (
        resized(ACTIVATIONS, "layers.2.mlp.down, P -> S(1)", TOKENS * 24),
        ("layers.2.mlp.down, P -> S(1)", 0, 2 * TOKENS * 16),
    ),
    "gradients not scattered": (
        without(ACTIVATION_GRADIENTS, "layers.0.mlp, P -> S(1)"),
        ("layers.0.mlp, P -> S(1)", -2, -2 * TOKENS * 8),
    ),
    "a redistribution by hand": (
        with_call(Made(GATHER, ACTIVATIONS, "layers.0.norm, S(1) -> R", 64)),
        ("layers.0.norm, S(1) -> R", 1, 64),
    ),
}
"""Change of every step -> the place that differs, with extra calls and bytes."""


@pytest.mark.parametrize("fault", PLAN_FAULTS)
def test_a_fault_of_a_plan_is_found_where_it_is(fault: str, tmp_path: Path) -> None:
    change, expected = PLAN_FAULTS[fault]
    assert differing(write(tmp_path, [change(planned_step())] * STEPS, [PLANNED], "tensor")) == [expected]


def test_the_first_module_of_a_plan_may_need_no_gradient_of_its_input(tmp_path: Path) -> None:
    plan = [
        row
        for layer in range(2)
        for row in (
            style(f"{layer}.up", "ColwiseParallel", "Replicate", "Shard(-1)", [16, 8]),
            style(f"{layer}.down", "RowwiseParallel", "Shard(-1)", "Replicate", [8, 16]),
        )
    ]
    calls = [
        *(Made(REDUCE, ACTIVATIONS, f"{layer}.down, P -> R", TOKENS * 8) for layer in range(2)),
        Made(REDUCE, ACTIVATION_GRADIENTS, "P -> R", TOKENS * 8),
    ]
    run = write(tmp_path, [calls] * STEPS, [{**PLANNED, "tensor_plan": plan}], "tensor")
    assert (len(run.table("step_by_place")), differing(run)) == (3, [])


@pytest.mark.parametrize(
    "row",
    [
        style("experts", "ExpertParallel", "", "", None),
        style("scale", "ColwiseParallel", "Replicate", "Shard(-1)", [16]),
    ],
)
def test_a_plan_with_a_module_without_rules_has_no_closed_form(row: dict[str, Any], tmp_path: Path) -> None:
    plan = [*PLAN, row]
    run = write(tmp_path, [planned_step()] * STEPS, [{**PLANNED, "tensor_plan": plan}], "tensor")
    assert run.table("step_by_place")["expected_calls"].isna().all()
