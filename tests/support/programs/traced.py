"""python traced.py LOG PROGRAM [ARGUMENT ...]: traces a program that knows nothing of commtrace."""

from __future__ import annotations

import runpy
import sys

import commtrace

log, *sys.argv = sys.argv[1:]
commtrace.start(log)
deepspeed = sys.modules.get("deepspeed")
if deepspeed is not None:  # its all_reduce through shared memory would be compiled now, for minutes
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
runpy.run_path(sys.argv[0], run_name="__main__")
