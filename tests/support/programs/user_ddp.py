"""A classifier under DistributedDataParallel, as in tutorials: torchrun user_ddp.py --epochs 2

Mixed precision, gradient clipping, a learning rate with a warm-up, a checkpoint after each epoch, all ranks' loss.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points in the plane, labelled by their side of a spiral."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.points = torch.rand(count, 2, generator=generator) * 2 - 1
        radius, angle = self.points.norm(dim=1), torch.atan2(self.points[:, 1], self.points[:, 0])
        self.labels = (torch.sin(angle + 4 * radius) > 0).long()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index], self.labels[index]


def build(width: int) -> nn.Module:
    """Return the model."""
    return nn.Sequential(
        nn.Linear(2, width),
        nn.BatchNorm1d(width),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, 2),
    )


def mean_over_ranks(value: torch.Tensor) -> float:
    """Return the mean of a value over all ranks."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train_epoch(
    epoch: int,
    model: nn.Module,
    loader: DataLoader[tuple[torch.Tensor, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    scaler: torch.amp.GradScaler,
    device: torch.device,
) -> float:
    """Train an epoch, and return the mean loss."""
    model.train()
    running = 0.0
    for number, (points, labels) in enumerate(loader):
        points, labels = points.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(points), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        running += mean_over_ranks(loss)
        if math.isnan(running):
            raise SystemExit("the loss is not a number")
        if dist.get_rank() == 0 and number % 2 == 0:
            rate = schedule.get_last_lr()[0]
            print(
                f"epoch {epoch} batch {number} loss {loss.item():.4f} norm {float(norm):.3f} lr {rate:.2e}", flush=True
            )
    return running / len(loader)


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> float:
    """Return the accuracy over all ranks."""
    model.eval()
    counts = torch.zeros(2, device=device)
    for points, labels in loader:
        guesses = model(points.to(device)).argmax(dim=1).cpu()
        counts += torch.tensor([(guesses == labels).sum().item(), len(labels)], device=device)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def save(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, epoch: int, folder: Path) -> None:
    """Save a checkpoint on rank 0, while the others wait."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, folder / f"epoch-{epoch}.pt")
    dist.barrier()


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(1 + dist.get_rank())

    data = Points(200)
    sampler: DistributedSampler[tuple[torch.Tensor, torch.Tensor]] = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True)
    model = DistributedDataParallel(build(args.width).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=args.epochs * len(loader))
    scaler = torch.amp.GradScaler(device.type)
    best = math.inf
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        begin = time.perf_counter()
        loss = train_epoch(epoch, model, loader, optimizer, schedule, scaler, device)
        right = accuracy(model, loader, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, {right:.1%} right, {time.perf_counter() - begin:.1f} s", flush=True)
        best = min(best, loss)
        save(model, optimizer, epoch, args.checkpoints)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
