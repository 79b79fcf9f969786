"""Lightning's Trainer on a small model: lightning_fit.py ddp|fsdp|zero2|zero3."""

from __future__ import annotations

import sys
from typing import Any

import cpu_ranks
import lightning
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from lightning.pytorch.strategies import deepspeed as deepspeed_strategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):  # type: ignore[misc]
    """A model of four layers that logs its loss, averaged over the ranks."""

    def __init__(self, row: str) -> None:
        super().__init__()
        self.row = row
        layers = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
        self.layers = nn.Sequential(*layers)

    def configure_model(self) -> None:
        """Shard the layers and the model."""
        if self.row == "fsdp":
            for layer in self.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def loss(self, batch: Any, name: str) -> torch.Tensor:
        """Return the loss, and log it."""
        (inputs,) = batch
        loss = nn.functional.mse_loss(self.layers(inputs), inputs)
        self.log(name, loss, sync_dist=True)
        return loss

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Return the loss."""
        return self.loss(batch, "loss")

    def validation_step(self, batch: Any, index: int) -> torch.Tensor:
        """Return the loss."""
        return self.loss(batch, "validation_loss")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def strategy(row: str) -> Any:
    """Return the strategy that chooses the parallelism."""
    if row == "ddp":
        return "ddp"
    if row == "fsdp":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    deepspeed_strategy.CUDAAccelerator = CPUAccelerator
    devices = [torch.device("cpu", number) for number in range(2)]
    return DeepSpeedStrategy(parallel_devices=devices, stage=int(row[-1]), process_group_backend="gloo")


def main() -> None:
    """Train three steps of two micro-batches, and validate."""
    row = sys.argv[1]
    cpu_ranks.without_compiler()
    lightning.seed_everything(7)
    inputs = torch.randn(24, 32)
    clip = {"gradient_clip_val": 1.0} if row == "ddp" else {}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy(row), max_steps=3, accumulate_grad_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, **clip,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(inputs), batch_size=2)
    trainer.fit(Module(row), loader, loader)
    if trainer.is_global_zero:
        losses = {name: value.item() for name, value in trainer.callback_metrics.items()}
        print(f"losses {losses}")


if __name__ == "__main__":
    main()
