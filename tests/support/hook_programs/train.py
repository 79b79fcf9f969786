"""python train.py FOLDER PROFILE ENGINE ...: trains a small model under each engine.

ENGINE is "ddp", "fsdp2", or a stage of ZeRO.

Writes losses and the times of each training to FOLDER/rank0.json; with PROFILE=1 also torch.profiler's trace to
FOLDER/ENGINE-rank0.json, and its execution trace, which has the element sizes of lists, to FOLDER/ENGINE-rank0.et.json.
With TRAIN_LOGS in the environment, each training is traced into its own log, TRAIN_LOGS/ENGINE.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commtrace

STEPS, ACCUMULATION, WIDTH = 3, 2, 24


def model() -> torch.nn.Module:
    torch.manual_seed(7)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 5)]
    return torch.nn.Sequential(*layers)


def batch(step: int, part: int) -> torch.Tensor:
    torch.manual_seed(1000 * dist.get_rank() + 10 * step + part)
    return torch.randn(3, WIDTH)


def train_fsdp2() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net: Any = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (net[0], net[3], net):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        loss = net(batch(step, 0)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_ddp() -> list[float]:
    replica = torch.nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(replica.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        for part in range(ACCUMULATION):
            with replica.no_sync() if part < ACCUMULATION - 1 else contextlib.nullcontext():
                loss = replica(batch(step, part)).square().mean()
                (loss / ACCUMULATION).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_zero(stage: int) -> list[float]:
    import deepspeed

    torch_deepspeed: Any = sys.modules["deepspeed.comm.torch"]
    torch_deepspeed.build_shm_op = lambda: None  # would take a minute to compile
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "steps_per_print": 1000,
    }
    net = model()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    losses = []
    for step in range(STEPS):
        for part in range(ACCUMULATION):
            loss = engine(batch(step, part)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.destroy()
    return losses


@contextlib.contextmanager
def profiled(stem: Path, enabled: bool) -> Iterator[None]:
    if not enabled:
        yield
        return
    observer = torch.profiler.ExecutionTraceObserver().register_callback(f"{stem}.et.json")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, record_shapes=True, execution_trace_observer=observer
    ) as profiler:
        yield
    profiler.export_chrome_trace(f"{stem}.json")


def main(folder: Path, profile: bool, engines: list[str]) -> None:
    rank, results, logs = int(os.environ["RANK"]), {}, os.environ.get("TRAIN_LOGS")
    for engine in engines:
        with profiled(folder / f"{engine}-rank{rank}", profile):
            begin = time.monotonic_ns()
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            train = {"ddp": train_ddp, "fsdp2": train_fsdp2}.get(engine)
            if logs:
                commtrace.start(Path(logs) / engine)
            losses = train_zero(int(engine)) if train is None else train()
            dist.barrier()
            end = time.monotonic_ns()
            if logs:
                commtrace.stop()
        entry: dict[str, Any] = {"begin": begin, "end": end, "losses": [loss.hex() for loss in losses]}
        results[engine] = entry
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


main(Path(sys.argv[1]), sys.argv[2] == "1", sys.argv[3:])
