"""Hugging Face's Trainer on a small GPT-2: trainer.py ddp|fsdp|zero2|zero3."""

from __future__ import annotations

import sys
from typing import Any

import cpu_ranks
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The same sequences in every run."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 500, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def settings(row: str) -> dict[str, Any]:
    """Return the arguments that choose the parallelism."""
    if row == "fsdp":
        wrap = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["GPT2Block"],
        }
        return {"fsdp": True, "fsdp_config": wrap}
    if row == "ddp":
        return {}
    stage = {"stage": int(row[-1]), "overlap_comm": True}
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    return {"deepspeed": {"zero_optimization": stage, "optimizer": optimizer, **dict.fromkeys(names, "auto")}}


def main() -> None:
    """Train three steps with an evaluation after the second."""
    row = sys.argv[1]
    cpu_ranks.prepare(row)
    arguments = TrainingArguments(
        output_dir="trained", max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        max_grad_norm=0.5, logging_steps=1, eval_strategy="steps", eval_steps=2, save_strategy="no", report_to=[],
        use_cpu=row == "ddp", disable_tqdm=True, seed=7, accelerator_config={"use_configured_state": True},
        **settings(row),
    )  # fmt: skip
    torch.manual_seed(7)
    config = GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Tokens(), eval_dataset=Tokens())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print("losses", losses)


if __name__ == "__main__":
    main()
