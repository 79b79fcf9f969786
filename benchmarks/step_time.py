"""Time that a tool adds to a training step of two gloo ranks.

There are two programs: a model under DDP with many small buckets, which are reduced during backward, and hand-written
steps that compute, all_reduce and all_gather in turn. Both ranks switch at the same time; the slower rank determines
the time of a block of steps. (`native_step` measures the native recorder more precisely.)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import groups
import results
import sides
import torch
import torch.distributed as dist
from measuring import Row
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Much computation and few bytes, because gloo's latency makes step times vary.
LAYERS, WIDTH, SAMPLES = 24, 64, 6000
BUCKET_MIB = 0.01  # less than a layer's 0.016, so that each layer is reduced separately
EXCHANGES, SIZE, COMPUTE = 12, 1024, 448
CALLS = 24  # per step, in both programs
DDP = f"step of DDP, {LAYERS} all_reduces"
BY_HAND = f"hand-written step, {EXCHANGES} all_reduces and {EXCHANGES} all_gathers"


def main() -> None:
    """Run the benchmark on both programs, and write its results."""
    parser = results.parser(__doc__, pairs=60, settle=0.15)
    parser.add_argument("--steps", type=int, default=6, help="steps per block")
    options = results.parsed(parser, steps=1)
    rows = [row for program in (ddp, by_hand) for row in groups.run(program, options, backend="gloo")]
    results.write("step_time", rows, options)


def ddp(options: argparse.Namespace) -> list[Row]:
    """Measure the DDP step; not with DeepSpeed's comms logger, which does not record calls made in C++."""
    case, step = DDP, ddp_step()
    rows = measure(case, {**sides.commtrace_sides(), "torch.profiler": sides.profiler}, step, options)

    def step_in_mode() -> None:  # entered for each step, because it fails at a module's second forward
        with sides.comm_debug_mode():
            step()

    return rows + measure(case, {"CommDebugMode": sides.bare}, step, options, step_with=step_in_mode)


def by_hand(options: argparse.Namespace) -> list[Row]:
    """Measure the hand-written step; for DeepSpeed's comms logger, both sides call `deepspeed.comm`."""
    case = BY_HAND
    rows = measure(case, {**sides.commtrace_sides(), **sides.torch_sides()}, hand_written_step(dist), options)
    comm = sides.deepspeed_comm()
    if comm is not None:
        rows += measure(case, {"DeepSpeed comms logger": sides.comms_logger}, hand_written_step(comm), options)
    return rows


def measure(
    case: str,
    switches: dict[str, sides.Switch],
    step: Callable[[], object],
    options: argparse.Namespace,
    *,
    step_with: Callable[[], object] | None = None,
) -> list[Row]:
    """Return the rows of each side."""
    for _ in range(3):
        step()  # the first steps allocate memory, and DDP rebuilds its buckets
    rows = []
    for name, switch in switches.items():
        if options.only in name:
            amount = groups.Amount(options.steps, options.pairs, options.settle)
            rows += groups.Comparison(case, name, switch, step, step_with).milliseconds(amount)
    return rows


def ddp_step() -> Callable[[], object]:
    """Return a step: forward, backward with all_reduces in between, and SGD."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=BUCKET_MIB)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(SAMPLES, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def hand_written_step(comm: Any) -> Callable[[], object]:
    """Return a step of matrix products, each pair followed by an all_reduce and an all_gather of the module `comm`."""
    torch.manual_seed(0)
    matrix, gradient, shard = torch.randn(COMPUTE, COMPUTE), torch.randn(SIZE), torch.randn(SIZE)
    parameters = torch.empty(SIZE * dist.get_world_size())
    all_reduce, all_gather = comm.all_reduce, comm.all_gather_into_tensor

    def step() -> None:
        for _ in range(EXCHANGES):
            torch.mm(matrix, matrix)
            torch.mm(matrix, matrix)
            all_reduce(gradient)
            all_gather(parameters, shard)
            gradient.mul_(0.5)

    return step


if __name__ == "__main__":
    main()
