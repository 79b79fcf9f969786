"""Real trainings to compare theory with: many in one start of two to four processes, each with its own log.

`shapes()`: three models drawn at random (THEORY_SEED draws others), each under DDP and ZeRO-0 to 3, in fp32 and bf16,
with one and four micro-batches; `more_shapes()`: the other pairs of precision and micro-batches. `variants()`: settings
that change what DDP and DeepSpeed communicate, on three ranks, because few sizes are divisible by three. `shared()`:
tensor-parallel models on four ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import ranks
from ports import free_port

from commtrace.run import Run, open_run
from examples.gpt_neox.theory import register

if TYPE_CHECKING:
    from commtrace.theory.forecast import JobPlan

register()

ENGINES: Final = ("ddp", "0", "1", "2", "3")
SECONDS_A_RANK: Final = 150
"""Time limit of a start for all its trainings, per rank, because ranks share two cores."""
TIMEOUT: Final = pytest.mark.timeout(8 * SECONDS_A_RANK + 100)
"""For the first test, which waits for such a start."""

# Modules that each rank would otherwise import at its first optimizer, which takes seconds.
_IMPORTS: Final = (
    "deepspeed",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "examples.gpt_neox.train",
    "torch._dynamo",
    "torch.distributed.fsdp",
)
_VARIABLES: Final = {"DS_ACCELERATOR": "cpu", "TORCHINDUCTOR_COMPILE_THREADS": 1, "COMMTRACE": ""}

_folders: list[tempfile.TemporaryDirectory[str]] = []  # kept until the tests end


def seed() -> int:
    """Return the seed that decides which models are drawn: always the same, unless THEORY_SEED is set."""
    return int(os.environ.get("THEORY_SEED") or 1)


def draw(chance: random.Random) -> dict[str, Any]:
    """Draw keys of a small GPT-NeoX model and of DeepSpeed's buckets."""
    heads = chance.randint(1, 4)
    return {
        "num_layers": chance.randint(1, 3),
        "num_attention_heads": heads,
        "hidden_size": heads * chance.choice((8, 16, 24)),
        "seq_length": chance.randint(4, 12),
        "max_position_embeddings": 12,
        "make_vocab_size_divisible_by": chance.choice((1, 37, 128)),
        "train_micro_batch_size_per_gpu": chance.randint(1, 2),
        "gradient_clipping": chance.choice((0.0, 1.0)),
        "zero_optimization": {
            "overlap_comm": chance.random() < 0.5,
            "reduce_bucket_size": chance.randint(2_000, 60_000),
            "stage3_param_persistence_threshold": chance.choice((0, 100, 3_000, 100_000)),
            "stage3_prefetch_bucket_size": chance.choice((0, 1_000, 10_000, 10**8)),
            "stage3_max_live_parameters": chance.choice((5_000, 40_000, 10**9)),
            "stage3_max_reuse_distance": chance.choice((0, 20_000, 10**9)),
        },
    }


def once(train_all: Callable[[], dict[str, Run]]) -> Callable[[], dict[str, Run]]:
    """Return a function that trains once, and then returns the same runs or raises the same failure again."""
    kept: list[dict[str, Run] | BaseException] = []

    @functools.wraps(train_all)
    def runs() -> dict[str, Run]:
        if not kept:
            try:
                kept.append(train_all())
            except BaseException as error:
                kept.append(error)
        if isinstance(kept[0], BaseException):
            raise kept[0]
        return kept[0]

    return runs


class TwoStarts(Mapping[str, Run]):
    """Runs by name. One start trains the representatives, a second one all others, each when first needed."""

    def __init__(
        self,
        wanted: dict[str, dict[str, Any]],
        representatives: Sequence[str],
        train_all: Callable[[dict[str, dict[str, Any]]], dict[str, Run]],
    ) -> None:
        kept = {name: wanted[name] for name in representatives}
        others = {name: training for name, training in wanted.items() if name not in kept}
        starts = [(names, once(functools.partial(train_all, names))) for names in (kept, others)]
        self._start_of = {name: start for names, start in starts for name in names}

    def __getitem__(self, name: str) -> Run:
        return self._start_of[name]()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._start_of)

    def __len__(self) -> int:
        return len(self._start_of)


