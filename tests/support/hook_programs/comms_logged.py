"""Run DeepSpeed's calls while its CommsLogger records them, too: `comms_logged.py OUT`.

Each rank writes the logger's raw data to OUT/rankR.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.comm import comm

SIZES = (1 << 16, 1 << 20, 1 << 22)
CALLS = 12


def main(out: Path) -> None:
    """Make calls of each operation and size in turn."""
    # The operator for shared memory is compiled at its first use, which a program of tests does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    comms: Any = comm
    comms.configure(enabled=True, prof_all=True, verbose=False)
    world = comms.get_world_size()
    for _ in range(CALLS):
        for size in SIZES:
            whole, part = torch.ones(size), torch.ones(size // world)
            comms.all_reduce(whole)
            comms.broadcast(whole, 0)
            comms.all_gather_into_tensor(whole, part)
            comms.all_to_all_single(torch.empty_like(whole), whole)
    (out / f"rank{comms.get_rank()}.json").write_text(json.dumps(comms.comms_logger.get_raw_data()))
    comms.barrier()
    comms.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
