"""python null_log.py FOLDER: a program that is not traced has no hooks and writes nothing."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
assert not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")
assert not any(name.startswith("commtrace.hooks") for name in sys.modules)
dist.destroy_process_group()
