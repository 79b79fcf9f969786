"""A training loop in the style of Hugging Face's Trainer.

It has arguments in a dataclass, callbacks, gradient accumulation without synchronization, an evaluation that gathers
predictions, logs by the main process, and checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

Batch = dict[str, torch.Tensor]


@dataclass
class Arguments:
    """Arguments that can be set on the command line as key=value."""

    output: str = "out"
    epochs: int = 2
    batch_size: int = 4
    gradient_accumulation_steps: int = 2
    learning_rate: float = 5e-4
    warmup_steps: int = 2
    max_grad_norm: float = 1.0
    logging_steps: int = 1
    gradient_checkpointing: bool = True
    seed: int = 42


@dataclass
class State:
    """State of the training."""

    step: int = 0
    log_history: list[dict[str, float]] = field(default_factory=list)
    best_metric: float | None = None


class Words(Dataset[list[int]]):
    """Sequences that count modulo `vocabulary` from a random start, of random length."""

    def __init__(self, count: int, vocabulary: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, vocabulary, (count,), generator=generator).tolist()
        lengths = torch.randint(6, 17, (count,), generator=generator).tolist()
        self.rows = [
            [(start + i) % vocabulary for i in range(length)] for start, length in zip(starts, lengths, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[int]:
        return self.rows[index]


def collate(rows: Sequence[list[int]]) -> Batch:
    """Return a batch padded to a multiple of 16, with labels that exclude the padding."""
    longest = -(-max(len(row) for row in rows) // 16) * 16
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class LanguageModel(nn.Module):
    """A small causal transformer that returns its loss."""

    def __init__(self, vocabulary: int = 64, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight
        self.checkpointing = False

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Batch:
        length = input_ids.shape[1]
        hidden = self.words(input_ids) + self.places(torch.arange(length, device=input_ids.device))
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=hidden.device)
        padding = torch.zeros(attention_mask.shape, device=hidden.device).masked_fill(attention_mask == 0, -torch.inf)
        for block in self.blocks:
            if self.checkpointing and self.training:
                hidden = torch.utils.checkpoint.checkpoint(block, hidden, causal, padding, use_reentrant=False)
            else:
                hidden = block(hidden, causal, padding)
        logits = self.head(self.norm(hidden))
        shifted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return {"loss": nn.functional.cross_entropy(*shifted, ignore_index=-100), "logits": logits}


class Callback:
    """Base class of callbacks."""

    def on_log(self, state: State, logs: dict[str, float]) -> None:
        """Handle logged values."""

    def on_evaluate(self, metrics: dict[str, float]) -> bool:
        """Return whether to stop."""
        return False


class Print(Callback):
    """Print logged values."""

    def on_log(self, state: State, logs: dict[str, float]) -> None:
        print(json.dumps({"step": state.step, **{name: round(value, 4) for name, value in logs.items()}}), flush=True)


class EarlyStopping(Callback):
    """Stop when the loss on the test set has not decreased for `patience` evaluations."""

    def __init__(self, patience: int) -> None:
        self.patience, self.waited, self.best = patience, 0, math.inf

    def on_evaluate(self, metrics: dict[str, float]) -> bool:
        self.waited = 0 if metrics["eval_loss"] < self.best else self.waited + 1
        self.best = min(self.best, metrics["eval_loss"])
        return self.waited >= self.patience


class Trainer:
    """Training with logs, evaluation and checkpoints."""

    def __init__(self, model: LanguageModel, args: Arguments, train: Words, test: Words, *callbacks: Callback) -> None:
        self.args, self.train_set, self.test_set, self.callbacks = args, train, test, callbacks
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model.checkpointing = args.gradient_checkpointing
        self.model = model.to(self.device)
        self.wrapped = DistributedDataParallel(self.model) if dist.get_world_size() > 1 else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / args.warmup_steps)
        )
        self.state = State()
        self.tr_loss = torch.tensor(0.0, device=self.device)

    @property
    def is_world_process_zero(self) -> bool:
        """Whether this process logs and saves."""
        return dist.get_rank() == 0

    def loader(self, data: Words, shuffle: bool) -> DataLoader[list[int]]:
        """Return a loader of this rank's share."""
        sampler: DistributedSampler[list[int]] = DistributedSampler(data, shuffle=shuffle, seed=self.args.seed)
        return DataLoader(data, self.args.batch_size, sampler=sampler, collate_fn=collate)

    def batches(self, data: Words, shuffle: bool, epoch: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches on the device."""
        loader = self.loader(data, shuffle)
        assert isinstance(loader.sampler, DistributedSampler)
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            yield {name: tensor.to(self.device) for name, tensor in batch.items()}

    def train(self) -> State:
        """Train all epochs."""
        for epoch in range(self.args.epochs):
            for number, batch in enumerate(self.batches(self.train_set, True, epoch), 1):
                boundary = number % self.args.gradient_accumulation_steps == 0
                self.training_step(batch, boundary)
                if boundary:
                    self.step_end()
            metrics = self.evaluate()
            stops = [callback.on_evaluate(metrics) for callback in self.callbacks]
            if any(stops):
                break
        return self.state

    def training_step(self, batch: Batch, boundary: bool) -> None:
        """Run forward and backward; gradients are synchronized in the last micro-batch only."""
        self.wrapped.train()
        quiet = isinstance(self.wrapped, DistributedDataParallel) and not boundary
        with self.wrapped.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]
            loss = self.wrapped(**batch)["loss"] / self.args.gradient_accumulation_steps
            loss.backward()
        self.tr_loss += loss.detach()

    def step_end(self) -> None:
        """Step the optimizer, and log."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.state.step += 1
        if self.state.step % self.args.logging_steps == 0:
            # The mean over all ranks, each of which has its own loss.
            loss = self.gather(self.tr_loss.repeat(1)).mean().item() / self.args.logging_steps
            self.tr_loss -= self.tr_loss
            logs = {"loss": loss, "grad_norm": norm.item(), "learning_rate": float(self.schedule.get_last_lr()[0])}
            self.log(logs)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return loss and accuracy over all ranks' shares of the test set."""
        self.wrapped.eval()
        losses, right, counted = [], 0, 0
        for batch in self.batches(self.test_set, False):
            outputs = self.wrapped(**batch)
            losses.append(self.gather(outputs["loss"].repeat(len(batch["labels"]))))
            guesses = self.gather(self.pad_across_processes(outputs["logits"].argmax(-1)))
            labels = self.gather(self.pad_across_processes(batch["labels"]))
            kept = labels[:, 1:] != -100
            right += int((guesses[:, :-1][kept] == labels[:, 1:][kept]).sum())
            counted += int(kept.sum())
        metrics = {"eval_loss": torch.cat(losses).mean().item(), "eval_accuracy": right / max(counted, 1)}
        self.log(metrics)
        best = self.state.best_metric
        if best is None or metrics["eval_loss"] < best:
            self.state.best_metric = metrics["eval_loss"]
        self.save()
        return metrics

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, concatenated."""
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def pad_across_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pad to the longest sequence of any rank."""
        sizes = self.gather(torch.tensor([tensor.shape[1]], device=tensor.device))
        longest = int(sizes.max())
        padded = tensor.new_full((tensor.shape[0], longest), -100)
        padded[:, : tensor.shape[1]] = tensor
        return padded

    def log(self, logs: dict[str, float]) -> None:
        """Keep the values, and pass them to callbacks in the main process."""
        self.state.log_history.append(logs)
        if self.is_world_process_zero:
            for callback in self.callbacks:
                callback.on_log(self.state, logs)

    def save(self) -> None:
        """Save the model and the training state, in the main process only."""
        if self.is_world_process_zero:
            folder = Path(self.args.output, f"checkpoint-{self.state.step}")
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.model.state_dict(), folder / "model.pt")
            (folder / "trainer_state.json").write_text(json.dumps(asdict(self.state)))
        dist.barrier()


def main(argv: Sequence[str]) -> None:
    """Train."""
    given: dict[str, Any] = dict(argument.split("=", 1) for argument in argv)
    types = {name: type(value) for name, value in asdict(Arguments()).items()}
    args = Arguments(**{name: types[name](value) for name, value in given.items()})
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(args.seed)
    model = LanguageModel()
    trainer = Trainer(model, args, Words(48, 64, 0), Words(16, 64, 1), Print(), EarlyStopping(3))
    state = trainer.train()
    if trainer.is_world_process_zero:
        print(f"{state.step} steps, best {state.best_metric:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
