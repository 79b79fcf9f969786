"""Logs of a small ZeRO-1 training, made from the expected calls, and changes that make them differ.

run = run_of(tmp_path, every_step(), ZERO_1)
run = run_of(tmp_path, cut(every_step()), ZERO_1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from factory import ALONE, PAIR, WORLD, LogFactory, record

from commtrace.run import Run, open_run
from commtrace.schema import Phase, Purpose, Records
from commtrace.theory import ExpectedCall, predict

RANKS: Final = 3
STEPS: Final = 3

OPS: Final = {
    name: 40 + number for number, name in enumerate(("all_reduce", "all_gather", "broadcast", "barrier", "reduce"))
}
PROGRAM, DEEPSPEED_LINE, CHECKPOINT, SAVING, OWN = 11, 12, 13, 14, 15

ZERO_1: Final[dict[str, Any]] = {
    "source": "deepspeed",
    "engine": "DeepSpeedEngine",
    "zero_stage": 1,
    "zero": {
        "reduce_bucket_size": 60,
        "overlap_comm": True,
        "reduce_scatter": True,
        "contiguous_gradients": True,
        "use_multi_rank_bucket_allreduce": True,
        "round_robin_gradients": False,
        "parameter_alignment": False,
        "compute_grad_norm": True,
    },
    "data_parallel_size": RANKS,
    "tensor_parallel_size": 1,
    "sequence_parallel_size": 1,
    "pipeline_stages": 1,
    "gradient_accumulation_steps": 1,
    "precision": "fp16",
    "communication_data_type": "float16",
    "gradient_clipping": 1.0,
    "check_grad_overflow": True,
    "optimizer": "DeepSpeedZeroOptimizer",
    "basic_optimizer": "AdamW",
    "moe": False,
    "optimizer_groups": [[0, 1], [2]],
    "parameters": [
        {"name": f"layer.{number}", "shape": shape, "dtype": "float16", "trainable": True}
        for number, shape in enumerate(([7, 5], [5], [11, 3]))
    ],
    "buffers": [],
}


_SITES_WITH_PURPOSES: Final = {
    SAVING: (
        "/opt/site-packages/deepspeed/runtime/engine.py",
        "DeepSpeedEngine.save_checkpoint",
        Purpose.CHECKPOINT_SAVED,
    ),
    OWN: ("/home/user/project/train.py", "main", Purpose.PROGRAM),
}


def call(message: ExpectedCall, step: int, **fields: int) -> Records:
    """Return a record of an expected call."""
    phase = Phase.INIT if step < 0 else Phase.OPTIMIZER
    local = message.payload // RANKS if message.op == "all_gather" else 0
    known = {"site": DEEPSPEED_LINE, "phase": phase, "local": local}
    return record(kind=OPS[message.op], payload=message.payload, step=step, **{**known, **fields})


def calls(job: dict[str, Any], steps: Iterable[int]) -> list[Records]:
    """Return the expected calls as records."""
    prediction = predict(job)
    return [call(message, step) for step in steps for message in prediction.step(step) for _ in range(message.calls)]


def run_of(
    directory: Path,
    rows: list[Records],
    job: dict[str, Any] | None = None,
    *,
    end: bool = True,
    ranks: int = RANKS,
    others: Mapping[int, list[Records]] | None = None,
    **stats: int,
) -> Run:
    """Write a log with the records `rows` on every rank, except on the ranks in `others`; return its run."""
    log = LogFactory(directory)
    for rank in range(ranks):
        process = log.process(rank, pid=4711 + rank, world_size=RANKS)
        process.known({WORLD: [*range(RANKS)], PAIR: [0, 1], ALONE: [rank]}, {WORLD: "data"})
        for op, number in OPS.items():
            process.add("kinds", id=number, op=op, variant=op, api="torch", dtype="float16", reduce_op=None)
        packages = "/opt/site-packages/deepspeed/runtime"
        process.add("sites", id=PROGRAM, file="/home/user/project/train.py", line=9, function="main")
        process.add("sites", id=DEEPSPEED_LINE, file=f"{packages}/zero/stage_1_and_2.py", line=5, function="step")
        process.add(
            "sites", id=CHECKPOINT, file=f"{packages}/engine.py", line=5, function="DeepSpeedEngine.save_checkpoint"
        )
        for number, (file, function, purpose) in _SITES_WITH_PURPOSES.items():
            process.add("sites", id=number, file=file, line=7, function=function, purpose={"name": purpose.value})
        if job is not None:
            process.add("job", id=1, **job)
        process.write((others or {}).get(rank, rows))
        process.stats(**stats)
        if end:
            process.add("end", mono_ns=10_000_001_000, unix_ns=1, reason="exit")
    return open_run(directory)


def every_step() -> list[Records]:
    return calls(ZERO_1, range(-1, STEPS))


def cut(rows: list[Records]) -> list[Records]:
    """Return the records without the last call of the last step."""
    return rows[:-1]


def without_optimizer(rows: list[Records]) -> list[Records]:
    """Return the records without the last step's norms and parameters."""
    kept = [message for message in predict(ZERO_1).step(0) if message.cause in ("gradients", "overflow check")]
    return [*(row for row in rows if row["step"][0] < STEPS - 1), *(call(message, STEPS - 1) for message in kept)]


def without_a_check(rows: list[Records]) -> list[Records]:
    """Return the records without the last step's overflow check."""
    return [row for row in rows if row["step"][0] < STEPS - 1 or row["payload"][0] != 1]


def with_call(op: str, payload: int, **fields: int) -> Callable[[list[Records]], list[Records]]:
    """Return a change that adds a call to step 1."""
    return lambda rows: [*rows, call(ExpectedCall(op, payload, ""), 1, **fields)]


def in_other_pieces(rows: list[Records]) -> list[Records]:
    """Return the records with the last step's first bucket 2 bytes smaller, and the second 2 bytes larger."""
    changed = [row.copy() for row in rows]
    large = [
        row for row in changed if row["step"][0] == 2 and row["kind"][0] == OPS["all_reduce"] and row["payload"][0] > 8
    ]
    large[0]["payload"] -= 2
    large[1]["payload"] += 2
    return changed
