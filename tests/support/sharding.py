"""Real trainings with sharded parameters, in addition to `trainings`: FSDP2, HSDP, hpZ, ZeRO-3 with recomputation."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Mapping
from typing import Any, Final

import trainings

from commtrace.run import Run

RANKS: Final = 4


def _fsdp(precision: str = "fp32", parts: int = 1, top: dict[str, Any] | None = None, **block: Any) -> dict[str, Any]:
    options = ("--engine", "fsdp", "--precision", precision, "--gradient-accumulation", str(parts))
    return {"model": {"seq_length": 16, **(top or {}), "fsdp": block}, "options": options}


def _zero(top: dict[str, Any] | None = None, precision: str = "fp32", parts: int = 2, **zero: Any) -> dict[str, Any]:
    options = ("--zero-stage", "3", "--precision", precision, "--gradient-accumulation", str(parts))
    zero.setdefault("stage3_param_persistence_threshold", 500)
    return {"model": {"seq_length": 16, **(top or {}), "zero_optimization": zero}, "options": options}


_AGAIN: Final[dict[str, Any]] = {"checkpoint_activations": True, "num_layers": 3}
_LITTLE: Final[dict[str, Any]] = {
    "stage3_prefetch_bucket_size": 20_000,
    "stage3_max_live_parameters": 90_000,
    "stage3_max_reuse_distance": 50_000,
}
_CUT4: Final[dict[str, Any]] = {"model_parallel_size": 4, "num_attention_heads": 4}
_CUT2: Final[dict[str, Any]] = {"model_parallel_size": 2}

SHARDED: Final[dict[str, dict[str, Any]]] = {
    "fsdp-bf16-wide": _fsdp("bf16", top={"fp32_allreduce": True, "gradient_clipping": 0.0}, reshard_after_forward=True),
    "fsdp-each": _fsdp(parts=2, sync_every_micro_batch=True),
    "fsdp-kept": _fsdp(parts=3, reshard_after_backward=False),
    "fsdp-near": _fsdp("bf16", 2, reshard_after_forward=2),
    "fsdp-again": _fsdp(top={**_AGAIN, "checkpoint_num_layers": 2, "checkpoint_reentrant": False}),
    "hsdp-bf16": _fsdp("bf16", 2, shard_size=2, sync_every_micro_batch=True),
    "hsdp-copies": _fsdp(shard_size=1, parts=2),
    "script": {"fsdp": {}},
    "tp-again": _fsdp(top={**_CUT4, **_AGAIN, "checkpoint_num_layers": 2, "gpt_j_residual": True}),
    "tp-sequence-again": _fsdp(
        "bf16", 2, top={**_CUT4, **_AGAIN, "checkpoint_reentrant": False}, sequence_parallel=True
    ),
    "fsdp-tp-bf16": _fsdp("bf16", 2, top={**_CUT2, "no_weight_tying": False}, sync_every_micro_batch=True),
    "fsdp-tp-sequence-wide": _fsdp("bf16", 3, top={**_CUT2, "fp32_allreduce": True}, sequence_parallel=True),
    "zero3-again": _zero({**_AGAIN, "checkpoint_num_layers": 2}),
    "zero3-again-early": _zero({**_AGAIN, "checkpoint_reentrant": False}, "bf16", **_LITTLE),
    "zero3-again-masked": _zero({**_AGAIN, "hidden_dropout": 0.1, "checkpoint_reentrant": False}, **_LITTLE),
    "zero3-hpz-again": _zero(_AGAIN, "bf16", 1, zero_hpz_partition_size=2, **_LITTLE),
}

MORE: Final[dict[str, dict[str, Any]]] = {
    "fsdp": _fsdp(),
    "fsdp-bf16": _fsdp("bf16", 2),
    "fsdp-never": _fsdp(parts=2, reshard_after_forward=False, top={"no_weight_tying": False}),
    "fsdp-again-reentrant": _fsdp("bf16", 2, top={**_AGAIN, "checkpoint_num_layers": 2}),
    "hsdp": _fsdp(shard_size=2),
    "script-whole": {"fsdp": {"reshard_after_forward": True}},
    "tp": _fsdp(top=_CUT4, parts=2),
    "tp-bf16": _fsdp("bf16", top={**_CUT4, "gradient_clipping": 0.0, "no_weight_tying": False}),
    "tp-sequence": _fsdp(top=_CUT4, sequence_parallel=True),
    "fsdp-tp": _fsdp(top=_CUT2),
    "fsdp-tp-sequence": _fsdp(top=_CUT2, parts=2, sequence_parallel=True),
    "zero3-hpz": _zero(zero_hpz_partition_size=2),
    "zero3-hpz-all": _zero(zero_hpz_partition_size=4, stage3_param_persistence_threshold=0),
}
"""Trainings that take minutes."""

WIDE: Final[dict[str, dict[str, Any]]] = {
    "8-fsdp": _fsdp("bf16", 2),
    "8-fsdp-near": _fsdp(reshard_after_forward=4),
    "8-hsdp": _fsdp(shard_size=4, parts=2),
    "8-hsdp-tp": _fsdp("bf16", 2, top=_CUT2, shard_size=2),
    "8-hsdp-tp-sequence": _fsdp(top=_CUT2, shard_size=2, sequence_parallel=True),
    "8-tp": _fsdp(top={"model_parallel_size": 8, "num_attention_heads": 8, "hidden_size": 128}),
    "8-zero3-hpz": _zero(zero_hpz_partition_size=4),
}
"""Trainings on eight ranks."""


def draw(chance: random.Random) -> dict[str, Any]:
    """Draw a model, and return it sharded by FSDP and by ZeRO-3."""
    model = trainings.draw(chance)
    model |= {
        "gpt_j_residual": chance.random() < 0.5,
        "no_weight_tying": chance.random() < 0.5,
        "checkpoint_activations": chance.random() < 0.7,
        "checkpoint_num_layers": chance.randint(1, 3),
        "checkpoint_reentrant": chance.random() < 0.5,
        "hidden_dropout": chance.choice((0.0, 0.1)),
    }
    precision, parts = chance.choice(("fp32", "bf16")), chance.randint(1, 3)
    block = {
        "shard_size": chance.choice((None, 2, 4)),
        "reshard_after_forward": chance.choice((None, True, False)),
        "sync_every_micro_batch": chance.random() < 0.5,
        "reshard_after_backward": chance.random() < 0.5,
    }
    return {"fsdp": _fsdp(precision, parts, model, **block), "zero": _drawn_zero(chance, model, precision, parts)}


def _drawn_zero(chance: random.Random, model: dict[str, Any], precision: str, parts: int) -> dict[str, Any]:
    zero = {**model["zero_optimization"], "zero_hpz_partition_size": chance.choice((1, 2, 4))}
    return _zero(model, precision, parts, **zero)


def drawn() -> dict[str, dict[str, Any]]:
    """Return the models drawn from the seed."""
    chance = random.Random(trainings.seed() + 2)
    models = [draw(chance) for _ in range(3)]
    return {f"drawn-{kind}-{number}": model[kind] for kind in ("fsdp", "zero") for number, model in enumerate(models)}


DRAWN: Final = tuple(f"drawn-{kind}-{number}" for kind in ("fsdp", "zero") for number in range(3))
FEW: Final = tuple(name for name in DRAWN if name.endswith("0"))
MANY: Final = tuple(name for name in DRAWN if name not in FEW)
NAMES: Final = (*SHARDED, *FEW)
MORE_NAMES: Final = (*MORE, *MANY)


def wanted(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the trainings with these names."""
    every = {**SHARDED, **MORE, **WIDE, **drawn()}
    return {name: every[name] for name in names}


OF_EACH_SCHEME: Final = ("fsdp-kept", "hsdp-bf16", "fsdp-tp-bf16", "tp-sequence-again", "zero3-hpz-again")


@functools.cache
def sharded() -> Mapping[str, Run]:
    """Return the runs of NAMES, on four ranks."""
    return trainings.TwoStarts(wanted(NAMES), OF_EACH_SCHEME, functools.partial(trainings.trained, processes=RANKS))


@trainings.once
def more() -> dict[str, Run]:
    """Return the runs of MORE_NAMES, on four ranks."""
    return trainings.trained(wanted(MORE_NAMES), processes=RANKS)


@trainings.once
def wide() -> dict[str, Run]:
    """Return the runs of WIDE, on eight ranks."""
    return trainings.trained(wanted(WIDE), processes=2 * RANKS)