def parameters(names: Iterable[str], representatives: Iterable[str], *before: object) -> list[Any]:
    """Return names as test parameters (after `before`); those that are not representatives are exhaustive."""
    kept = set(representatives)
    return [pytest.param(*before, name, marks=() if name in kept else pytest.mark.exhaustive) for name in names]


def wanted_shapes() -> dict[str, dict[str, Any]]:
    """Return three models with each engine, precision and number of micro-batches, named as "0-zero3-bf16-4"."""
    chance = random.Random(seed())
    models = [draw(chance) for _ in range(3)]
    wanted: dict[str, dict[str, Any]] = {}
    for engine, number, precision, parts in _SHAPES:
        which = ("--engine", "ddp") if engine == "ddp" else ("--zero-stage", engine)
        options = (*which, "--precision", precision, "--gradient-accumulation", str(parts))
        wanted[_shape(engine, number, precision, parts)] = {"model": models[number], "options": options}
    return wanted


def _shape(engine: str, number: int, precision: str, parts: int) -> str:
    return f"{number}-{engine if engine == 'ddp' else f'zero{engine}'}-{precision}-{parts}"


_SHAPES: Final = tuple(itertools.product(ENGINES, range(3), ("fp32", "bf16"), (1, 4)))
SHAPES: Final = tuple(
    _shape(engine, number, precision, parts)
    for engine, number, precision, parts in _SHAPES
    if ((precision, parts) in (("fp32", 1), ("bf16", 4))) == (number != 1)
)
"""Trainings of every test run: each model with each engine, in both precisions, with one and four micro-batches."""
MORE_SHAPES: Final = tuple(_shape(*values) for values in _SHAPES if _shape(*values) not in SHAPES)


@once
def shapes() -> dict[str, Run]:
    """Return the runs of SHAPES by name."""
    return trained({name: wanted_shapes()[name] for name in SHAPES}, processes=2)


@once
def more_shapes() -> dict[str, Run]:
    """Return the runs of MORE_SHAPES by name."""
    return trained({name: wanted_shapes()[name] for name in MORE_SHAPES}, processes=2)


def _zero(stage: int, precision: str = "fp32", top: dict[str, Any] | None = None, **zero: Any) -> dict[str, Any]:
    options = ("--zero-stage", str(stage), "--precision", precision, "--gradient-accumulation", "2")
    return {"model": {"num_layers": 1, **(top or {}), "zero_optimization": zero}, "options": options}


def _plain_zero_3(partitioned_layers: int) -> dict[str, Any]:
    settings = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 50},
    }
    return {"deepspeed": settings, "zero_init": partitioned_layers}


VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "ddp": {"ddp": {}},
    "ddp-unused": {"ddp": {"find_unused_parameters": True, "bucket_cap_mb": 0.0002}},
    "ddp-static": {"ddp": {"static_graph": True, "broadcast_buffers": False, "bucket_cap_mb": 0.0005}},
    "ddp-caps": {"ddp": {"bucket_cap_mb_list": [0.0004, 0.002]}},
    "zero0": _zero(0),
    "zero0-unclipped": _zero(0, top={"gradient_clipping": 0.0}),
    "zero1": _zero(1, reduce_bucket_size=30_000),
    "zero1-after": _zero(1, overlap_comm=False, reduce_bucket_size=30_000),
    "zero1-round": _zero(
        1,
        "bf16",
        round_robin_gradients=True,
        parameter_alignment=True,
        use_multi_rank_bucket_allreduce=False,
        reduce_bucket_size=20_000,
    ),
    "zero1-no-norm": _zero(1, top={"gradient_clipping": 0.0}, compute_grad_norm=False),
    "zero2": _zero(2, "bf16", reduce_bucket_size=20_000),
    "zero2-owners": _zero(2, use_multi_rank_bucket_allreduce=False, reduce_bucket_size=40_000),
    "zero2-all": _zero(2, "bf16", reduce_scatter=False, overlap_comm=False),
    "zero2-scattered": _zero(2, contiguous_gradients=False),
    "zero2-fp32": _zero(2, "bf16", top={"fp32_allreduce": True}),
    "zero3": _zero(3, "bf16", reduce_bucket_size=50_000),
    "zero3-limits": _zero(
        3,
        stage3_param_persistence_threshold=5_000,
        stage3_prefetch_bucket_size=30_000,
        stage3_max_live_parameters=120_000,
        stage3_max_reuse_distance=100_000,
        reduce_bucket_size=50_000,
    ),
    "zero3-nothing-kept": _zero(
        3,
        stage3_param_persistence_threshold=0,
        stage3_prefetch_bucket_size=0,
        stage3_max_reuse_distance=0,
    ),
    "zero3-little-room": _zero(
        3,
        stage3_param_persistence_threshold=0,
        stage3_prefetch_bucket_size=30_000,
        stage3_max_live_parameters=1_000,
        stage3_max_reuse_distance=0,
    ),
    "zero3-one-by-one": _zero(
        3, "bf16", allgather_sequential=True, stage3_param_persistence_threshold=500, sub_group_size=30_000
    ),
    "zero3-all": _zero(3, reduce_scatter=False),
    "zero3-partitioned-late": _plain_zero_3(0),
    "zero3-partitioned-partly-late": _plain_zero_3(2),
    "zero3-few-persist": _zero(3, stage3_param_persistence_threshold=1_000, stage3_model_persistence_threshold=1_500),
}


