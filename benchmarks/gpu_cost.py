"""Time that commtrace adds on a GPU: to a call of NCCL with one rank, and to a training step.

NCCL with one rank sends nothing, and its calls take the host less time than real ones do. Steps are of a GPT-2 of
ordinary size (124 M parameters, bf16) under DDP and DeepSpeed's ZeRO-1 (FSDP2 makes no call with one rank). Sides are
the recorders, and the native one with device times.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import groups
import results
import sides
import torch
import torch.distributed as dist
from measuring import Row
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zero_engine import zero_engine

LAYERS, WIDTH, HEADS, TOKENS, SAMPLES, VOCABULARY = 12, 768, 12, 1024, 8, 50304
DEVICE_TIMES = "commtrace, native, device times"


def main() -> None:
    """Run the benchmark on one GPU, and write its results."""
    parser = results.parser(__doc__, pairs=18, settle=0.15)
    parser.add_argument("--calls", type=int, default=1000, help="calls per block")
    parser.add_argument("--steps", type=int, default=5, help="steps per block")
    options = results.parsed(parser, calls=10, steps=1)
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device")
    rows = [row for program in PROGRAMS for row in groups.run(program, options, backend="nccl", bound=False)]
    results.write("gpu_cost", rows, options)


def switches() -> dict[str, sides.Switch]:
    """Return the recorders, and the native one with device times."""
    kept = {name: switch for name, switch in sides.commtrace_sides().items() if "with call sites" in name}
    if "native" in sides.recorders():
        kept[DEVICE_TIMES] = partial(sides.traced, "native", device_times=1)
    return kept


def calls(options: argparse.Namespace) -> list[Row]:
    """Measure calls of 1,024 fp32 elements."""
    tensor = torch.ones(1024, device="cuda")
    amount = groups.Amount(options.calls, options.pairs, options.settle, options.calls)
    cases: dict[str, Callable[[], object]] = {
        "all_reduce, NCCL, one rank": lambda: dist.all_reduce(tensor),
        "all_reduce, async, then wait, NCCL, one rank": lambda: dist.all_reduce(tensor, async_op=True).wait(),
    }
    return [
        groups.Comparison(case, name, switch, call).microseconds(amount)
        for case, call in cases.items()
        for name, switch in switches().items()
        if options.only in name
    ]


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the activations after this layer, of shape (samples, tokens, width) as before it."""
        samples, tokens, width = inputs.shape
        heads = self.attention(self.norms[0](inputs)).view(samples, tokens, 3, HEADS, width // HEADS)
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        inputs = inputs + self.projection(mixed.transpose(1, 2).reshape(samples, tokens, width))
        return inputs + self.mlp(self.norms[1](inputs))  # type: ignore[no-any-return]


class GPT2(nn.Module):
    """GPT-2 with 124 M parameters; its result is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of tokens of shape (samples, tokens)."""
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits = nn.functional.linear(self.norm(hidden), self.tokens.weight)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def ddp_step() -> Callable[[], object]:
    """Return a step of DDP with AdamW under bf16 autocast."""
    model = DistributedDataParallel(GPT2().cuda(), device_ids=[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def zero1_step() -> Callable[[], object]:
    """Return a step of DeepSpeed's ZeRO-1 in bf16."""
    model = GPT2().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine = zero_engine(model, optimizer, stage=1, samples=SAMPLES, bf16={"enabled": True})
    tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS), device="cuda")

    def step() -> None:
        engine.backward(engine(tokens))
        engine.step()

    return step


STEPS = {"step of DDP": ddp_step, "step of ZeRO-1": zero1_step}


def training_step(case: str, options: argparse.Namespace) -> list[Row]:
    """Measure a training step: wall time, and CPU time of the process."""
    torch.manual_seed(0)
    step = STEPS[case]()
    for _ in range(5):
        step()  # the first steps allocate memory, and DDP rebuilds its buckets
    amount = groups.Amount(options.steps, options.pairs, options.settle)
    return [
        row
        for name, switch in switches().items()
        if options.only in name and "python" not in name
        for row in groups.Comparison(f"{case}, GPT-2 124M on a GPU", name, switch, step).milliseconds(amount)
    ]


PROGRAMS: tuple[Callable[[argparse.Namespace], list[Row]], ...] = (
    calls, *(partial(training_step, case) for case in STEPS),
)  # fmt: skip


if __name__ == "__main__":
    main()
