"""A program of pytorch/examples, unedited, on CPU ranks: pytorch_examples.py PATH ARGUMENTS [resume].

PYTORCH_EXAMPLES names the checkout, PATH is below its folder `distributed`. "resume" is left out: the programs find
their checkpoints themselves.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.distributed.tensor import DTensor


def pretend_accelerator() -> None:
    """Let `torch.accelerator` be the CPU, and all groups use gloo."""
    accelerator: Any = torch.accelerator
    accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")
    accelerator.is_available = lambda: True
    accelerator.device_count = lambda: 8
    accelerator.set_device_index = accelerator.device_index = lambda *_: None
    init = dist.init_process_group

    def init_gloo(backend: str | None = None, *args: Any, **named: Any) -> None:
        named.pop("device_id", None)
        init("gloo", *args, **named)

    dist.init_process_group = init_gloo


def replace_attention() -> None:
    """Compute attention of DTensors on their shards: heads are sharded, and the CPU's attention has no strategy."""
    attention: Any = functional.scaled_dot_product_attention

    def of_shards(query: Any, *args: Any, **named: Any) -> Any:
        if not isinstance(query, DTensor):
            return attention(query, *args, **named)
        local = [value.to_local() if isinstance(value, DTensor) else value for value in (query, *args)]
        return DTensor.from_local(attention(*local, **named), query.device_mesh, query.placements)

    functional.scaled_dot_product_attention = of_shards


def main() -> None:
    """Run the program."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    pretend_accelerator()
    replace_attention()
    path = Path(os.environ["PYTORCH_EXAMPLES"], "distributed", sys.argv[1])
    sys.argv = [str(path), *(argument for argument in sys.argv[2:] if argument != "resume")]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main()
