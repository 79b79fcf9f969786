"""Real trainings of models that distribute sequences or experts over ranks: four ranks, all in one start."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from typing import Any, Final

import trainings

from commtrace.run import Run

RANKS: Final = 4
MANY: Final = 8


def one(which: str, precision: str = "fp32", accumulation: int = 2, **keys: Any) -> dict[str, Any]:
    """Return a training with the engine `which`, "ddp" or ZeRO's stage; `keys` are GPT-NeoX's."""
    engine = ("--engine", "ddp") if which == "ddp" else ("--zero-stage", which)
    options = (*engine, "--precision", precision, "--gradient-accumulation", str(accumulation))
    if "checkpoint_num_layers" in keys or "checkpoint_reentrant" in keys:
        keys = {"checkpoint_activations": True, **keys}
    return {"model": {"seq_length": 16, **keys}, "options": options}


def megatron(ranks: int, which: str, precision: str = "fp32", **keys: Any) -> dict[str, Any]:
    """Return a training with Megatron's sequence parallelism."""
    return one(which, precision, model_parallel_size=ranks, sequence_parallel=True, **keys)


MEGATRON: Final[dict[str, dict[str, Any]]] = {
    "sp2-ddp": megatron(2, "ddp"),
    "sp2-ddp-again": megatron(2, "ddp", "bf16", checkpoint_reentrant=False, gradient_clipping=0.0),
    "sp2-zero0": megatron(2, "0", gpt_j_residual=True),
    "sp2-zero1-again": megatron(2, "1", "bf16", checkpoint_num_layers=1),
    "sp2-zero1-early": megatron(2, "1", num_layers=3, checkpoint_num_layers=2, checkpoint_reentrant=False),
    "sp2-zero1-wide": megatron(2, "1", "bf16", fp32_allreduce=True, no_weight_tying=False),
    "sp2-zero2": megatron(2, "2", gpt_j_residual=True, checkpoint_reentrant=False),
    "sp4-zero1": megatron(4, "1", "bf16"),
}


def ulysses(ranks: int, which: str, precision: str = "fp32", **keys: Any) -> dict[str, Any]:
    """Return a training with DeepSpeed's sequence parallelism."""
    return one(which, precision, sequence_parallel_size=ranks, **keys)


ULYSSES: Final[dict[str, dict[str, Any]]] = {
    "ulysses2-zero0": ulysses(2, "0"),
    "ulysses2-zero0-bf16": ulysses(2, "0", "bf16", gradient_clipping=0.0),
    "ulysses2-zero1-again": ulysses(2, "1", "bf16", checkpoint_reentrant=True),
    # Reduced in fp32 nevertheless: ZeRO accepts no other type with sequence parallelism. A bucket ends between the
    # weight and the bias of a norm, which belong to two ranks: their order determines sizes.
    "ulysses2-zero2-owners": ulysses(
        2,
        "2",
        "bf16",
        deepspeed_extra_args={"seq_parallel_communication_data_type": "bf16"},
        zero_optimization={"use_multi_rank_bucket_allreduce": False, "reduce_bucket_size": 27_768},
    ),
    "ulysses2-zero2-all": ulysses(2, "2", "bf16", zero_optimization={"reduce_scatter": False}),
    "ulysses4-zero1": ulysses(4, "1", num_layers=3, checkpoint_num_layers=2, checkpoint_reentrant=False),
}


def ring(ranks: int, which: str, precision: str = "fp32", **keys: Any) -> dict[str, Any]:
    """Return a training with context parallelism."""
    return one(which, precision, context_parallel_size=ranks, **keys)


