"""Hugging Face's Trainer on a small Llama: trainer.py ddp|fsdp|zero1|zero2|zero3 [resume]."""

from __future__ import annotations

import sys
from typing import Any

import cpu_ranks
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


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
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
        }
        return {"fsdp": True, "fsdp_config": wrap}
    if row == "ddp":
        return {}
    stage = {"stage": int(row[-1]), "overlap_comm": True}
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    return {"deepspeed": {"zero_optimization": stage, "optimizer": optimizer, **dict.fromkeys(names, "auto")}}


def tiny_llama() -> LlamaForCausalLM:
    """Return a Llama of two layers."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main() -> None:
    """Train four steps of two micro-batches, with an evaluation and a checkpoint after every second one."""
    row, resume = sys.argv[1], "resume" in sys.argv[2:]
    cpu_ranks.prepare(row)
    arguments = TrainingArguments(
        output_dir="trained", max_steps=6 if resume else 4, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, max_grad_norm=0.5, logging_steps=1, eval_strategy="steps", eval_steps=2,
        save_steps=2, save_total_limit=1, report_to=[], use_cpu=row == "ddp", disable_tqdm=True, seed=7,
        accelerator_config={"use_configured_state": True}, **settings(row),
    )  # fmt: skip
    trainer = Trainer(tiny_llama(), arguments, train_dataset=Tokens(), eval_dataset=Tokens())
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history]
    if trainer.is_world_process_zero():
        print(f"losses {losses}")


if __name__ == "__main__":
    main()
