"""The calls of a rank in programs of `tests/external/frameworks`, by purpose, written by hand from their libraries.

Command -> purpose -> operations with their numbers of calls. Versions: transformers 5.24, accelerate 1.15, TRL 1.16,
Lightning 2.6, DeepSpeed 0.19.8, torch 2.13.
"""

from __future__ import annotations

from typing import Final

_DDP_BUILT: Final = {
    "model compared between ranks": "all_gather 1, broadcast 1",
    "parameters distributed at start": "broadcast 1",
}
# Four steps of two micro-batches; after the second and the fourth an evaluation of two batches, and a checkpoint.
_TRAINER: Final = {
    # Numbers of tokens, for each step and batch of an evaluation.
    "loss": "all_gather 8",
    # Losses of steps; floating-point operations of steps, checkpoints and the training; losses of batches.
    "metrics": "all_gather 15",
}
_ZERO_CHECKPOINTS: Final = "all_reduce 4, barrier 4"
"""The tag is compared by its minimum and maximum; barriers before and after writing."""

PURPOSES: Final[dict[str, dict[str, str]]] = {
    "trainer.py ddp": {
        **_DDP_BUILT,
        **_TRAINER,
        "buffers broadcast": "broadcast 4",
        "gradients reduced": "all_reduce 4",
        "used parameters exchanged": "all_reduce 4",
    },
    "trainer.py zero1": {
        **_TRAINER,
        "parameters distributed at start": "broadcast 21",  # one for each parameter
        "gradients reduced": "all_reduce 4",
        "gradient norm": "all_reduce 4",
        "parameters gathered after the optimizer": "all_gather 4",
        "checkpoint saved": _ZERO_CHECKPOINTS,
    },
    "trainer.py zero2": {
        **_TRAINER,
        "parameters distributed at start": "broadcast 21",
        "gradients reduced": "all_reduce 8",  # after each micro-batch
        "gradient norm": "all_reduce 4",
        "parameters gathered after the optimizer": "all_gather 4",
        "checkpoint saved": _ZERO_CHECKPOINTS,
    },
    "trainer.py fsdp": {
        **_TRAINER,
        # Four units in two micro-batches of four steps, and in evaluations of two batches, of which the second one
        # finds the last unit as the first one left it.
        "parameters gathered for forward": "all_gather 46",
        # The last unit, the root's, is kept. After an evaluation, the unit that ran last in it is prefetched once.
        "parameters gathered for backward": "all_gather 25",
        "gradients reduced": "reduce_scatter 16",  # of units, in the last micro-batch of a step
        "gradient norm": "all_reduce 4",
        # Of the model and the optimizer: plans and results are exchanged as pickled objects (sizes and contents).
        "checkpoint saved": "all_gather 8, broadcast 12, gather 8, scatter 8",
    },
    "trainer.py zero3": {
        **_TRAINER,
        "barriers of libraries": "barrier 3",  # while the optimizer is built
        # One for each parameter: partitioned, gathered to find its node in autograd's graph, and broadcast.
        "parameters distributed at start": "all_gather 21, broadcast 42",
        # Small parameters and, once gathered, the largest one are kept from the first step on.
        "parameters gathered for forward": "all_gather 22",
        "parameters gathered for backward": "all_gather 21",
        "model compared between ranks": "broadcast 8",  # numbers and order of modules and parameters
        "gradients reduced": "reduce_scatter 8",
        "gradient norm": "all_reduce 4",
        "parameters gathered after the optimizer": "all_gather 84",  # those that are kept
        # Twice in each of two checkpoints: kept parameters, the tag, barriers.
        "checkpoint saved": "all_gather 84, all_reduce 8, barrier 8",
    },
    "trl_sft.py ddp": {
        **_DDP_BUILT,
        "barriers of libraries": "barrier 4",  # around the preparation of the data sets, by rank 0 first
        "buffers broadcast": "broadcast 4",
        "gradients reduced": "all_reduce 4",
        "used parameters exchanged": "all_reduce 4",
        "loss": "all_gather 4",
        # Those of the Trainer; three values of each of 8 micro-batches and 2 batches of evaluations; tokens.
        "metrics": "all_gather 51",
    },
    "accelerate_loop.py ddp dispatch": {
        **_DDP_BUILT,
        "buckets agreed": "broadcast 2",
        "gradients reduced": "all_reduce 3",
        # Descriptions of batches as pickled objects (size and contents), and batches.
        "data": "broadcast 32",
        "metrics": "all_gather 2",  # gather_for_metrics
        "the program's own": "all_gather 6, barrier 1",  # gather() and wait_for_everyone()
    },
    "accelerate_loop.py zero2": {
        "parameters distributed at start": "broadcast 28",
        "gradients reduced": "all_reduce 6",
        "gradient norm": "all_reduce 3",
        "parameters gathered after the optimizer": "all_gather 3",
        "checkpoint saved": "all_reduce 2, barrier 2",
        "metrics": "all_gather 2",
        "the program's own": "all_gather 6, barrier 1",
    },
    "lightning_fit.py ddp": {
        **_DDP_BUILT,
        "buckets agreed": "broadcast 2",
        "gradients reduced": "all_reduce 3",
        "barriers of libraries": "barrier 5",  # around set-up and the beginning of the training
        "data": "all_reduce 3, barrier 3",  # do all ranks have batches?
        "evaluation": "barrier 1",  # its data are set up
        "flags agreed": "broadcast 6",  # has a rank received SIGTERM?
        "metrics": "all_reduce 10, barrier 10",  # one of six micro-batches, two of both validations
        "objects exchanged": "broadcast 2",  # the folder of logs
    },
    "fabric_loop.py ddp": {
        **_DDP_BUILT,
        "buckets agreed": "broadcast 2",
        "gradients reduced": "all_reduce 4",
        "checkpoint saved": "barrier 1",
        # Four reduced losses, each with Lightning's barrier; a gathered loss; a barrier.
        "the program's own": "all_gather 1, all_reduce 4, barrier 5",
    },
    "deepspeed_loop.py 1": {
        "parameters distributed at start": "broadcast 16",
        "gradients reduced": "all_reduce 3",
        "gradient norm": "all_reduce 3",
        "parameters gathered after the optimizer": "all_gather 3",
        "checkpoint saved": "all_reduce 2, barrier 2",
    },
    "deepspeed_loop.py moe": {
        "parameters distributed at start": "broadcast 17",  # those of experts in a group of one rank
        # One in each forward pass of six micro-batches and two evaluations, and both backward.
        "tokens dispatched to experts": "all_to_all 8",
        "tokens combined from experts": "all_to_all 8",
        "gradients of tokens of experts": "all_to_all 12",
        "gradients reduced": "all_reduce 12",  # of experts, and of other parameters
        "gradient norm": "all_reduce 9",
        "parameters gathered after the optimizer": "all_gather 3",
        "checkpoint saved": "all_reduce 2, barrier 2",
    },
    "autotp.py 1": {
        "parameters distributed at start": "broadcast 21",
        "activations": "all_gather 3, all_reduce 12",
        "activation gradients": "all_reduce 33",
        "gradients reduced": "all_reduce 3",
        "gradient norm": "all_reduce 6",  # over data-parallel ranks, then over tensor-parallel ones
        "parameters gathered after the optimizer": "all_gather 3",
        "data": "all_reduce 1, broadcast 2",  # the first inputs are compared between tensor-parallel ranks
        "the program's own": "broadcast 6",
    },
}
