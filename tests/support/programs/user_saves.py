"""python user_saves.py FOLDER KIND ...: train for two steps, saving in several ways into a folder; then load again.

With `--tolerate`, a way that fails is printed and the next one is tried.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Job:
    """A small model, large enough not to be computed, and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        for module in (self.model[0], self.model[2], self.model):
            fully_shard(module)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        """Train for one step."""
        self.model(torch.ones(2, 256)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full(self) -> dict[str, torch.Tensor]:
        """Return the gathered parameters."""
        return {name: value.full_tensor() for name, value in self.model.state_dict().items()}


def torch_save(job: Job, folder: Path) -> None:
    """Save as the FSDP2 example of pytorch/examples, and load again."""
    saved = job.full()
    path = folder / "model_state_dict.pt"
    torch.save(saved, path)
    loaded = torch.load(path)
    assert {name: value.shape for name, value in loaded.items()} == {name: value.shape for name, value in saved.items()}


def distributed(job: Job, folder: Path) -> None:
    """Save with torch.distributed.checkpoint, twice into one folder, and load. Plans are larger than 64 KiB."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    for step in range(2):
        model, optimizer = get_state_dict(job.model, job.optimizer)
        many = {str(number): torch.tensor(number) for number in range(500)}
        state = {"model": model, "optimizer": optimizer, "step": torch.tensor(step), "many": many}
        save(state, checkpoint_id=str(folder / "distributed"))
        state["step"] = torch.tensor(9)
        load(state, checkpoint_id=str(folder / "distributed"))
        assert state["step"] == step


def pretrained(job: Job, folder: Path) -> None:
    """Save as `save_pretrained` and a trainer do: into a temporary folder, renamed; the oldest is deleted."""
    import shutil

    temporary = folder / "tmp-checkpoint-2"
    temporary.mkdir()
    (temporary / "config.json").write_text(json.dumps({"hidden": 256}))
    torch.save(job.full(), temporary / "pytorch_model.bin")
    os.rename(temporary, folder / "checkpoint-2")
    os.rename(folder / "old", folder / "checkpoint-1")
    shutil.rmtree(folder / "checkpoint-1")
    assert sorted(os.listdir(folder / "checkpoint-2")) == ["config.json", "pytorch_model.bin"]


def safetensors(job: Job, folder: Path) -> None:
    """Save with safetensors, a writer in Rust."""
    from safetensors.torch import load_file, save_file  # type: ignore[import-not-found, unused-ignore]

    save_file(job.full(), folder / "model.safetensors")
    assert len(load_file(folder / "model.safetensors")) == 4


def memory_map(job: Job, folder: Path) -> None:
    """Change a file through numpy's memory map, and append to it."""
    mapped: Any = np.memmap(folder / "data", dtype=np.uint8, mode="r+")
    mapped[:10] = 7
    mapped.flush()
    with open(folder / "file", "a") as file:
        file.write("more")


def modes(job: Job, folder: Path) -> None:
    """Change the mode and the times of a file."""
    (folder / "file").chmod(0o600)
    os.utime(folder / "file", (1, 1))


def tensorboard(job: Job, folder: Path) -> None:
    """Write TensorBoard's events."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "events"))
    writer.add_scalar("loss", 1.0, 1)
    writer.close()
    assert os.listdir(folder / "events")


def child(job: Job, folder: Path) -> None:
    """Let a child process write."""
    subprocess.run(["sh", "-c", "echo more >> file && mv file moved"], cwd=folder, check=True)


def deepspeed(job: Job, folder: Path) -> None:
    """Save with DeepSpeed's engine, which also writes the file `latest`."""
    import deepspeed

    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.backward(engine(torch.ones(2, 256)).sum())
    engine.step()
    engine.save_checkpoint(str(folder / "deepspeed"), tag="step1")
    if dist.get_rank() == 0:
        assert (folder / "deepspeed" / "latest").read_text() == "step1"


def main() -> None:
    """Save in each of the ways that the command line names."""
    folder, *names = sys.argv[1:]
    tolerate = "--tolerate" in names
    dist.init_process_group("gloo")
    job = Job()
    job.step()
    rank = dist.get_rank()
    for name in names:
        if name.startswith("--"):
            continue
        save: Callable[[Job, Path], None] = globals()[name]
        try:
            save(job, Path(folder))
            print(f"{name}: saved", flush=True)
        except BaseException as error:  # CheckpointException of torch is not an Exception
            if not tolerate:
                raise
            traceback.print_exc()
            print(f"{name}: {type(error).__name__}", flush=True)
    if not tolerate:
        others = [path.name for path in Path(folder).glob("of-*")]
        assert not others, others
        Path(folder, f"of-{rank}").write_text("x")
    job.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