VARIANT_OF_EACH_SCHEME: Final = (
    "ddp", "zero0", "zero1", "zero2", "zero2-owners", "zero3", "zero3-partitioned-partly-late",
)  # fmt: skip


@functools.cache
def variants() -> Mapping[str, Run]:
    """Return the runs of VARIANTS by name, on three ranks."""
    return TwoStarts(VARIANTS, VARIANT_OF_EACH_SCHEME, functools.partial(trained, processes=3))


def _shared(ranks: int, which: str, precision: str = "fp32", **keys: Any) -> dict[str, Any]:
    """Return a tensor-parallel model; `keys` are GPT-NeoX's."""
    engine = ("--engine", "ddp") if which == "ddp" else ("--zero-stage", which)
    options = (*engine, "--precision", precision, "--gradient-accumulation", "2")
    if "checkpoint_num_layers" in keys or "checkpoint_reentrant" in keys:
        keys = {"checkpoint_activations": True, **keys}
    return {"model": {"model_parallel_size": ranks, "seq_length": 16, **keys}, "options": options}


SHARED: Final[dict[str, dict[str, Any]]] = {
    "tp2-ddp": _shared(2, "ddp"),
    "tp2-ddp-again": _shared(2, "ddp", "bf16", checkpoint_reentrant=False, gradient_clipping=0.0),
    "tp2-zero0": _shared(2, "0", gpt_j_residual=True),
    "tp2-zero0-bf16": _shared(2, "0", "bf16", gradient_clipping=0.0),
    "tp2-zero1": _shared(2, "1", zero_optimization={"reduce_bucket_size": 20_000}),
    "tp2-zero1-again": _shared(2, "1", "bf16", checkpoint_num_layers=1),
    "tp2-zero1-early": _shared(2, "1", num_layers=3, checkpoint_num_layers=2, checkpoint_reentrant=False),
    "tp2-zero1-dropout": _shared(2, "1", hidden_dropout=0.1, checkpoint_reentrant=False),
    "tp2-zero1-wide": _shared(2, "1", "bf16", fp32_allreduce=True, no_weight_tying=False),
    "tp2-zero2": _shared(2, "2", gpt_j_residual=True, checkpoint_reentrant=False),
    "tp4-zero1": _shared(4, "1", "bf16"),
    "tp4-ddp": _shared(4, "ddp"),
}


