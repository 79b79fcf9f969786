"""stuck.py with torch's flight recorder: flight_recorder.py KIND FOLDER.

Each rank writes a dump, FOLDER/rank_N, once FOLDER/now exists. Unlike NCCL's dumps, gloo's do not contain the process
groups (`pg_config`); they are added in the same form.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

os.environ["TORCH_FR_BUFFER_SIZE"] = "1000"

import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _world

FOLDER = Path(sys.argv.pop())


def dump() -> None:
    while not (FOLDER / "now").exists():
        time.sleep(0.05)
    trace = pickle.loads(_dump_fr_trace())
    trace["pg_config"] = {
        name: {"name": name, "desc": group.group_desc, "ranks": str(dist.get_process_group_ranks(group))}
        for group, name in _world.pg_names.items()
        if dist.get_rank() in dist.get_process_group_ranks(group)
    }
    part = FOLDER / f"part_{dist.get_rank()}"
    part.write_bytes(pickle.dumps(trace))
    part.rename(FOLDER / f"rank_{dist.get_rank()}")


# If gloo aborts the process from its own thread, only that thread stops, because the dump is still to be written.
library = ctypes.CDLL(None)
library.signal(signal.SIGABRT, library.pause)
dumper = threading.Thread(target=dump)
dumper.start()
try:
    runpy.run_path(str(Path(__file__).with_name("stuck.py")), run_name="__main__")
except RuntimeError:  # gloo gives up
    traceback.print_exc()
dumper.join()
time.sleep(600)
