"""python traced.py LOG PROGRAM [ARGUMENT ...]: traces a program that does not use commtrace."""

from __future__ import annotations

import runpy
import sys

import commtrace

log, *sys.argv = sys.argv[1:]
commtrace.start(log)
deepspeed = sys.modules.get("deepspeed")
if deepspeed is not None:  # its shared-memory all_reduce would be compiled now, which takes minutes
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
runpy.run_path(sys.argv[0], run_name="__main__")
