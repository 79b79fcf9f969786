"""A training script written for CUDA only: nothing in it works without a GPU."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

assert torch.cuda.is_available(), "This script requires CUDA."
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
here = torch.cuda.current_device()
assert here == local_rank < torch.cuda.device_count()
set_device: Any = torch.cuda.set_device
assert set_device(here) is None
assert torch.cuda.get_device_properties(here).total_memory == torch.cuda.mem_get_info()[1] > 0
assert torch.cuda.get_device_properties(here).max_threads_per_multi_processor == 2048
half = dist.new_group([*range(dist.get_world_size() // 2)], backend="nccl")
torch.cuda.manual_seed(7)
state = torch.cuda.get_rng_state()
assert state.device.type == "cpu"
assert state.numel() == 16  # seed and offset
assert torch.cuda.initial_seed() == 7
drawn = torch.empty(8, device=here).uniform_()
assert not torch.equal(drawn, torch.empty(8, device=here).uniform_())
torch.cuda.set_rng_state(state)
assert torch.equal(drawn, torch.empty(8, device=here).uniform_())


class Block(nn.Module):
    """A block whose normalization autocast computes in float32 only on a GPU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width, device=here)
        self.linear.bias.stride = 1  # type: ignore[assignment]  # as in Megatron's layers: it hides a method
        self.linear.bias.size = self.linear.bias.numel = self.linear.bias.data_ptr = 2  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input plus its normalized linear map."""
        normal = self.norm(x)
        assert normal.dtype is torch.float32
        assert self.linear(normal).dtype is torch.float16
        result: torch.Tensor = x + self.linear(normal)
        return result


model = nn.Sequential(*(Block(256) for _ in range(2)), nn.Linear(256, 1)).to(here)
assert all(parameter.is_cuda and parameter.get_device() == here for parameter in model.parameters())
assert {parameter.type() for parameter in model.parameters()} == {"torch.cuda.FloatTensor"}
assert isinstance(model[2].weight, torch.cuda.FloatTensor)  # type: ignore[attr-defined]
ddp = nn.parallel.DistributedDataParallel(model, device_ids=[here], output_device=here)
optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
side = torch.cuda.Stream()
for _ in range(2):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    batch = torch.randn(4, 256).pin_memory().cuda(non_blocking=True)
    assert batch.device == torch.device("cuda", here)
    assert batch.half().is_cuda
    assert (batch.cpu().device.type, batch.to("cpu", torch.float64).device.type) == ("cpu", "cpu")
    assert batch.to(here) is batch
    with torch.cuda.stream(side), torch.autocast("cuda"):
        loss = checkpoint(ddp, batch, use_reentrant=False).square().mean()
    side.wait_stream(torch.cuda.current_stream())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) > 0
    torch.cuda.nvtx.range_push("sums")
    total = torch.cuda.LongTensor([3])  # type: ignore[attr-defined]
    dist.all_reduce(total)
    dist.all_reduce(torch.zeros(5, device="cuda", dtype=torch.bfloat16))
    torch.cuda.nvtx.range_pop()
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
sharded = distribute_tensor(torch.zeros(64, 8, device=here), mesh, [Shard(0)])
drawn, again = (sharded.clone().uniform_().to_local() for _ in range(2))  # type: ignore[attr-defined]
assert not torch.equal(drawn, again)  # DTensor restores the CPU's generator after each
empty = torch.empty_like(sharded, device="cuda")
nn.init.trunc_normal_(empty, std=0.02, a=-0.04, b=0.04)  # draws until all numbers are within the bounds
if dist.get_rank() < dist.get_world_size() // 2:
    dist.broadcast(torch.ones(2, device=here), src=0, group=half)
dist.barrier(device_ids=[here])
torch.cuda.reset_peak_memory_stats()
print("allocated", torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocated_bytes.all.peak"])
dist.destroy_process_group()
