"""Run a program while other tools record it, too: `profiled.py TRACES DUMPS PROGRAM ARGUMENTS...`.

Each rank writes torch.profiler's trace and its execution trace to TRACES, and a dump of the flight recorder to DUMPS.
The process group exists before the profiler starts, because traces have the groups of that moment; the program's own
set-up and end of it do nothing. gloo's dumps do not contain the process groups, unlike NCCL's: they are added.
"""

from __future__ import annotations

import os
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

os.environ["TORCH_FR_BUFFER_SIZE"] = "10000"

import torch.distributed
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _world
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

dist: Any = torch.distributed


def main(traces: Path, dumps: Path, *program: str) -> None:
    """Run the program."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    destroy = dist.destroy_process_group
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
    observer = ExecutionTraceObserver()
    observer.register_callback(str(traces / f"rank{rank}.et.json"))
    sys.argv = [*program]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, execution_trace_observer=observer) as profiler:
        runpy.run_path(program[0], run_name="__main__")
        dist.barrier()
    profiler.export_chrome_trace(str(traces / f"rank{rank}.json.gz"))
    observer.unregister_callback()
    dump = pickle.loads(_dump_fr_trace())
    dump["pg_config"] = {
        name: {"name": name, "desc": group.group_desc, "ranks": str(dist.get_process_group_ranks(group))}
        for group, name in _world.pg_names.items()
        if rank in dist.get_process_group_ranks(group)
    }
    (dumps / f"rank_{rank}").write_bytes(pickle.dumps(dump))
    destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
