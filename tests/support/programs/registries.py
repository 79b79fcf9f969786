"""python registries.py FOLDER LOG: a call in each group that stand-ins for registries (in FOLDER) make."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch
import torch.distributed as dist

import commtrace

MAKERS = {
    "megatron.core.parallel_state": "initialize_model_parallel",
    "megatron.mpu.initialize": "initialize_model_parallel",
    "picotron.process_group_manager": "setup_process_group_manager",
}


def groups(module: ModuleType) -> list[dist.ProcessGroup]:
    """Return the process groups in the module's globals, also in lists, or in its manager."""
    holder = getattr(module, "process_group_manager", module)
    values = [value for _, value in sorted(vars(holder).items())]
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [item for item in flat if isinstance(item, dist.ProcessGroup)]


def main(folder: str, log: str) -> None:
    """Make the groups of the first module before anything is recorded, and those of the second one afterwards."""
    sys.path.insert(0, folder)
    commtrace.start(log)
    dist.init_process_group("gloo")
    for name, maker in MAKERS.items():
        module = importlib.import_module(name)
        getattr(module, maker)()
        for group in groups(module):
            dist.all_reduce(torch.ones(1), group=group)
    commtrace.stop()
    dist.destroy_process_group()


main(*sys.argv[1:])
