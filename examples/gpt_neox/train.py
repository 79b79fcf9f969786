"""Train a GPT-NeoX-style model: ``python -m examples.gpt_neox.train CONFIG.yml [CONFIG.yml ...]``.

Runs alone, or under torchrun, the deepspeed launcher, mpirun or srun::

    torchrun --standalone --nproc_per_node 2 -m examples.gpt_neox.train demo.yml --zero-stage 3
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from tqdm import tqdm

from commtrace.errors import CommtraceError, ConfigError
from commtrace.launchers import LaunchedProcess, find_process
from commtrace.network.process_exit import wait_for_threads
from commtrace.theory.configs.gpt_neox.config import check_engine

from .config import TrainingConfig, check_fsdp, load_config
from .data import RankData, load_samples
from .ddp_engine import DdpEngine
from .deepspeed_engine import DeepSpeedEngine, check_quantization, check_zero_block, prepare_import
from .fsdp_settings import FsdpSettings
from .options import arguments, overrides
from .pipeline_engine import PipelineEngine, check_stages


class Engine(Protocol):
    """Interface of the engines that train the model."""

    def train_step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run one optimizer step; return the mean loss of this rank's micro-batches."""

    def close(self) -> None:
        """Destroy the process group."""


def print_on_rank_0(process: LaunchedProcess, *lines: str) -> None:
    """Print on rank 0, above the progress bar."""
    if process.rank == 0:
        for line in lines:
            print(f"gpt_neox: {line}", file=sys.stderr, flush=True)


def choose_device(process: LaunchedProcess) -> torch.device:
    """Return this process's GPU, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", process.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def settle_precision(config: TrainingConfig, engine: str, device: torch.device) -> tuple[TrainingConfig, list[str]]:
    """Return the configuration with a precision that this device can train with, and a note about a change."""
    if config.precision != "fp16":
        return config, []
    if device.type == "cpu":
        notice = "fp16 needs a GPU; training in bf16, which has the same size (--precision fp32 for full precision)"
        return config.model_copy(update={"precision": "bf16", "precision_block": {}}), [notice]
    if engine != "deepspeed":
        raise ConfigError(f"fp16 needs DeepSpeed's loss scaling; give --precision bf16 or fp32 with --engine {engine}")
    return config, []


def notices(config: TrainingConfig, engine: str) -> list[str]:
    """Return notes about the configuration, shown before the first step."""
    notes = []
    if config.unknown_keys:
        notes.append(f"keys without a meaning here, ignored: {', '.join(config.unknown_keys)}")
    if engine != "deepspeed" and config.deepspeed_keys:
        notes.append(f"DeepSpeed's keys, ignored with --engine {engine}: {', '.join(sorted(config.deepspeed_keys))}")
    if engine != "fsdp" and config.fsdp != FsdpSettings():
        notes.append(f"the block fsdp, ignored with --engine {engine}")
    return notes


def seed_everything(seed: int) -> None:
    """Seed all ranks equally, so that they build the same model."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def make_engine(
    options: Namespace, config: TrainingConfig, device: torch.device, batch_shape: tuple[int, int]
) -> Engine:
    """Create the process group and the engine. Collective: all ranks call it."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if options.engine == "ddp":
        DdpEngine.initialise(backend)
        seed_everything(config.seed)
        return DdpEngine(config, device, *batch_shape)
    if options.engine == "fsdp":
        from .fsdp_engine import FsdpEngine  # imports torch.distributed.fsdp, which is slow

        FsdpEngine.initialise(backend)
        seed_everything(config.seed)
        return FsdpEngine(config, device, *batch_shape)
    kind = PipelineEngine if config.pipe_parallel_size > 1 else DeepSpeedEngine
    kind.initialise(backend, options.verbose)
    seed_everything(config.seed)
    return kind(config, device, *batch_shape, options.verbose)


def train(
    config: TrainingConfig, engine: Engine, data: RankData, device: torch.device, process: LaunchedProcess
) -> list[float]:
    """Run all steps; return the losses of this rank's data, one per step."""
    losses = []
    bar = tqdm(total=config.train_iters, desc="training", unit="step", disable=process.rank != 0, dynamic_ncols=True)
    for step in range(config.train_iters):
        begin = time.perf_counter()
        batches = [batch.to(device) for batch in data.step(step)]
        losses.append(engine.train_step(batches).item())
        tokens = config.data_parallel(process.world_size) * sum(batch[:, 1:].numel() for batch in batches)
        # The loss is not averaged over ranks, because that would add a communication call.
        bar.set_postfix_str(f"loss {losses[-1]:.4f} (rank 0's), {tokens / (time.perf_counter() - begin):,.0f} tokens/s")
        bar.update()
    bar.close()
    return losses


def write_losses(path: str, losses: Sequence[float], process: LaunchedProcess) -> None:
    """Write losses as hexadecimal floats, which are exact, to compare runs bit by bit."""
    content = {"world_size": process.world_size, "rank": process.rank, "losses": [loss.hex() for loss in losses]}
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def run(options: Namespace, process: LaunchedProcess) -> None:
    """Train from configuration files to the last step. All options are checked before anything starts."""
    config = load_config(options.configs, overrides(options))
    device = choose_device(process)
    config, changes = settle_precision(config, options.engine, device)
    if options.engine == "deepspeed":
        prepare_import(device, options.verbose)
        check_zero_block(config)
        check_quantization(config, device)
        if config.pipe_parallel_size > 1:
            check_stages(config)
    elif options.zero_stage:
        raise ConfigError(
            f"--zero-stage {options.zero_stage} is DeepSpeed's; leave it out with --engine {options.engine}"
        )
    check_engine(config, options.engine)
    data_parallel = config.data_parallel(process.world_size)
    if options.engine == "fsdp":
        config.fsdp.shards(data_parallel)
        check_fsdp(config)
    batch_shape = config.batch_shape(data_parallel)
    tokens = batch_shape[0] * config.seq_length
    if config.moe_num_experts > 1 and tokens < config.moe_min_capacity:
        raise ConfigError(
            f"{config.origins.get('moe_min_capacity', 'no file')}: moe_min_capacity: {config.moe_min_capacity} is more "
            f"than the {tokens} tokens of a micro-batch; set it to 0, or give longer sequences or more of them"
        )
    place = process.rank // config.ranks_per_sample % data_parallel
    data = RankData(load_samples(config, options.data), place, data_parallel, *batch_shape)
    print_on_rank_0(process, *notices(config, options.engine), *changes)

    engine = make_engine(options, config, device, batch_shape)
    losses = train(config, engine, data, device, process)
    # Not after an exception: other ranks may be in a collective, and this process must not wait for them.
    engine.close()
    wait_for_threads()
    if process.rank == 0 and options.losses_out:
        write_losses(options.losses_out, losses, process)
    losses_text = f"rank 0's own loss went from {losses[0]:.4f} to {losses[-1]:.4f}"
    print_on_rank_0(process, f"{len(losses)} steps done; {losses_text}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 after a complete training run, 2 for invalid options."""
    options = arguments().parse_args(argv)
    try:
        run(options, find_process(os.environ))
    except CommtraceError as error:
        print(f"gpt_neox: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
