"""torchtitan's Trainer on a small Llama 3, on CPU ranks: torchtitan_train.py SHARDS TENSOR PIPELINE."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule

# torchtitan reads an accelerator's name and memory sizes, and imports kernels that are not used here.
torch._utils._get_available_device_type = lambda: "cpu"
cpu: Any = torch.cpu
cpu.get_device_name = lambda *_: "cpu"
cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 30)
cpu.memory_stats = lambda *_: {}
cpu.current_device = lambda: 0
cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
kernels: Any = ModuleType("torchtitan.models.moe.kernels")  # Triton kernels
kernels.generate_permute_indices = None
sys.modules[kernels.__name__] = kernels

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec  # noqa: E402
from torchtitan.protocols.train_spec import register_train_spec  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402


class Tokens(BaseDataLoader):  # type: ignore[misc]
    """The same batches in every run."""

    def __init__(self, rank: int, config: Any) -> None:
        self.rank, self.shape = rank, (config.training.local_batch_size, config.training.seq_len + 1)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.rank)
        while True:
            tokens = torch.randint(0, 128, self.shape, generator=generator)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""


def main() -> None:
    """Train three steps."""
    shards, tensor, pipeline = sys.argv[1:4]
    arguments = TransformerModelArgs(dim=64, n_layers=4, n_heads=4, vocab_size=128)
    spec = dataclasses.replace(
        get_train_spec(),
        model_args={"small": arguments},
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda dp_world_size, dp_rank, tokenizer, job_config: Tokens(dp_rank, job_config),
    )
    register_train_spec("small", spec)
    config = ConfigManager().parse_args([
        "--model.name", "small", "--model.flavor", "small", "--training.steps", "3", "--training.seq_len", "16",
        "--training.local_batch_size", "2", "--training.mixed_precision_param", "float32",
        "--parallelism.data_parallel_shard_degree", shards, "--parallelism.tensor_parallel_degree", tensor,
        "--parallelism.pipeline_parallel_degree", pipeline, "--activation_checkpoint.mode", "none",
        "--metrics.log_freq", "1", "--debug.seed", "7", "--optimizer.implementation", "for-loop",
    ])  # fmt: skip
    module: Any = FSDPModule
    divide = module.set_gradient_divide_factor

    def sum_and_divide(module: FSDPModule, factor: float) -> None:
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM

    module.set_gradient_divide_factor = sum_and_divide
    trainer = Trainer(config)
    losses: list[float] = []

    def log(step: int, loss: float, *_: Any, **__: Any) -> None:
        losses.append(loss)

    trainer.metrics_processor.log = log
    trainer.train()
    print(f"losses {losses}\n", end="")  # one write, because all ranks print
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
