"""python live_numbers.py FILE KIND STEPS: a training that writes the numbers of its steps to a file.

KIND: "loop", a loop of DistributedDataParallel; "deepspeed", an engine with a monitor that writes CSV files; "trainer",
Hugging Face's Trainer; "lightning", Lightning, with CSV files; "killed", a loop that ends by SIGKILL while its numbers
are read; "unread", one that never asks for its last steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commtrace import live

LIMIT_SECONDS = 30


def train_loop(file: Path, kind: str, steps: int) -> None:
    """Train with DDP. Rank 0 writes what it got, the longest time of a call on its thread, and the follower's pid."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    metrics = live.step_metrics()
    found: list[live.StepMetrics | Any] = []
    cpu_ns = []
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        if dist.get_rank() == 0:
            began = time.thread_time_ns()
            found += metrics.new()
            cpu_ns.append(time.thread_time_ns() - began)
    pid = metrics._follower._process.pid if metrics._follower is not None else 0
    if dist.get_rank() == 0:
        if kind == "loop":
            found += metrics.end()
        ends = time.monotonic() + LIMIT_SECONDS
        while not found and kind != "loop" and time.monotonic() < ends:  # the process that reads has begun
            time.sleep(0.1)
            found += metrics.new()
        file.write_text(json.dumps({"steps": found, "cpu_ns": cpu_ns, "pid": pid}))
    if kind == "killed":
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


def train_engine(file: Path, steps: int) -> None:
    """Train with DeepSpeed; its monitor writes below the file's folder."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now, which takes minutes
    config = {
        "train_batch_size": 4,
        "steps_per_print": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "csv_monitor": {"enabled": True, "output_path": str(file.parent), "job_name": "csv"},
    }
    deepspeed.init_distributed("gloo")
    model = nn.Linear(8, 8)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    monitor = live.DeepSpeedMonitor(engine)
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        monitor.update()
        time.sleep(0.05)
    monitor.end()
    dist.destroy_process_group()


def train_trainer(file: Path, steps: int) -> None:
    """Train with Hugging Face's Trainer. Rank 0 writes its history."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        """Returns a loss, as the Trainer wants it."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.linear(x).sum()}

    class Pause(TrainerCallback):  # type: ignore[misc]
        """Makes steps last long enough to be read while training."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            time.sleep(0.05)

    arguments = TrainingArguments(
        str(file.parent), max_steps=steps, logging_steps=1, use_cpu=True, per_device_train_batch_size=2,
        report_to=["tensorboard"], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = [{"x": torch.ones(8)}] * 1000
    trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[Pause()])
    live.trainer_callback(trainer)
    trainer.train()
    if trainer.is_world_process_zero():
        file.write_text(json.dumps(trainer.state.log_history))


def train_lightning(file: Path, steps: int) -> None:
    """Train with Lightning, which logs the loss of each step, too."""
    import lightning as pl
    from lightning.pytorch.loggers import CSVLogger

    class Model(pl.LightningModule):  # type: ignore[misc]
        """A linear layer."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            time.sleep(0.05)
            loss: torch.Tensor = self.linear(batch).sum()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), max_steps=steps, log_every_n_steps=1,
        logger=CSVLogger(file.parent, "csv"), callbacks=[live.lightning_callback()], enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip
    data: Any = [torch.ones(8)] * 1000
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=2))


path, what, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
frameworks = {"deepspeed": train_engine, "trainer": train_trainer, "lightning": train_lightning}
if what in frameworks:
    frameworks[what](path, number)
else:
    train_loop(path, what, number)
