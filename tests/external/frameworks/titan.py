"""torchtitan's unmodified trainer, with checkpoints, on CPU ranks: titan.py ARGUMENTS [resume].

TORCHTITAN_CHECKOUT names the checkout; see `tests/external/test_torchtitan.py`.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch

CHECKOUT = os.environ["TORCHTITAN_CHECKOUT"]
sys.path.insert(0, CHECKOUT)

import titan_on_cpu  # noqa: E402


def main() -> None:
    """Train three steps, or two more than the checkpoint, with a checkpoint after every second one."""
    torch.set_num_threads(1)
    arguments = [argument for argument in sys.argv[1:] if argument != "resume"]
    options = {
        "training.steps": 5 if "resume" in sys.argv else 3, "training.seq_len": 128, "training.local_batch_size": 2,
        "training.mixed_precision_param": "float32", "debug.seed": 1, "dump_folder": "trained",
        "dataloader.dataset_path": f"{CHECKOUT}/tests/assets/c4_test",
        "hf_assets_path": f"{CHECKOUT}/tests/assets/tokenizer", "checkpoint.interval": 2,
    }  # fmt: skip
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    sys.argv = [sys.argv[0], *given, "--debug.deterministic", "--checkpoint.enable", *arguments]
    titan_on_cpu.pretend_device()
    titan_on_cpu.replace_functions()
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
