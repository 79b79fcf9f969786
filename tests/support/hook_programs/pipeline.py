"""python pipeline.py FOLDER: a DeepSpeed engine trained in torch's style, its pipeline of two stages, and Ulysses."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

WIDTH, PARTS = 8, 4
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": PARTS,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "steps_per_print": 1000,
}

torch_deepspeed: Any = sys.modules["deepspeed.comm.torch"]
torch_deepspeed.build_shm_op = lambda: None  # would take a minute to compile
# A stand-in for the operator that DeepSpeed would compile.
library = torch.library.Library("deepspeed", "DEF")
library.define("inference_all_reduce_(Tensor(a!) self) -> Tensor(a!)")
library.impl("inference_all_reduce_", lambda tensor: tensor.mul_(2), "CPU")

deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
RANK = dist.get_rank()
results: dict[str, Any] = {}


def layers() -> list[torch.nn.Module]:
    torch.manual_seed(1)
    return [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]


def mark(name: str) -> None:
    results[name] = time.monotonic_ns()


def data() -> Any:
    while True:
        yield torch.ones(2, WIDTH), torch.ones(2, WIDTH)


def train_pipeline() -> None:
    model = PipelineModule(layers(), num_stages=2, loss_fn=torch.nn.MSELoss(), partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    for step in range(2):
        mark(f"pipeline step {step}")
        engine.train_batch(data())
    mark("evaluation")
    engine.eval_batch(data())
    mark("pipeline end")


def train_as_torch_does() -> None:
    """Call backward() of the loss and not of the engine."""
    model = torch.nn.Sequential(*layers())
    config = {**CONFIG, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    mark("torch style")
    for _ in range(2):
        for _ in range(2):
            engine(torch.ones(2, WIDTH)).sum().backward()
            engine.step()
    mark("no grad")
    with torch.no_grad():
        engine(torch.ones(2, WIDTH))
        dist.all_reduce(torch.ones(1))
    mark("torch style end")


def step_the_optimizer() -> None:
    """Take steps of the engine's optimizer and not of the engine, as Lightning Fabric does."""
    model = torch.nn.Sequential(*layers())
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={**CONFIG, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}},
    )
    mark("optimizer's steps")
    for _ in range(2):
        engine.backward(engine(torch.ones(2, WIDTH)).sum())
        optimizer.step()
    mark("optimizer's end")


def share_sequences() -> None:
    """Attend as Ulysses does, and sum up the losses of the parts of a sequence."""
    from deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy
    from deepspeed.sequence.layer import DistributedAttention

    query = torch.ones(PARTS, 2, 4, WIDTH, requires_grad=True)
    attend = DistributedAttention(lambda query, key, value: query + key + value, dist.group.WORLD, 2, 1)
    mark("sequence forward")
    output = attend(query, query, query, 0)
    mark("sequence backward")
    output.sum().backward()
    mark("sequence loss")
    logits = torch.ones(PARTS, 2, WIDTH, requires_grad=True)
    vocab_sequence_parallel_cross_entropy(logits, torch.zeros(PARTS, 2, dtype=torch.long), dist.group.WORLD)
    mark("sequence end")


train_as_torch_does()
step_the_optimizer()
train_pipeline()
share_sequences()
mark("shared memory")
shared = torch.ones(6)
torch.ops.deepspeed.inference_all_reduce_(shared)
results["shared"] = shared.tolist()
mark("end")
(Path(sys.argv[1]) / f"rank{RANK}.json").write_text(json.dumps(results))
dist.destroy_process_group()
