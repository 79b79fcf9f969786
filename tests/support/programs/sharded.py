"""python sharded.py ORDERS: small models sharded in torch's and DeepSpeed's other ways, one after the other.

ORDERS is a JSON file: a list of {"log": directory, "port": for the process group, "way": the name of a function here}.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commtrace

WIDTH = 48
STEPS = 3


class Block(nn.Module):
    """Two linear layers and a norm, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + changed


def model(blocks: int = 3) -> nn.Sequential:
    """Return a model, the same on every rank."""
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def train(module: nn.Module, *, clipped: bool = False) -> None:
    """Train a few steps, and read the loss."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for _ in range(STEPS):
        loss = module(torch.randn(2, 6, WIDTH)).float().square().mean()
        loss.backward()
        if clipped:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() >= 0


def fsdp2() -> None:
    """Shard every block and the model over all ranks, in bf16."""
    net = model()
    for block in net:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(net)
    train(net, clipped=True)


def fsdp1() -> None:
    """Shard in the same way with the earlier FSDP class, which has flat parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    net = FullyShardedDataParallel(
        model(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(STEPS):
        net(torch.randn(2, 6, WIDTH)).float().square().mean().backward()
        net.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def hsdp() -> None:
    """Shard over pairs of ranks, and replicate over the pairs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    net = model()
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net)


def micro_batches(net: Any, number: int, *, every: bool = False, replicas: bool = True) -> None:
    """Run forward and backward passes; gradients are reduced (or only among replicas) in the last one, or in each."""
    for index in range(number):
        last = index == number - 1
        net.set_is_last_backward(last)
        if replicas:
            net.set_requires_gradient_sync(last or every)
        else:
            net.set_requires_all_reduce(last)
        net(torch.randn(2, 6, WIDTH)).float().square().mean().backward()


@torch.no_grad()
def evaluate(net: nn.Module, number: int) -> None:
    """Run forward passes without gradients."""
    net.eval()
    for _ in range(number):
        net(torch.randn(2, 6, WIDTH))
    net.train()


def fully_sharded(*shape: int, **settings: Any) -> Any:
    """Return a model with every block and the root sharded; the root has its own parameters. With a shape: HSDP."""
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names if shape else None)
    blocks = [*model()]
    for block in blocks:
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH)), mesh=mesh, **settings)


def accumulated() -> None:
    """Train with three micro-batches per step, and with two in the last step, as at the end of an epoch."""
    net = fully_sharded()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(5):
        micro_batches(net, 3 - (step == 4))
        optimizer.step()
        optimizer.zero_grad()


def evaluated() -> None:
    """Evaluate before the first step, between micro-batches and after steps; reshard within pairs, also the root."""
    net = fully_sharded(reshard_after_forward=2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    evaluate(net, 2)
    for step in range(5):
        micro_batches(net, 2, every=True)
        if step == 2:
            evaluate(net, 1)
            micro_batches(net, 1)
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, 4):
            evaluate(net, 3)


def evaluated_kept() -> None:
    """Evaluate with blocks that stay gathered after forward, and in one step also after backward."""
    net = fully_sharded(reshard_after_forward=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(4):
        net.set_reshard_after_backward(step != 1)
        micro_batches(net, 2)
        net.set_reshard_after_backward(True)
        micro_batches(net, 1)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            with torch.no_grad():  # in training mode: it begins the next step
                net(torch.randn(2, 6, WIDTH))


def evaluated_by_default() -> None:
    """Evaluate with the default: the root stays gathered after an evaluation, the blocks do not."""
    net = fully_sharded()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(4):
        micro_batches(net, 1)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            evaluate(net, 2)


def evaluated_without_root() -> None:
    """Evaluate with a root without parameters: its last block is then gathered once more, without need."""
    blocks = [*model()]
    for block in blocks:
        fully_shard(block)
    net: Any = fully_shard(nn.Sequential(*blocks))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    evaluate(net, 2)
    for step in range(4):
        for _ in range(2):
            micro_batches(net, 1)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            evaluate(net, 1)


def hsdp_accumulated() -> None:
    """Scatter gradients in each micro-batch, and sum them among replicas in the last one."""
    net = fully_sharded(dist.get_world_size() // 2, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(3):
        micro_batches(net, 3, replicas=False)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            evaluate(net, 1)


def gathered_once_more() -> None:
    """Train like `evaluated_by_default`, with a gather of a block in step 1 that no pass needs."""
    net = fully_sharded()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(4):
        micro_batches(net, 1)
        optimizer.step()
        optimizer.zero_grad()
        evaluate(net, 1)
        if step == 1:
            net[0].unshard()
            net[0].reshard()


def gathered_ahead() -> None:
    """Gather the root and a block before each forward pass, as programs do that prefetch; reshard one block once."""
    net = fully_sharded()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(5):
        net.unshard()
        net[1].unshard()
        if step == 3:
            net[1].reshard()
        micro_batches(net, 2)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            evaluate(net, 1)
            net[0].unshard()


def tensor() -> None:
    """Split blocks over all ranks with DTensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = model()
    for block in net:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    train(net)


def sharded_tensor() -> None:
    """Split blocks over pairs of ranks, and shard them over the pairs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    net = model()
    for block in net:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(net, mesh=mesh["data"])
    train(net)


def pipeline() -> None:
    """Train a block on each rank in torch's pipeline, whose stages exchange the shapes."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    block = model(size)[rank]
    schedule = Schedule1F1B(
        PipelineStage(block, rank, size, torch.device("cpu")),
        n_microbatches=4,
        loss_fn=lambda output, target: (output - target).square().mean(),
    )
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    for _ in range(STEPS):
        batch = torch.randn(4, 6, WIDTH)
        schedule.step(*([batch] if rank == 0 else []), target=batch if rank == size - 1 else None)
        optimizer.step()
        optimizer.zero_grad()


def deepspeed_pipeline() -> None:
    """Train two stages, each on half of the ranks, in DeepSpeed's pipeline with ZeRO-1."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(3)
    layers = [LayerSpec(Block) for _ in range(4)]
    module = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "steps_per_print": 1000,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    batch = torch.randn(2, 6, WIDTH, dtype=torch.bfloat16)
    for _ in range(STEPS):
        engine.train_batch(iter([(batch, batch)] * 4))


def zero3_engine(net: nn.Module) -> Any:
    """Return an engine with ZeRO-3 whose limits of gathered parameters are below the model's size."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 100,
        "stage3_prefetch_bucket_size": 10_000,
        "stage3_max_live_parameters": 30_000,
        "stage3_max_reuse_distance": 20_000,
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 1000,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    return engine


def zero3_step(engine: Any) -> None:
    """Train a step of two micro-batches."""
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 6, WIDTH)).float().square().mean())
        engine.step()


