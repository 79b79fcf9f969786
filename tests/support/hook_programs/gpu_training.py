"""python gpu_training.py FOLDER ENGINE [STEPS]: trains a small GPT-2 of Hugging Face on the first GPU with NCCL.

ENGINE is "ddp", "fsdp2", "zero1" or "zero3". Writes FOLDER/ENGINE-rankN.json with losses and times; with PROFILE=1, the
profiler's trace of the last three steps (STACKS=1: with Python stacks) and the flight recorder's dump to FOLDER/traces.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GPU = torch.device("cuda", 0)
PROFILED, TOKENS, VOCABULARY = 3, 128, 1024


def gpt2() -> Any:
    torch.manual_seed(7)
    config = transformers.GPT2Config(
        n_layer=4, n_embd=512, n_head=8, vocab_size=VOCABULARY, n_positions=TOKENS, attn_implementation="eager",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).to(GPU)


def batch(step: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(1000 * RANK + step)
    return torch.randint(VOCABULARY, (4, TOKENS), generator=chance).to(GPU)


def by_torch(engine: str) -> Callable[[int], float]:
    model = gpt2()
    if engine == "ddp":
        trained: Any = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.transformer.h:
            fully_shard(block, mp_policy=policy)
        trained = fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)

    def step(number: int) -> float:
        tokens = batch(number)
        loss = trained(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def by_deepspeed(stage: int) -> Callable[[int], float]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "steps_per_print": 1000,
    }  # fmt: skip
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(number: int) -> float:
        tokens = batch(number)
        loss = engine(tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


@contextlib.contextmanager
def profiled(stem: Path, enabled: bool) -> Any:
    if not enabled:
        yield lambda: None
        return
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(
        activities=kinds, record_shapes=True, with_stack=os.environ.get("STACKS") == "1"
    ) as profiler:
        yield profiler.step
        torch.cuda.synchronize()
    stem.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(f"{stem}.json.gz")
    dump: Any = torch._C._distributed_c10d
    stem.with_suffix(".pickle").write_bytes(dump._dump_nccl_trace())


def main(folder: Path, engine: str, steps: int = 6) -> None:
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(GPU)
    dist.init_process_group("nccl", device_id=GPU)
    train = by_deepspeed(int(engine[-1])) if engine.startswith("zero") else by_torch(engine)
    losses = [train(number) for number in range(steps - PROFILED)]
    stem = folder / "traces" / f"{engine}-rank{RANK}"
    with profiled(stem, os.environ.get("PROFILE") == "1") as next_step:
        begin = time.monotonic_ns()
        for number in range(steps - PROFILED, steps):
            losses.append(train(number))
            next_step()
    told = {"begin": begin, "end": time.monotonic_ns(), "losses": [loss.hex() for loss in losses]}
    (folder / f"{engine}-rank{RANK}.json").write_text(json.dumps(told))
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
