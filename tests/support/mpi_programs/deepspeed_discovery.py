"""deepspeed_discovery.py PORT: DeepSpeed gets the rank from MPI, as no launcher sets it; PORT is the store's."""

from __future__ import annotations

import sys

import deepspeed
import torch
from mpi4py import MPI

from examples.gpt_neox.deepspeed_engine import forbid_compiling

forbid_compiling()
deepspeed.init_distributed("gloo", auto_mpi_discovery=True, distributed_port=int(sys.argv[1]), verbose=False)
rank = MPI.COMM_WORLD.Get_rank()
assert rank == torch.distributed.get_rank()
numbers = torch.full((4,), float(rank))
deepspeed.comm.all_reduce(numbers)
assert numbers.tolist() == [1.0] * 4
MPI.COMM_WORLD.Barrier()
torch.distributed.destroy_process_group()
