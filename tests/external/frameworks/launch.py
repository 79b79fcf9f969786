"""Run a program of this directory on a rank, set up by environment variables: launch.py PROGRAM ARGUMENTS.

FRAMEWORKS_OPERATORS=DIR writes how often torch.profiler recorded each c10d operator to DIR/RANK.json.
FRAMEWORKS_BITS=1 prints a checksum of each rank's parameters after all steps.
FRAMEWORKS_FAULT=1 makes PyTorch communicate once more before the second step of the first optimizer.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from commtrace.network.process_exit import wait_for_threads

stepping: list[Any] = []


def fault(optimizer: Any, *_: Any) -> None:
    """Compare the shape of a tensor across all ranks, as DDP does when it is constructed."""
    stepping.append(optimizer)  # torchtitan's optimizer contains others
    if stepping.count(stepping[0]) == 2 and optimizer is stepping[0]:
        _verify_param_shape_across_processes(_get_default_group(), [torch.zeros(3)])


digest = hashlib.sha256()


def add_parameters(optimizer: Any, *_: Any) -> None:
    """Add this rank's part of an optimizer's parameters to the checksum."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = parameter.detach()
            local = local.to_local() if hasattr(local, "to_local") else local
            digest.update(local.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def main() -> None:
    """Run the program."""
    atexit.register(wait_for_threads)  # otherwise torch aborts some untraced runs at exit
    sys.argv = sys.argv[1:]
    folder = Path(__file__).parent
    sys.path.insert(0, str(folder))
    program = str(folder / sys.argv[0])
    if os.environ.get("FRAMEWORKS_FAULT"):
        register_optimizer_step_pre_hook(fault)
    operators, bits = os.environ.get("FRAMEWORKS_OPERATORS"), os.environ.get("FRAMEWORKS_BITS")
    if not operators:
        if bits:
            register_optimizer_step_post_hook(add_parameters)
        runpy.run_path(program, run_name="__main__")
        if bits:
            print(
                f"losses and parameters {os.environ['RANK']} {digest.hexdigest()}\n", end=""
            )  # one write, because all ranks print
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        runpy.run_path(program, run_name="__main__")
    names = Counter(event.name for event in profiler.events() if event.name.startswith("c10d::"))
    (Path(operators) / f"{os.environ['RANK']}.json").write_text(json.dumps(names))


if __name__ == "__main__":
    main()
