"""A training loop with Hugging Face accelerate: accelerate_loop.py ddp|fsdp|zero2 [resume] [dispatch].

dispatch: rank 0 loads the data of all ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cpu_ranks
import torch
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel


def settings(row: str) -> dict[str, Any]:
    """Return the arguments that choose the parallelism."""
    if row == "fsdp":
        wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["GPT2Block"]}
        return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, **wrap), "gradient_accumulation_steps": 2}
    if row == "zero2":
        plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2, gradient_clipping=1.0)
        return {"deepspeed_plugin": plugin}
    return {"gradient_accumulation_steps": 2}


def evaluate(accelerator: Accelerator, model: Any, loader: Any) -> float:
    """Return the mean loss."""
    model.eval()
    losses = []
    for (batch,) in loader:
        with torch.no_grad():
            losses.append(accelerator.gather_for_metrics(model(input_ids=batch, labels=batch).loss.reshape(1)))
    model.train()
    return float(torch.cat(losses).mean())


def main() -> None:
    """Train three steps of two micro-batches, evaluate, and save; or load what an earlier run has saved, first."""
    torch.manual_seed(7)
    row, options = sys.argv[1], sys.argv[2:]
    cpu_ranks.prepare(row)
    data = DataLoaderConfiguration(dispatch_batches="dispatch" in options or None)
    accelerator = Accelerator(cpu=row == "ddp", dataloader_config=data, **settings(row))
    config = GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(0, 500, (24, 32), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(tokens), batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    evaluation = accelerator.prepare_data_loader(DataLoader(TensorDataset(tokens[:8]), batch_size=2))
    folder = Path("state")
    if "resume" in options:
        accelerator.load_state(str(folder))
    losses = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    losses.append(evaluate(accelerator, model, evaluation))
    accelerator.wait_for_everyone()
    accelerator.save_state(str(folder))
    accelerator.print(f"losses {losses}")


if __name__ == "__main__":
    main()
