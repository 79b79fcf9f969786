"""A classifier under DeepSpeed, as in its tutorial: deepspeed user_deepspeed.py --deepspeed_config ds.json

The engine makes the optimizer, the learning rate schedule and the loader; all ranks save a checkpoint.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset


def add_arguments() -> argparse.Namespace:
    """Return the tutorial's arguments and DeepSpeed's own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-e", "--epochs", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=-1, help="passed by the launcher")
    parser.add_argument("--log-interval", type=int, default=2)
    parser.add_argument("--save-dir", default="")
    deepspeed.add_config_arguments(parser)
    return parser.parse_args()


class Net(nn.Module):
    """A network for images of 16 x 16 pixels in ten classes."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.first = nn.Linear(8 * 8 * 8, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.convolution(pictures)))
        x = torch.relu(self.first(x.flatten(1)))
        scores: torch.Tensor = self.last(torch.relu(self.second(x)))
        return scores


def pictures(count: int) -> TensorDataset:
    """Return noise with a bar, whose position is the class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (count,), generator=generator)
    images = torch.randn(count, 1, 16, 16, generator=generator)
    images[torch.arange(count), 0, labels] += 3
    return TensorDataset(images, labels)


def main() -> None:
    """Train."""
    args = add_arguments()
    deepspeed.init_distributed()
    torch.manual_seed(3)
    net = Net()
    parameters = filter(lambda parameter: parameter.requires_grad, net.parameters())
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=pictures(64)
    )
    criterion = nn.CrossEntropyLoss()
    dtype = next(engine.module.parameters()).dtype
    for epoch in range(args.epochs):
        running = 0.0
        for number, (images, labels) in enumerate(loader):
            outputs = engine(images.to(engine.device).to(dtype))
            loss = criterion(outputs.float(), labels.to(engine.device))
            engine.backward(loss)
            engine.step()
            running += loss.item()
            if number % args.log_interval == args.log_interval - 1:
                print(f"[{epoch}, {number}] loss: {running / args.log_interval:.3f}, lr {engine.get_lr()[0]:.1e}")
                running = 0.0
        if args.save_dir:
            engine.save_checkpoint(args.save_dir, tag=f"epoch{epoch}", client_state={"epoch": epoch})
    if engine.global_rank == 0:
        print("Finished training")


if __name__ == "__main__":
    main()
