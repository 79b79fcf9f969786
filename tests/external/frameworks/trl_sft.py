"""TRL's SFTTrainer on a small Llama: trl_sft.py ddp|fsdp|zero3 [resume]."""

from __future__ import annotations

import sys
from pathlib import Path

import cpu_ranks
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer import settings, tiny_llama
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each of 400 words."""
    words = {name: number for number, name in enumerate(("<pad>", "<eos>", *map(str, range(400))))}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    """Train four steps of two micro-batches, with an evaluation and a checkpoint after every second one."""
    row, resume = sys.argv[1], "resume" in sys.argv[2:]
    cpu_ranks.prepare(row)
    texts = [" ".join(str((7 * row + 3 * word) % 400) for word in range(8 + row % 9)) for row in range(32)]
    data = Dataset.from_dict({"text": texts})
    arguments = SFTConfig(
        output_dir="trained", max_steps=6 if resume else 4, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, max_grad_norm=0.5, logging_steps=1, eval_strategy="steps", eval_steps=2,
        save_steps=2, save_total_limit=1, report_to=[], use_cpu=row == "ddp", disable_tqdm=True, seed=7, bf16=False,
        max_length=16, gradient_checkpointing=False, dataset_num_proc=None,
        accelerator_config={"use_configured_state": True}, **settings(row),
    )  # fmt: skip
    trainer = SFTTrainer(
        tiny_llama(), arguments, train_dataset=data, eval_dataset=data.select(range(8)), processing_class=tokenizer()
    )
    trainer.train(resume_from_checkpoint=resume and bool(list(Path("trained").iterdir())))
    losses = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history]
    if trainer.is_world_process_zero():
        print(f"losses {losses}")


if __name__ == "__main__":
    main()
