"""DeepSpeedExamples' AutoTP program, unedited but for its device, on four ranks: autotp.py STAGE.

DEEPSPEED_EXAMPLES names the checkout.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import cpu_ranks
import torch

EXAMPLE = "training/tensor_parallel/basic_example/autotp_example.py"


def main() -> None:
    """Train three steps on a small Llama, whose files are made first."""
    cpu_ranks.without_compiler()
    from trainer import tiny_llama

    folder = Path(f"llama-{os.environ['RANK']}")
    if not folder.exists():
        tiny_llama().save_pretrained(folder)
    path = Path(os.environ["DEEPSPEED_EXAMPLES"], EXAMPLE)
    line = 'torch.device(f"cuda:{rank % torch.cuda.device_count()}")'
    source = path.read_text()
    assert line in source
    options = {
        "model_name": folder, "tp_size": 2, "dp_size": 2, "zero_stage": sys.argv[1], "seq_length": 32,
        "num_steps": 3, "precision": "fp32",
    }  # fmt: skip
    sys.argv = [str(path), *(text for name, value in options.items() for text in (f"--{name}", str(value)))]
    torch.manual_seed(7)
    names = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(source.replace(line, 'torch.device("cpu")'), str(path), "exec"), names)


if __name__ == "__main__":
    main()
