"""Trainings with pipeline stages, some also tensor-parallel: many in one start of two, four or eight processes."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import trainings

from commtrace.run import Run


def _piped(
    stages: int,
    zero: int = 0,
    precision: str = "fp32",
    parts: int = 2,
    tensor: int = 1,
    **keys: Any,
) -> dict[str, Any]:
    """Return a model in stages of `tensor` ranks each, with `parts` micro-batches; `keys` are GPT-NeoX's."""
    options = ("--zero-stage", str(zero), "--precision", precision, "--gradient-accumulation", str(parts))
    if "checkpoint_num_layers" in keys or "checkpoint_reentrant" in keys:
        keys = {"checkpoint_activations": True, **keys}
    shape = {"seq_length": 12, "hidden_size": 32, "train_micro_batch_size_per_gpu": 2, "num_layers": 4}
    model = {"pipe_parallel_size": stages, "model_parallel_size": tensor, **shape, **keys}
    return {"model": model, "options": options}


def _summed_in_fp32() -> dict[str, Any]:
    return {"data_types": {"grad_accum_dtype": "fp32"}}


TIED: Final[dict[str, Any]] = {"no_weight_tying": False}
ODD: Final[dict[str, Any]] = {"num_layers": 3, "gradient_clipping": 0.0}

TWO: Final[dict[str, dict[str, Any]]] = {
    "pp2": _piped(2, parts=1),
    "pp2-four": _piped(2, parts=4, **ODD),
    "pp2-tied": _piped(2, **TIED),
    "pp2-zero1-bf16": _piped(2, 1, "bf16", zero_optimization={"reduce_bucket_size": 5_000}),
    "pp2-bf16": _piped(2, 0, "bf16", num_layers=2, **TIED),
    "pp2-bf16-fp32": _piped(2, 1, "bf16", **TIED, **_summed_in_fp32()),
    "pp2-again-late": _piped(2, num_layers=3, checkpoint_reentrant=False, checkpoint_num_layers=2),
    "pp2-uniform": _piped(2, pipe_partition_method="uniform", seq_length=7),
    "pp2-parameters": _piped(2, pipe_partition_method="parameters", num_layers=6, **TIED),
}

FOUR: Final[dict[str, dict[str, Any]]] = {
    "pp4": _piped(4, 1, "bf16", **TIED),
    "pp2dp2": _piped(2, 1),
    "pp2dp2-bf16": _piped(2, 0, "bf16", num_layers=5, **TIED),
    "pp2dp2-bf16-wide": _piped(2, 1, "bf16", parts=1, communication_data_type="fp32", **_summed_in_fp32()),
    "pp2tp2": _piped(2, 1, tensor=2),
    "pp2tp2-bf16": _piped(2, 0, "bf16", tensor=2, gradient_clipping=0.0, **TIED),
    "pp2tp2-again": _piped(2, 1, "bf16", tensor=2, parts=4, checkpoint_reentrant=True, fp32_allreduce=True),
    "pp2tp2-again-late": _piped(
        2, 1, tensor=2, checkpoint_reentrant=False, checkpoint_num_layers=2, gpt_j_residual=True, num_layers=5
    ),
}

MORE_OF_TWO: Final = {
    "pp2-zero1": _piped(2, 1, **TIED),
    "pp2-bf16-unclipped": _piped(2, 0, "bf16", num_layers=5, gradient_clipping=0.0),
    "pp2-again": _piped(2, 1, checkpoint_reentrant=True),
}

