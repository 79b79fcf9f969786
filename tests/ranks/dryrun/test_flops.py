"""Floating-point operations that a dry run counts between calls, and a prediction from them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import processes
import pytest

pytest.importorskip("torch")

from commtrace.cli import main
from commtrace.run import open_run

LIMIT_SECONDS: Final = 240
SCRIPT: Final = """
import torch, torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

class Attention(nn.Module):
    def forward(self, x):  # (8, 2, 16, 4)
        return nn.functional.scaled_dot_product_attention(x, x, x)

dist.init_process_group("gloo")
first, attention, last = nn.Linear(128, 128, bias=False), Attention(), nn.Linear(128, 32, bias=False)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = first, last
    def forward(self, x):
        x = checkpoint(lambda x: self.first(x).relu(), x, use_reentrant=False)
        x = attention(x.view(8, 2, 16, 4)).reshape(8, 128)
        return self.last(x)

model = nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    model(torch.ones(8, 128)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
FIRST: Final = 2 * 8 * 128 * 128
LAST: Final = 2 * 8 * 128 * 32
PRODUCT: Final = 2 * (8 * 2) * 16 * 16 * 4
"""Two of them in attention, five in its backward."""


@pytest.mark.long
def test_operations_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "commtrace.cli", "dryrun", "--world-size", "64", "--out", str(tmp_path / "log")]
    result = processes.run([*command, sys.executable, "train.py"], cwd=tmp_path, limit=LIMIT_SECONDS)
    assert result.status == 0, result.err
    run = open_run(tmp_path / "log")
    (process,) = run.processes
    flops = process.tables.flops
    assert flops is not None
    total, forward = (sum(counts) for counts in zip(*flops.values(), strict=True))
    assert forward == 4 * (FIRST + 2 * PRODUCT + LAST)
    # Backward repeats the first layer, whose input needs no gradient.
    assert total - forward == 4 * (FIRST + FIRST + 5 * PRODUCT + 2 * LAST)
    assert main(["whatif", str(tmp_path / "log"), "--network", "1GB/s", "--rate", "1GFLOPS", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["tables"]["layouts"]
    assert row["computation_ns"] == pytest.approx(total / 4)
    gradients_ns = 4 * (128 * 128 + 128 * 32) * 2 * 63 / 64
    assert row["high_ns"] == pytest.approx(total / 4 + gradients_ns)