RING: Final[dict[str, dict[str, Any]]] = {
    "ring2-ddp": ring(2, "ddp"),
    "ring4-ddp-again": ring(4, "ddp", "bf16", checkpoint_reentrant=True),
    "ring2-zero0": ring(2, "0", "bf16"),
    "ring4-zero1": ring(4, "1", "bf16", num_layers=3, checkpoint_num_layers=2, checkpoint_reentrant=False),
    "ring2-zero2": ring(2, "2", gpt_j_residual=True),
    "ring2-zero3": ring(2, "3", "bf16", zero_optimization={"stage3_param_persistence_threshold": 500}),
    # A bucket ends between a matrix and its bias: their order determines sizes. After ZeRO-3, which changes the order.
    "ring2-zero2-cut": ring(
        2,
        "2",
        num_layers=3,
        hidden_size=32,
        seq_length=4,
        train_micro_batch_size_per_gpu=2,
        gradient_clipping=0.0,
        zero_optimization={"reduce_bucket_size": 45_185},
    ),
}


BOUNDED: Final = ("moe4x2-kept", "moe4x4-kept")
"""Trainings whose sizes depend on the data."""


def mixture(experts: int, ranks: int, which: str, precision: str = "fp32", **keys: Any) -> dict[str, Any]:
    """Return a training with experts over `ranks` ranks, which drop tokens beyond their capacity."""
    sizes = {"moe_num_experts": experts, "moe_expert_parallel_size": ranks}
    return one(which, precision, **{**sizes, "moe_token_dropping": True, **keys})


EXPERTS: Final[dict[str, dict[str, Any]]] = {
    "moe4x2-zero0": mixture(4, 2, "0"),
    "moe4x2-zero0-bf16": mixture(4, 2, "0", "bf16", moe_top_k=2, checkpoint_reentrant=True),
    "moe4x4-zero1": mixture(4, 4, "1", moe_train_capacity_factor=1.1, zero_optimization={"reduce_bucket_size": 20_000}),
    "moe4x2-zero2": mixture(4, 2, "2", "bf16", num_layers=3, moe_expert_interval=2, checkpoint_reentrant=False),
    "moe2x1-zero1": mixture(2, 1, "1", moe_min_capacity=50),
    "moe4x2-kept": mixture(4, 2, "1", "bf16", moe_token_dropping=False, checkpoint_reentrant=True),
    "moe4x4-kept": mixture(4, 4, "0", moe_token_dropping=False, moe_top_k=2),
    "moe8x2-zero2-owners": mixture(
        8, 2, "2", moe_top_k=3, zero_optimization={"use_multi_rank_bucket_allreduce": False, "overlap_comm": False}
    ),
}


def draw_megatron(chance: random.Random) -> dict[str, Any]:
    """Draw a tensor-parallel model that uses Megatron's sequence parallelism."""
    training = trainings.draw_shared(chance)
    model = training["model"]
    ranks = model["model_parallel_size"]
    length = ranks * chance.randint(1, 4)
    model.update(sequence_parallel=True, seq_length=length, max_position_embeddings=length)
    return training


def draw_mixture(chance: random.Random) -> dict[str, Any]:
    """Draw a model with experts."""
    ranks = chance.choice((1, 2, 4))
    heads = chance.randint(1, 3)
    return mixture(
        ranks * chance.randint(1, 3) + (ranks == 1),
        ranks,
        chance.choice("012"),
        chance.choice(("fp32", "bf16")),
        num_layers=chance.randint(1, 3),
        num_attention_heads=heads,
        hidden_size=heads * chance.choice((8, 24)),
        seq_length=chance.randint(5, 16),
        train_micro_batch_size_per_gpu=chance.randint(1, 3),
        moe_expert_interval=chance.randint(1, 2),
        moe_train_capacity_factor=chance.choice((0.3, 1.0, 1.1, 2.0)),
        moe_min_capacity=chance.randint(0, 5),
        gradient_clipping=chance.choice((0.0, 1.0)),
        checkpoint_num_layers=chance.randint(1, 2),
        checkpoint_reentrant=chance.random() < 0.5,
        zero_optimization={
            "overlap_comm": chance.random() < 0.5,
            "reduce_bucket_size": chance.randint(500, 20_000),
            "use_multi_rank_bucket_allreduce": chance.random() < 0.5,
            "round_robin_gradients": chance.random() < 0.5,
        },
    )