def deepspeed_zero3() -> None:
    """Evaluate before the first step and after others, which changes what the next step gathers."""
    engine = zero3_engine(model())
    evaluate(engine, 2)
    for step in range(7):
        zero3_step(engine)
        evaluate(engine, {1: 3, 4: 1, 5: 1}.get(step, 0))


class Headed(nn.Module):
    """Blocks, and a head that never runs: the model multiplies by its weight, as fused losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = model()
        self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.blocks(x) @ self.head.weight.t()
        return product


def deepspeed_zero3_states() -> None:
    """Use a parameter of a module that does not run, load and save checkpoints, and gather parameters between steps."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    engine = zero3_engine(Headed())
    with tempfile.TemporaryDirectory() as folder:
        objects = [folder]
        dist.broadcast_object_list(objects)
        engine.save_checkpoint(objects[0])
        engine.load_checkpoint(objects[0])
        for step in range(8):
            zero3_step(engine)
            if step in (1, 2):
                evaluate(engine, 1)
            if step in (2, 5):
                engine.save_checkpoint(objects[0])
            if step in (3, 5):
                with GatheredParameters([*engine.module.blocks[step % 2].parameters()]):
                    pass
        dist.barrier()


def main(orders: list[dict[str, Any]]) -> None:
    """Run all orders."""
    for order in orders:
        os.environ["MASTER_PORT"] = str(order["port"])
        commtrace.start(order["log"])
        by_deepspeed = order["way"].startswith("deepspeed")
        if not by_deepspeed:
            dist.init_process_group("gloo")
        globals()[order["way"]]()
        gc.collect()
        if by_deepspeed:
            import deepspeed

            deepspeed.comm.destroy_process_group()
        else:
            dist.destroy_process_group()
        commtrace.stop()


with open(sys.argv[1]) as file:
    main(json.load(file))
