"""Command line of the training, and the GPT-NeoX keys of its options."""

from __future__ import annotations

import argparse
from typing import Any

DESCRIPTION = """Train a GPT-NeoX-style model, alone or under torchrun, the deepspeed launcher, mpirun or srun.

CONFIG is the path of a GPT-NeoX file or the name of a shipped one: tiny, demo, 19M, 125M, 1-3B, 13B.
Later files override earlier ones, options override files."""


def arguments() -> argparse.ArgumentParser:
    """Create the argument parser."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.gpt_neox.train",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("configs", nargs="+", metavar="CONFIG", help="GPT-NeoX YAML files, or names of shipped ones")
    add("--engine", choices=("deepspeed", "ddp", "fsdp"), default="deepspeed", help="trainer (default: %(default)s)")
    add("--zero-stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage")
    add("--precision", choices=("fp32", "bf16", "fp16"))
    add("--micro-batch", type=int, metavar="N", help="sequences per rank and micro-batch")
    add("--gradient-accumulation", type=int, metavar="N", help="micro-batches per optimizer step")
    add("--train-iters", type=int, metavar="N", help="optimizer steps; the learning-rate schedule spans them")
    add("--seq-length", type=int, metavar="N")
    add("--checkpoint", choices=("off", "reentrant", "non-reentrant"), help="recompute activations in backward")
    add("--vocab", choices=("bytes", "words"), help="256 ids, or GPT-2's number of ids (50257)")
    add("--data", metavar="FILE", help="any text file (default: the help texts that come with Python)")
    add("--seed", type=int, metavar="N")
    add("--losses-out", metavar="FILE", help="write rank 0's loss of every step (JSON, exact hexadecimal floats)")
    add("--verbose", action="store_true", help="let DeepSpeed log, time and print as configured")
    # The deepspeed launcher adds this option; it also sets the environment variable.
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options as GPT-NeoX keys; None where an option was not given."""
    checkpoint = options.checkpoint
    return {
        "zero_stage": options.zero_stage,
        "precision": options.precision,
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": options.gradient_accumulation,
        "train_iters": options.train_iters,
        "lr_decay_iters": options.train_iters,
        "seq_length": options.seq_length,
        "max_position_embeddings": options.seq_length,
        "checkpoint_activations": None if checkpoint is None else checkpoint != "off",
        "checkpoint_reentrant": None if checkpoint in (None, "off") else checkpoint == "reentrant",
        "tokenizer_type": options.vocab,
        "seed": options.seed,
    }