def draw_parts(chance: random.Random) -> dict[str, Any]:
    """Draw a model with DeepSpeed's sequence parallelism or context parallelism."""
    ranks = chance.choice((2, 4))
    heads = ranks * chance.randint(1, 2)
    way, stages = chance.choice(((ulysses, "012"), (ring, ("ddp", "0", "1", "2"))))
    return way(
        ranks,
        chance.choice(stages),
        chance.choice(("fp32", "bf16")),
        num_layers=chance.randint(1, 3),
        num_attention_heads=heads,
        hidden_size=heads * chance.choice((8, 16)),
        seq_length=ranks * chance.randint(1, 4),
        train_micro_batch_size_per_gpu=chance.randint(1, 3),
        gradient_clipping=chance.choice((0.0, 1.0)),
        checkpoint_activations=chance.random() < 0.5,
        checkpoint_num_layers=chance.randint(1, 2),
        checkpoint_reentrant=chance.random() < 0.5,
        zero_optimization={"reduce_bucket_size": chance.randint(2_000, 60_000)},
    )


def drawn() -> dict[str, dict[str, Any]]:
    """Return the models drawn from the seed."""
    chance = random.Random(trainings.seed() + 2)
    kinds = {"sp": draw_megatron, "parts": draw_parts, "moe": draw_mixture}
    return {f"drawn-{kind}-{number}": draw(chance) for kind, draw in kinds.items() for number in range(2)}


_LONG: Final = (
    *("sp2-ddp-again", "sp2-zero1-again", "sp4-zero1", "sp2-zero2", "ulysses2-zero1-again", "ulysses2-zero2-all"),
    *("ring4-ddp-again", "ring2-zero2", "ring2-zero0", "moe4x2-zero0", "moe2x1-zero1", "moe4x4-kept"),
)
_ALL: Final = {**MEGATRON, **ULYSSES, **RING, **EXPERTS}

FIXED: Final = {name: training for name, training in _ALL.items() if name not in _LONG}
"""Trainings of every test run; tests/ranks/theory/test_rules.py compares them with broken rules."""
DRAWN: Final = ("drawn-sp-0", "drawn-sp-1", "drawn-parts-0", "drawn-parts-1", "drawn-moe-0", "drawn-moe-1")
MORE: Final = (*_LONG, *DRAWN)
EIGHT: Final[dict[str, dict[str, Any]]] = {
    "eight-sp4-zero2": megatron(4, "2", "bf16", checkpoint_reentrant=False),
    "eight-ulysses4-zero1": ulysses(4, "1", "bf16"),
    "eight-ring8-ddp": ring(8, "ddp"),
    "eight-moe8x4-zero2": mixture(8, 4, "2", moe_top_k=2, checkpoint_reentrant=True),
}


def wanted(name: str) -> dict[str, Any]:
    """Return the training of this name."""
    return {**_ALL, **EIGHT, **drawn()}[name]


OF_EACH_SCHEME: Final = ("sp2-zero0", "ulysses2-zero0", "ring2-zero3", "moe4x2-zero2", "moe4x2-kept")


@functools.cache
def runs() -> Mapping[str, Run]:
    """Return the runs of FIXED by name."""
    return trainings.TwoStarts(FIXED, OF_EACH_SCHEME, functools.partial(trainings.trained, processes=RANKS))


@trainings.once
def more() -> dict[str, Run]:
    """Return the runs of MORE by name."""
    return trainings.trained({name: wanted(name) for name in MORE}, processes=RANKS)


@trainings.once
def eight() -> dict[str, Run]:
    """Return the runs of EIGHT by name."""
    return trainings.trained(EIGHT, processes=MANY)
