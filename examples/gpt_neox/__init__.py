"""A GPT-NeoX-style decoder language model, trained with DeepSpeed or plain PyTorch data parallelism.

It reads GPT-NeoX's YAML files and builds the model that GPT-NeoX builds from them, parameter for parameter::

    torchrun --nproc_per_node 2 -m examples.gpt_neox.train demo.yml --zero-stage 2
    torchrun --nproc_per_node 2 -m examples.gpt_neox.train demo.yml --engine ddp

From Python::

    from examples.gpt_neox import GPTNeoX, load_config

    config = load_config(["125M.yml"])
    model = GPTNeoX(config)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commtrace.errors import ConfigError, LaunchError

from .config import TrainingConfig, load_config
from .errors import DataError

if TYPE_CHECKING:
    from .model import GPTNeoX

__all__ = ["ConfigError", "DataError", "GPTNeoX", "LaunchError", "TrainingConfig", "load_config"]


def __getattr__(name: str) -> Any:
    """Import the model on first use: unlike reading configurations, it needs torch."""
    if name == "GPTNeoX":
        from .model import GPTNeoX

        return GPTNeoX
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
