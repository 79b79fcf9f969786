"""Prepare a run of GPT-NeoX in its checkout: a data set made from its sources, and the arguments of its ranks.

python start.py CONFIG DATA writes DATA.bin and DATA.idx, and prints as JSON what deepy.py would pass to the launcher.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, ".")


def write_data(prefix: str) -> None:
    """Write the bytes of GPT-NeoX's sources as an indexed data set with one document per file."""
    from megatron.data import indexed_dataset

    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=512)
    for path in sorted(Path("megatron").rglob("*.py")):
        builder.add_item(np.array([*path.read_bytes(), 0], dtype=np.uint16))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def arguments(config: str) -> list[str]:
    """Return the script and its arguments."""
    from megatron.neox_arguments import NeoXArgs

    command: list[str] = NeoXArgs.consume_deepy_args(["train.py", config]).get_deepspeed_main_args()
    return command[command.index("train.py") :]


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        write_data(sys.argv[2])
        rank_arguments = arguments(sys.argv[1])
    print(json.dumps(rank_arguments))
