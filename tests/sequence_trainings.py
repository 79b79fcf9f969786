"""Real trainings of models whose sequence, or whose experts, are shared among ranks; four ranks, all in one start."""

from __future__ import annotations

import random
from typing import Any, Final

import trainings

from commtrace.reading.run import Run

RANKS: Final = 4


def one(which: str, precision: str = "fp32", accumulation: int = 2, **keys: Any) -> dict[str, Any]:
    """A training: "ddp" or ZeRO's stage; `keys` are GPT-NeoX's."""
    engine = ("--engine", "ddp") if which == "ddp" else ("--zero-stage", which)
    options = (*engine, "--precision", precision, "--gradient-accumulation", str(accumulation))
    if "checkpoint_num_layers" in keys or "checkpoint_reentrant" in keys:
        keys = {"checkpoint_activations": True, **keys}
    return {"model": {"seq_length": 16, **keys}, "options": options}


def megatron(ranks: int, which: str, precision: str = "fp32", **keys: Any) -> dict[str, Any]:
    """Megatron's sequence parallelism."""
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
    """DeepSpeed's sequence parallelism."""
    return one(which, precision, sequence_parallel_size=ranks, **keys)


ULYSSES: Final[dict[str, dict[str, Any]]] = {
    "ulysses2-zero0": ulysses(2, "0"),
    "ulysses2-zero0-bf16": ulysses(2, "0", "bf16", gradient_clipping=0.0),
    "ulysses2-zero1-again": ulysses(2, "1", "bf16", checkpoint_reentrant=True),
    "ulysses2-zero2-owners": ulysses(
        2, "2", "bf16", zero_optimization={"use_multi_rank_bucket_allreduce": False, "reduce_bucket_size": 20_000}
    ),
    "ulysses2-zero2-all": ulysses(2, "2", "bf16", zero_optimization={"reduce_scatter": False}),
    "ulysses4-zero1": ulysses(4, "1", num_layers=3, checkpoint_num_layers=2, checkpoint_reentrant=False),
}


def ring(ranks: int, which: str, precision: str = "fp32", **keys: Any) -> dict[str, Any]:
    """Context parallelism."""
    return one(which, precision, context_parallel_size=ranks, **keys)


RING: Final[dict[str, dict[str, Any]]] = {
    "ring2-ddp": ring(2, "ddp"),
    "ring4-ddp-again": ring(4, "ddp", "bf16", checkpoint_reentrant=True),
    "ring2-zero0": ring(2, "0", "bf16"),
    "ring4-zero1": ring(4, "1", "bf16", num_layers=3, checkpoint_num_layers=2, checkpoint_reentrant=False),
    "ring2-zero2": ring(2, "2", gpt_j_residual=True),
}


BOUNDED: Final = ("moe4x2-kept", "moe4x4-kept")
"""Whose sizes depend on the data."""


def mixture(experts: int, ranks: int, which: str, precision: str = "fp32", **keys: Any) -> dict[str, Any]:
    """Experts over so many ranks, that drop tokens beyond their capacity."""
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
    """A tensor-parallel model of another shape, whose sequence is shared."""
    found = trainings.draw_shared(chance)
    model = found["model"]
    ranks = model["model_parallel_size"]
    length = ranks * chance.randint(1, 4)
    model.update(sequence_parallel=True, seq_length=length, max_position_embeddings=length)
    return found


def drawn() -> dict[str, dict[str, Any]]:
    """Models that the seed decides."""
    chance = random.Random(trainings.seed() + 2)
    return {f"drawn-sp-{number}": draw_megatron(chance) for number in range(2)}


FIXED: Final = {**MEGATRON, **ULYSSES, **RING, **EXPERTS}
DRAWN: Final = ("drawn-sp-0", "drawn-sp-1")


def wanted() -> dict[str, dict[str, Any]]:
    """All of them by name."""
    return {**FIXED, **drawn()}


@trainings.once
def runs() -> dict[str, Run]:
    """Their runs by name."""
    return trainings.trained(wanted(), processes=RANKS)
