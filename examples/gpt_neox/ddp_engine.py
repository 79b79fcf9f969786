"""Training with PyTorch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commtrace.theory.configs.gpt_neox.engine_settings import neox_args

from .config import TrainingConfig
from .model import GPTNeoX, language_model_loss, weight_decay_groups
from .mpu import make_mpu, shares_of
from .schedule import make_scheduler
from .tensor_parallel import clip_gradients, is_part


class DdpEngine:
    """Engine that replicates the model; DDP averages the gradients during the backward pass.

    In bf16 the model, its gradients and therefore the communication are bf16, and the optimizer works on fp32 copies of
    the parameters, as DeepSpeed does; with bf16 parameters alone, small updates would be rounded away.
    """

    def __init__(self, config: TrainingConfig, device: torch.device, micro_batch: int, accumulation: int) -> None:
        mpu = make_mpu(config)
        self._shares = shares_of(config, mpu)
        self._part = self._shares.parts.of
        with device:
            model = GPTNeoX(config, self._shares)
        model.neox_args = neox_args(config, micro_batch, accumulation)
        self._model = model.to(torch.bfloat16) if config.precision == "bf16" else model
        self._ddp = DistributedDataParallel(
            self._model,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=None if mpu is None else mpu.get_data_parallel_group(),
        )
        self._copies = _fp32_copies(self._model)
        groups = weight_decay_groups(self._model, config.weight_decay)
        for group in groups:
            group["params"] = [self._copies.get(p, p) for p in group["params"]]
        self._trained = [p for group in groups for p in group["params"]]
        self._optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(config.betas[0], config.betas[1]), eps=config.eps)
        self._scheduler = make_scheduler(config, self._optimizer)
        self._clipping = config.gradient_clipping

    @staticmethod
    def initialise(backend: str) -> None:
        """Create the process group, from the environment."""
        dist.init_process_group(backend)

    def train_step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run one optimizer step; return the mean loss of this rank's micro-batches (a scalar, without gradient)."""
        losses = []
        for index, batch in enumerate(micro_batches):
            with self._synchronise(index == len(micro_batches) - 1):
                loss = language_model_loss(self._ddp(self._part(batch[:, :-1])), self._part(batch[:, 1:]), self._shares)
                torch.autograd.backward(loss / len(micro_batches))
            losses.append(loss.detach())
        self._update()
        return torch.stack(losses).mean()

    @contextlib.contextmanager
    def _synchronise(self, wanted: bool) -> Iterator[None]:
        """Reduce gradients with the last micro-batch only; accumulate the others locally."""
        with contextlib.nullcontext() if wanted else self._ddp.no_sync():
            yield

    def _update(self) -> None:
        for parameter, copy in self._copies.items():
            copy.grad = None if parameter.grad is None else parameter.grad.float()
        if self._clipping:
            clip_gradients(self._trained, self._clipping, self._shares)
        self._optimizer.step()
        self._scheduler.step()
        with torch.no_grad():
            for parameter, copy in self._copies.items():
                parameter.copy_(copy)
        self._model.zero_grad()

    def close(self) -> None:
        """Release the model and destroy the process group."""
        # DDP first: otherwise its reducer releases the group last, and torch joins gloo's threads while it holds the
        # GIL, for which they may wait.
        del self._ddp
        dist.destroy_process_group()


def _fp32_copies(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Return fp32 copies of the parameters that are not fp32."""
    halves = [p for p in model.parameters() if p.dtype != torch.float32]
    copies = {p: nn.Parameter(p.detach().float()) for p in halves}
    for parameter, copy in copies.items():
        if is_part(parameter):
            copy.model_parallel = True  # type: ignore[attr-defined]
    return copies
