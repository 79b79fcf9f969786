"""Run torchtitan's unmodified trainer on CPU ranks: titan_on_cpu.py ARGUMENTS (under torchrun, in a checkout).

It replaces queries of the device, and two functions that torch has on accelerators only. TITAN_BITS=FILE appends a
checksum of each rank's final parameters.
"""

from __future__ import annotations

import atexit
import collections
import gc
import hashlib
import os
import runpy
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule


def pretend_device() -> None:
    """Answer torchtitan's queries of its device."""
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.get_device_properties = lambda *_: SimpleNamespace(name="cpu", total_memory=24 << 30)
    cpu.get_device_name = lambda *_: "cpu"
    cpu.memory_stats = lambda *_: collections.defaultdict(int)
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
    cpu.max_memory_reserved = cpu.max_memory_allocated = cpu.current_device = lambda *_: 0
    cpu.device_count = lambda: 8


def replace_functions() -> None:
    """Replace what CPUs do not have: gloo has no PREMUL_SUM, and `histc` no integers."""
    module: Any = FSDPModule
    divide, histc = module.set_gradient_divide_factor, torch.histc

    def divide_by_sum(self: Any, factor: float) -> Any:
        self.set_force_sum_reduction_for_comms(True)
        return divide(self, factor)

    def histc_of_integers(values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return histc(values.float(), *args, **kwargs).to(values.dtype)

    module.set_gradient_divide_factor = divide_by_sum
    torch.histc = histc_of_integers  # type: ignore[assignment]


def write_bits(path: str) -> None:
    """Append rank and checksum of the parameters of all optimizers."""
    checksum = hashlib.sha256()
    for optimizer in [found for found in gc.get_objects() if isinstance(found, torch.optim.Optimizer)]:
        for parameter in [parameter for group in optimizer.param_groups for parameter in group["params"]]:
            local = getattr(parameter.detach(), "to_local", parameter.detach)()
            checksum.update(local.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    with open(path, "a") as file:
        file.write(f"{os.environ['RANK']} {checksum.hexdigest()}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    pretend_device()
    replace_functions()
    if "TITAN_BITS" in os.environ:
        atexit.register(write_bits, os.environ["TITAN_BITS"])
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
