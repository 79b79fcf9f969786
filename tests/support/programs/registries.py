"""python registries.py FOLDER LOG: a call in each group that stand-ins for Megatron's registries (in FOLDER) make."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch
import torch.distributed as dist

import commtrace

MODULES = ("megatron.core.parallel_state", "megatron.mpu.initialize")


def groups(module: ModuleType) -> list[dist.ProcessGroup]:
    """Return the process groups in the module's globals, also in lists."""
    values = [value for _, value in sorted(vars(module).items())]
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [item for item in flat if isinstance(item, dist.ProcessGroup)]


def main(folder: str, log: str) -> None:
    """Make the groups of the first module before anything is recorded, and those of the second one afterwards."""
    sys.path.insert(0, folder)
    commtrace.start(log)
    dist.init_process_group("gloo")
    for name in MODULES:
        module = importlib.import_module(name)
        module.initialize_model_parallel()
        for group in groups(module):
            dist.all_reduce(torch.ones(1), group=group)
    commtrace.stop()
    dist.destroy_process_group()


main(*sys.argv[1:])