def draw_cut(chance: random.Random, ranks: int, layers: tuple[int, int]) -> dict[str, Any]:
    """Draw keys of a GPT-NeoX model for `ranks` tensor-parallel ranks, with `layers` (least, most) layers."""
    heads = ranks * chance.randint(1, 2)
    return {
        "num_layers": chance.randint(*layers),
        "num_attention_heads": heads,
        "hidden_size": heads * chance.choice((8, 16)),
        "seq_length": chance.randint(4, 12),
        "max_position_embeddings": 16,
        "make_vocab_size_divisible_by": chance.choice((1, 37, 128)),
        "train_micro_batch_size_per_gpu": chance.randint(1, 3),
        "gradient_clipping": chance.choice((0.0, 1.0)),
        "gpt_j_residual": chance.random() < 0.5,
        "no_weight_tying": chance.random() < 0.5,
        "fp32_allreduce": chance.random() < 0.3,
        "checkpoint_activations": chance.random() < 0.7,
        "checkpoint_num_layers": chance.randint(1, 3),
        "checkpoint_reentrant": chance.random() < 0.5,
        "zero_optimization": {"reduce_bucket_size": chance.randint(2_000, 60_000)},
    }


def draw_shared(chance: random.Random) -> dict[str, Any]:
    """Draw a tensor-parallel model."""
    ranks = chance.choice((2, 4))
    keys = draw_cut(chance, ranks, (1, 4))
    keys["zero_optimization"]["overlap_comm"] = chance.random() < 0.5
    return _shared(ranks, chance.choice(("ddp", "0", "1", "2")), chance.choice(("fp32", "bf16")), **keys)


DRAWN: Final = tuple(f"drawn-{number}" for number in range(4))


SHARED_OF_EACH_SCHEME: Final = ("tp2-ddp", "tp2-zero1")


@functools.cache
def shared() -> Mapping[str, Run]:
    """Return the runs of SHARED and DRAWN by name, on four ranks."""
    return TwoStarts({**SHARED, **drawn()}, SHARED_OF_EACH_SCHEME, functools.partial(trained, processes=4))


def drawn() -> dict[str, dict[str, Any]]:
    """Return the models of DRAWN, drawn from the seed."""
    chance = random.Random(seed() + 1)
    return {name: draw_shared(chance) for name in DRAWN}


def described(training: dict[str, Any], ranks: int, folder: Path) -> dict[str, Any]:
    """Return the job row of a training, derived from its configuration alone."""
    return planned(training, ranks, folder).row.to_json()


def planned(training: dict[str, Any], ranks: int, folder: Path) -> JobPlan:
    """Return the job that `commtrace theory` derives from a training's configuration."""
    from commtrace.theory.forecast import PlanOptions, plan_job
    from examples.gpt_neox.options import arguments

    config = folder / "described.yml"
    config.write_text(json.dumps(training["model"]))
    args = arguments().parse_args(["tiny", *training["options"]])
    options = PlanOptions(args.engine, args.zero_stage, args.precision, args.micro_batch, args.gradient_accumulation)
    return plan_job(["tiny", str(config)], ranks, options)


def trained(wanted: dict[str, dict[str, Any]], *, processes: int) -> dict[str, Run]:
    """Train each of these on `processes` ranks, in a directory that is kept until the tests end."""
    _folders.append(tempfile.TemporaryDirectory())
    return train(wanted, Path(_folders[-1].name), processes)


@functools.cache
def parent() -> ranks.Nursery:
    """Return a process that has imported everything; it runs until the tests end."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(ranks.Nursery("python", *_IMPORTS, **_VARIABLES))


def train(wanted: dict[str, dict[str, Any]], folder: Path, number: int) -> dict[str, Run]:
    """Train each of these on `number` ranks, in an empty directory."""
    orders = folder / "orders.json"
    orders.write_text(json.dumps([_order(folder, name, training) for name, training in wanted.items()]))
    started = parent().start("theory", folder / "logs", orders, ranks=number, traced=False)
    statuses = started.wait(SECONDS_A_RANK * number)
    assert statuses == [0] * number, "\n".join(started.output(rank)[-4000:] for rank in range(number))
    return {name: open_run(folder / name) for name in wanted}


def _order(folder: Path, name: str, training: dict[str, Any]) -> dict[str, Any]:
    order = {"log": str(folder / name), "port": free_port(), "variables": training.get("variables", {})}
    for plain in ("ddp", "fsdp", "deepspeed"):
        if plain in training:
            return {**order, **training}
    config = folder / f"{name}.yml"
    config.write_text(json.dumps(training["model"]))
    return {**order, "arguments": ["tiny", str(config), *training["options"], "--train-iters", "3"]}
