"""Communicates until it is killed, and counts its finished calls outside the log: counting.py COUNTERS."""

from __future__ import annotations

import mmap
import os
import struct
import sys

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
with open(sys.argv[1], "r+b") as file:
    counters = mmap.mmap(file.fileno(), 16)
dist.init_process_group("gloo")
tensor = torch.ones(4)
number = 0
while True:
    dist.all_reduce(tensor)
    tensor.fill_(1)
    number += 1
    struct.pack_into("<q", counters, 8 * rank, number)
