"""A GPT-NeoX-style decoder language model, trained with DeepSpeed or plain PyTorch data parallelism.

It reads GPT-NeoX's YAML files and builds the model that GPT-NeoX builds from them, parameter for parameter::

    torchrun --nproc_per_node 2 -m commtrace.workloads.gpt_neox.train demo.yml --zero-stage 2
    torchrun --nproc_per_node 2 -m commtrace.workloads.gpt_neox.train demo.yml --engine ddp

From Python::

    from commtrace.workloads.gpt_neox import GPTNeoX, load_config

    config = load_config(["125M.yml"])
    model = GPTNeoX(config)
"""

from __future__ import annotations

from .config import NeoxConfig, load_config
from .errors import ConfigError, DataError, LaunchError, WorkloadError
from .model import GPTNeoX

__all__ = ["ConfigError", "DataError", "GPTNeoX", "LaunchError", "NeoxConfig", "WorkloadError", "load_config"]
