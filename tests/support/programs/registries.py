"""python registries.py FOLDER LOG: a call in each group that stand-ins of Megatron's registries (in FOLDER) make."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch
import torch.distributed as dist

import commtrace

MODULES = ("megatron.core.parallel_state", "megatron.mpu.initialize")


def groups(module: ModuleType) -> list[dist.ProcessGroup]:
    """Those in its globals, in lists as well."""
    held = [value for _, value in sorted(vars(module).items())]
    several = [one for some in held for one in (some if isinstance(some, list) else [some])]
    return [one for one in several if isinstance(one, dist.ProcessGroup)]


def main(folder: str, log: str) -> None:
    """The first module's groups are made before anything is recorded, the second one's while it is."""
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
