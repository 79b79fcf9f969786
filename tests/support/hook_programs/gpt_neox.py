"""python gpt_neox.py FOLDER ENGINE ...: the tiny GPT-NeoX-style model under each engine ("ddp", or a stage of ZeRO).

Gradients are accumulated over two micro-batches and reduced in several buckets, and layers are recomputed in backward.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from examples.gpt_neox.train import main

COMMON = ("tiny", "--train-iters", "2", "--micro-batch", "2", "--gradient-accumulation", "2")
times: dict[str, dict[str, int]] = {}


def options(engine: str) -> list[str]:
    if engine == "ddp":
        return [*COMMON, "--engine", "ddp", "--checkpoint", "non-reentrant"]
    return [*COMMON, "--zero-stage", engine, "--checkpoint", "reentrant"]


for engine, port in zip(sys.argv[2:], os.environ["MORE_PORTS"].split(), strict=True):
    os.environ["MASTER_PORT"] = port
    begin = time.monotonic_ns()
    assert main(options(engine)) == 0
    times[engine] = {"begin": begin, "end": time.monotonic_ns()}
(Path(sys.argv[1]) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(times))