MORE_OF_FOUR: Final = {
    "pp2tp2-zero0": _piped(2, tensor=2, seq_length=5, num_layers=3, **TIED),
    "pp4-zero0": _piped(4, parts=1, num_layers=6, gradient_clipping=0.0),
    "pp2dp2-zero0": _piped(2, 0, **TIED),
    "pp2tp2-whole": _piped(
        2, tensor=2, deepspeed_extra_args={"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}
    ),
}

EIGHT: Final[dict[str, dict[str, Any]]] = {
    "pp2tp2dp2": _piped(2, 1, "bf16", tensor=2, **TIED),
}

MORE_OF_EIGHT: Final = {
    "pp2tp2dp2-zero0": _piped(2, 0, tensor=2, parts=4, checkpoint_reentrant=True),
    "pp4tp2": _piped(4, 1, tensor=2, num_layers=6, **TIED),
    "pp2dp4": _piped(2, 1, "bf16", **_summed_in_fp32()),
    "pp2tp4": _piped(2, 1, tensor=4, gpt_j_residual=True),
}


def draw(chance: random.Random, ranks: int) -> dict[str, Any]:
    """Draw a model in stages for `ranks` ranks."""
    stages = chance.choice([number for number in (2, 4) if number <= ranks])
    tensor = chance.choice([number for number in (1, 2, 4) if stages * number <= ranks])
    keys = trainings.draw_cut(chance, tensor, (stages, stages + 4)) | chance.choice(({}, _summed_in_fp32()))
    zero, precision = chance.choice((0, 1)), chance.choice(("fp32", "bf16"))
    if precision == "fp32" or zero == 0:  # DeepSpeed refuses another accumulation type there
        keys.pop("data_types", None)
    return _piped(stages, zero, precision, chance.choice((1, 2, 4)), tensor, **keys)


def drawn(ranks: int, count: int) -> dict[str, dict[str, Any]]:
    """Return the models drawn from the seed."""
    chance = random.Random(trainings.seed() + ranks)
    return {f"drawn-{ranks}-{number}": draw(chance, ranks) for number in range(count)}


# The same models without stages, which must have the same losses.
WHOLE: Final[dict[int, dict[str, dict[str, Any]]]] = {
    2: {"tp2-tied": _piped(1, tensor=2, **TIED), "tp2-four": _piped(1, parts=4, tensor=2, **ODD)},
    4: {"tp2dp2": _piped(1, 1, tensor=2), "tp4": _piped(1, 1, tensor=4, make_vocab_size_divisible_by=64)},
}
SAME_LOSSES: Final = {"pp2-tied": "tp2-tied", "pp2-four": "tp2-four", "pp2dp2": "tp2dp2", "pp2tp2": "tp4"}

WANTED: Final = {
    2: {**TWO, **WHOLE[2], **drawn(2, 1)},
    4: {**FOUR, **WHOLE[4], **drawn(4, 1)},
    8: EIGHT,
}
MORE: Final = {
    2: {**MORE_OF_TWO, **drawn(2, 12)},
    4: {**MORE_OF_FOUR, **drawn(4, 12)},
    8: {**MORE_OF_EIGHT, **drawn(8, 6)},
}
"""Trainings that take minutes."""
NAMES: Final = {name: ranks for ranks, wanted in WANTED.items() for name in wanted}
MORE_NAMES: Final = {name: ranks for ranks, wanted in MORE.items() for name in wanted}
STAGED: Final = [name for name in NAMES if name not in {**WHOLE[2], **WHOLE[4]}]

_folders: list[tempfile.TemporaryDirectory[str]] = []  # kept until the tests end


def _trained(wanted: dict[str, dict[str, Any]], ranks: int) -> dict[str, Run]:
    _folders.append(tempfile.TemporaryDirectory())
    folder = Path(_folders[-1].name)
    with_losses = {
        name: {**training, "options": (*training["options"], "--losses-out", str(folder / f"{name}-losses.json"))}
        for name, training in wanted.items()
    }
    return trainings.train(with_losses, folder, ranks)


OF_EACH_SCHEME: Final = ("pp2", *SAME_LOSSES, *SAME_LOSSES.values())


@functools.cache
def _runs(ranks: int) -> Mapping[str, Run]:
    kept = [name for name in OF_EACH_SCHEME if name in WANTED[ranks]]
    return trainings.TwoStarts(WANTED[ranks], kept, partial(_trained, ranks=ranks))


RUNS: Final[dict[int, Callable[[], Mapping[str, Run]]]] = {ranks: partial(_runs, ranks) for ranks in WANTED}
MORE_RUNS: Final = {ranks: trainings.once(partial(_trained, MORE[ranks], ranks)) for ranks in MORE}


def run(name: str) -> Run:
    """Return the run of a training of WANTED."""
    return RUNS[NAMES[name]]()[name]


def more(name: str) -> Run:
    """Return the run of a training of MORE."""
    return MORE_RUNS[MORE_NAMES[name]]()[name]


def losses(name: str) -> list[float]:
    """Return rank 0's own loss of every step."""
    path = run(name).log.path.parent / f"{name}-losses.json"
    return [float.fromhex(loss) for loss in json.loads(path.read_text())["losses"]]


def described(training: dict[str, Any], ranks: int, folder: Path) -> tuple[dict[str, Any], ...]:
    """Return the job rows of a training's stages, derived from its configuration alone."""
    return tuple(row.to_json() for row in trainings.planned(training, ranks, folder).rows)
