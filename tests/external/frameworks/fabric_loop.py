"""A training loop with Lightning Fabric: fabric_loop.py ddp|fsdp|zero2 [resume]."""

from __future__ import annotations

import sys
from typing import Any

import cpu_ranks
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy, ModelParallelStrategy
from lightning.fabric.strategies import deepspeed as deepspeed_strategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


def shard(model: Any, mesh: Any) -> Any:
    """Shard the layers and the model."""
    for layer in model:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def strategy(row: str) -> Any:
    """Return the strategy that chooses the parallelism."""
    if row == "ddp":
        return "ddp"
    if row == "fsdp":
        return ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    deepspeed_strategy.CUDAAccelerator = deepspeed_strategy.Accelerator
    devices = [torch.device("cpu", number) for number in range(2)]
    return DeepSpeedStrategy(parallel_devices=devices, stage=int(row[-1]), process_group_backend="gloo")


def main() -> None:
    """Train four steps, evaluate, and save; or load what an earlier run has saved, first."""
    row, resume = sys.argv[1], "resume" in sys.argv[2:]
    cpu_ranks.without_compiler()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy(row))
    fabric.launch()
    fabric.seed_everything(7)
    layers = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
    model: Any = nn.Sequential(*layers)
    if row == "fsdp":
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    else:
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(inputs), batch_size=2))
    if resume:
        fabric.load("state", {"model": model} if row == "zero2" else {"model": model, "optimizer": optimizer})
    losses = []
    for (batch,) in loader:
        loss = nn.functional.mse_loss(model(batch), batch)
        fabric.backward(loss)
        if row == "ddp":
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
    model.eval()
    with torch.no_grad():
        losses.append(fabric.all_gather(nn.functional.mse_loss(model(inputs), inputs)).mean().item())
    fabric.barrier()
    fabric.save("state", {"model": model, "optimizer": optimizer})
    fabric.print(f"losses {losses}")


if __name__ == "__main__":
    main()
