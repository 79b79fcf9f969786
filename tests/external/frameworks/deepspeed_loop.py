"""A loop with DeepSpeed alone: deepspeed_loop.py 1|2|3|moe [resume]. It evaluates, saves, and loads."""

from __future__ import annotations

import sys
from typing import Any

import cpu_ranks
import torch
from torch import nn


def model_of(row: str) -> Any:
    """Return a model of four layers; with experts, the third one is a mixture of two, on two ranks."""
    from deepspeed.moe.layer import MoE

    layers: list[nn.Module] = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
    if row == "moe":
        layers[2] = _First(MoE(32, layers[2], num_experts=2, ep_size=2, k=1, min_capacity=0))
    return nn.Sequential(*layers)


class _First(nn.Module):
    """A layer that returns only the first result of another."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layer(inputs)[0]


def main() -> None:
    """Train three steps of two micro-batches, evaluate, save and load."""
    row, resume = sys.argv[1], "resume" in sys.argv[2:]
    cpu_ranks.without_compiler()
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    model = model_of(row)
    parameters: Any = list(model.parameters())
    if row == "moe":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        parameters = split_params_into_different_moe_groups_for_optimizer({"params": parameters, "name": "all"})
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2 if row == "moe" else int(row), "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(parameters, lr=1e-3), config=config, dist_init_required=False
    )
    if resume:
        engine.load_checkpoint("state")
    rank = torch.distributed.get_rank()
    inputs = torch.randn(12, 2, 32, generator=torch.Generator().manual_seed(rank))
    losses = []
    for batch in inputs[:6]:
        loss = nn.functional.mse_loss(engine(batch), batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        losses += [nn.functional.mse_loss(engine(batch), batch).item() for batch in inputs[6:8]]
    engine.train()
    engine.save_checkpoint("state", tag=f"{len(losses)}")
    print(f"losses {rank} {losses}\n", end="")  # one write, because all ranks print


if __name__ == "__main__":
    main()
