"""Hugging Face's Trainer on a small GPT-2, as in its documentation; argument 1: a DeepSpeed configuration."""

from __future__ import annotations

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same in every run."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 500, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


arguments = TrainingArguments(
    output_dir="trained",
    max_steps=3,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_grad_norm=0.5,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    deepspeed=sys.argv[1] if len(sys.argv) > 1 else None,
)
config = GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Tokens(), eval_dataset=Tokens())
trainer.train()
