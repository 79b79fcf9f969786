"""What programs of `tests/external/frameworks` communicate, written by hand from the sources of their libraries.

Versions: transformers 5.24, accelerate 1.15, TRL 1.16, Lightning 2.6, DeepSpeed 0.19.8, Megatron-Core 0.16.1, torch
2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Program(NamedTuple):
    """A program, and what its log must contain."""

    name: str
    steps: int
    purposes: Mapping[str, str]
    """Purpose -> operations, with the numbers of calls of rank 0."""
    dimensions: str = "data"
    """Parallel dimensions of the calls, without groups of one rank."""
    ranks: int = 2
    rules: int = 0
    """Exit status of `check` with the rules."""
    dry_run: int = 0
    """Exit status of `check` against a dry run."""
    miss: str = ""
    """What is not as a user would expect, and why."""


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

_DEEPSPEED_ZERO1: Final = {
    "parameters distributed at start": "broadcast 16",
    "gradients reduced": "all_reduce 3",
    "gradient norm": "all_reduce 3",
    "parameters gathered after the optimizer": "all_gather 3",
    "checkpoint saved": "all_reduce 2, barrier 2",
}
"""Also of a resumed run: DeepSpeed loads without calls."""
_DEEPSPEED_MOE: Final = {
    "parameters distributed at start": "broadcast 17",  # those of experts in a group of one rank
    # One in each forward pass of six micro-batches and two evaluations, and both backward.
    "tokens dispatched to experts": "all_to_all 8",
    "tokens combined from experts": "all_to_all 8",
    "gradients of tokens of experts": "all_to_all 12",
    "gradients reduced": "all_reduce 12",  # of experts, and of other parameters
    "gradient norm": "all_reduce 9",
    "parameters gathered after the optimizer": "all_gather 3",
    "checkpoint saved": "all_reduce 2, barrier 2",
}
_MOE_MISS: Final = "no rules; calls of checkpoints are in dimension `world`: data and expert have its ranks"
_DEEPSPEED_ZERO3: Final = {
    "barriers of libraries": "barrier 3",  # while the optimizer is built
    # One for each of 16 parameters: partitioned, gathered to find its node in autograd's graph, and broadcast.
    "parameters distributed at start": "all_gather 16, broadcast 32",
    "model compared between ranks": "broadcast 8",
    # Several parameters at once, as far as they are known to be used next: those of six micro-batches and two
    # evaluations.
    "parameters gathered for forward": "all_gather 14",
    "parameters gathered for backward": "all_gather 8",
    "gradients reduced": "reduce_scatter 6",
    "gradient norm": "all_reduce 3",
    "checkpoint saved": "all_reduce 2, barrier 2",
}
_FABRIC_FSDP: Final = {
    # Four units in four steps, and in an evaluation of one batch. None is kept: the root has no parameters of its own.
    "parameters gathered for forward": "all_gather 20",
    "parameters gathered for backward": "all_gather 16",
    "gradients reduced": "reduce_scatter 16",
    # Plans and results of ranks as pickled objects (sizes and contents), the folder, a barrier.
    "checkpoint saved": "all_gather 2, barrier 1, broadcast 5, gather 2, scatter 2",
    "the program's own": "all_gather 1, all_reduce 4, barrier 5",
}
_ACCELERATE_FSDP: Final = {
    # Four units in six micro-batches: two blocks; embeddings with the head; the root, which, as the third one, is kept
    # until the backward pass has ended. In both batches of an evaluation the blocks, in the first one all.
    "parameters gathered for forward": "all_gather 30",
    "parameters gathered for backward": "all_gather 12",
    "gradients reduced": "reduce_scatter 12",  # in the last micro-batch of a step
    "gradient norm": "all_reduce 3",
    "metrics": "all_gather 2",
    # Of the model and the optimizer: plans and results are exchanged as pickled objects.
    "checkpoint saved": "all_gather 4, broadcast 6, gather 4, scatter 4",
    "the program's own": "all_gather 6, barrier 1",
}
_ACCELERATE_ZERO2: Final = {
    "parameters distributed at start": "broadcast 28",
    "gradients reduced": "all_reduce 6",
    "gradient norm": "all_reduce 3",
    "parameters gathered after the optimizer": "all_gather 3",
    "checkpoint saved": "all_reduce 2, barrier 2",
    "metrics": "all_gather 2",
    "the program's own": "all_gather 6, barrier 1",
}
_FABRIC_ZERO2: Final = {
    "parameters distributed at start": "broadcast 16",
    "gradients reduced": "all_reduce 4",
    "gradient norm": "all_reduce 4",
    "parameters gathered after the optimizer": "all_gather 4",
    "checkpoint saved": "all_reduce 2, barrier 3, broadcast 2",
    "the program's own": "all_gather 1, all_reduce 4, barrier 5",
}
_TRL_RESUMED: Final = {
    "loss": "all_gather 2",
    # The Trainer's, and of four micro-batches and a batch of an evaluation as for all four steps.
    "metrics": "all_gather 26",
}
_ACCELERATE_DDP: Final = {
    **_DDP_BUILT,
    "buckets agreed": "broadcast 2",
    "gradients reduced": "all_reduce 3",
    "metrics": "all_gather 2",  # gather_for_metrics
    "the program's own": "all_gather 6, barrier 1",  # gather() and wait_for_everyone()
}
# Descriptions of batches as pickled objects (size and contents), and batches.
_ACCELERATE_SENT: Final = {**_ACCELERATE_DDP, "data": "broadcast 32"}
_TRAINER_RESUMED: Final = {
    "loss": "all_gather 4",
    "metrics": "all_gather 8",
}
"""Two steps, an evaluation and a checkpoint after those of `_TRAINER`."""
PROGRAMS: Final[dict[str, Program]] = {
    "trainer.py ddp": Program(
        "Trainer, DDP",
        4,
        {
            **_DDP_BUILT,
            **_TRAINER,
            "buffers broadcast": "broadcast 4",
            "gradients reduced": "all_reduce 4",
            "used parameters exchanged": "all_reduce 4",
        },
    ),
    "trainer.py zero1": Program(
        "Trainer, ZeRO-1",
        4,
        {
            **_TRAINER,
            "parameters distributed at start": "broadcast 21",  # one for each parameter
            "gradients reduced": "all_reduce 4",
            "gradient norm": "all_reduce 4",
            "parameters gathered after the optimizer": "all_gather 4",
            "checkpoint saved": _ZERO_CHECKPOINTS,
        },
    ),
    "trainer.py zero2": Program(
        "Trainer, ZeRO-2",
        4,
        {
            **_TRAINER,
            "parameters distributed at start": "broadcast 21",
            "gradients reduced": "all_reduce 8",  # after each micro-batch
            "gradient norm": "all_reduce 4",
            "parameters gathered after the optimizer": "all_gather 4",
            "checkpoint saved": _ZERO_CHECKPOINTS,
        },
    ),
    "trainer.py fsdp": Program(
        "Trainer, FSDP2",
        4,
        {
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
    ),
    "trainer.py zero3": Program(
        "Trainer, ZeRO-3",
        4,
        {
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
    ),
    "trl_sft.py ddp": Program(
        "TRL, SFT with DDP",
        4,
        {
            **_DDP_BUILT,
            "barriers of libraries": "barrier 4",  # around the preparation of the data sets, by rank 0 first
            "buffers broadcast": "broadcast 4",
            "gradients reduced": "all_reduce 4",
            "used parameters exchanged": "all_reduce 4",
            "loss": "all_gather 4",
            # Those of the Trainer; three values of each of 8 micro-batches and 2 batches of evaluations; tokens.
            "metrics": "all_gather 51",
        },
    ),
    "accelerate_loop.py ddp dispatch": Program("accelerate, DDP, rank 0 loads the data", 3, _ACCELERATE_SENT),
    "accelerate_loop.py ddp dispatch resume": Program(
        "accelerate, DDP, rank 0 loads the data, resumed", 3, _ACCELERATE_SENT
    ),
    "accelerate_loop.py zero2": Program("accelerate, ZeRO-2", 3, _ACCELERATE_ZERO2),
    "lightning_fit.py ddp": Program(
        "Lightning, DDP",
        3,
        {
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
    ),
    "fabric_loop.py ddp": Program(
        "Fabric, DDP",
        4,
        {
            **_DDP_BUILT,
            "buckets agreed": "broadcast 2",
            "gradients reduced": "all_reduce 4",
            "checkpoint saved": "barrier 1",
            # Four reduced losses, each with Lightning's barrier; a gathered loss; a barrier.
            "the program's own": "all_gather 1, all_reduce 4, barrier 5",
        },
    ),
    "deepspeed_loop.py 1": Program(
        "DeepSpeed alone, ZeRO-1",
        3,
        _DEEPSPEED_ZERO1,
    ),
    "deepspeed_loop.py moe": Program(
        "DeepSpeed MoE with ZeRO-2",
        3,
        _DEEPSPEED_MOE,
        "data expert world",
        rules=3,
        miss=_MOE_MISS,
    ),
    "autotp.py 1": Program(
        "DeepSpeedExamples, AutoTP with ZeRO-1",
        3,
        {
            "parameters distributed at start": "broadcast 21",
            "activations": "all_gather 3, all_reduce 12",
            "activation gradients": "all_reduce 33",
            "gradients reduced": "all_reduce 3",
            "gradient norm": "all_reduce 6",  # over data-parallel ranks, then over tensor-parallel ones
            "parameters gathered after the optimizer": "all_gather 3",
            "data": "all_reduce 1, broadcast 2",  # the first inputs are compared between tensor-parallel ranks
            "the program's own": "broadcast 6",
        },
        "data tensor",
        ranks=4,
        rules=3,
        miss="no rules; a batch that is sent before the first forward pass is part of start-up",
    ),
    "accelerate_loop.py fsdp": Program("accelerate, FSDP2", 3, _ACCELERATE_FSDP),
    "lightning_fit.py fsdp": Program(
        "Lightning, FSDP2",
        3,
        {
            # Four units in six micro-batches, and in the eight batches of both validations.
            "parameters gathered for forward": "all_gather 56",
            # After the first validation, the unit that ran last in it is prefetched once.
            "parameters gathered for backward": "all_gather 25",
            "gradients reduced": "reduce_scatter 24",  # Lightning reduces after each micro-batch
            "barriers of libraries": "barrier 6",
            "data": "all_reduce 3, barrier 3",
            "evaluation": "barrier 1",
            "flags agreed": "broadcast 6",
            "metrics": "all_reduce 10, barrier 10",
            "objects exchanged": "broadcast 2",
        },
    ),
    "fabric_loop.py fsdp": Program("Fabric, FSDP2", 4, _FABRIC_FSDP),
    "deepspeed_loop.py 3": Program("DeepSpeed alone, ZeRO-3", 3, _DEEPSPEED_ZERO3),
    "trainer.py ddp resume": Program(
        "Trainer, DDP, resumed",
        2,
        {
            **_DDP_BUILT,
            **_TRAINER_RESUMED,
            "buffers broadcast": "broadcast 2",
            "gradients reduced": "all_reduce 2",
            "used parameters exchanged": "all_reduce 2",
        },
    ),
    "trainer.py fsdp resume": Program(
        "Trainer, FSDP2, resumed",
        2,
        {
            **_TRAINER_RESUMED,
            "parameters gathered for forward": "all_gather 23",
            "parameters gathered for backward": "all_gather 12",  # no step follows the evaluation
            "gradients reduced": "reduce_scatter 8",
            "gradient norm": "all_reduce 2",
            "checkpoint loaded": "all_gather 6, barrier 4, broadcast 2, gather 2, scatter 4",
            "checkpoint saved": "all_gather 4, broadcast 6, gather 4, scatter 4",
        },
    ),
    "trainer.py zero1 resume": Program(
        "Trainer, ZeRO-1, resumed",
        2,
        {
            **_TRAINER_RESUMED,
            "parameters distributed at start": "broadcast 21",
            "gradients reduced": "all_reduce 2",
            "gradient norm": "all_reduce 2",
            "parameters gathered after the optimizer": "all_gather 2",
            "checkpoint saved": "all_reduce 2, barrier 2",
        },
    ),
    "trainer.py zero2 resume": Program(
        "Trainer, ZeRO-2, resumed",
        2,
        {
            **_TRAINER_RESUMED,
            "parameters distributed at start": "broadcast 21",
            "gradients reduced": "all_reduce 4",
            "gradient norm": "all_reduce 2",
            "parameters gathered after the optimizer": "all_gather 2",
            "checkpoint saved": "all_reduce 2, barrier 2",
        },
    ),
    "accelerate_loop.py fsdp resume": Program(
        "accelerate, FSDP2, resumed",
        3,
        {**_ACCELERATE_FSDP, "checkpoint loaded": "all_gather 6, barrier 4, broadcast 2, gather 2, scatter 4"},
    ),
    "fabric_loop.py fsdp resume": Program(
        "Fabric, FSDP2, resumed",
        4,
        {**_FABRIC_FSDP, "checkpoint loaded": "all_gather 6, barrier 1, broadcast 4, gather 2, scatter 4"},
    ),
    "accelerate_loop.py ddp": Program("accelerate, DDP", 3, _ACCELERATE_DDP),
    "accelerate_loop.py zero2 resume": Program("accelerate, ZeRO-2, resumed", 3, _ACCELERATE_ZERO2),
    "fabric_loop.py zero2": Program("Fabric, ZeRO-2", 4, _FABRIC_ZERO2),
    "fabric_loop.py zero2 resume": Program(
        "Fabric, ZeRO-2, resumed", 4, {**_FABRIC_ZERO2, "checkpoint loaded": "barrier 1"}
    ),
    "fabric_loop.py ddp resume": Program(
        "Fabric, DDP, resumed",
        4,
        {
            **_DDP_BUILT,
            "buckets agreed": "broadcast 2",
            "gradients reduced": "all_reduce 4",
            "checkpoint saved": "barrier 1",
            "checkpoint loaded": "barrier 1",
            "the program's own": "all_gather 1, all_reduce 4, barrier 5",
        },
    ),
    "lightning_fit.py zero2": Program(
        "Lightning, ZeRO-2",
        3,
        {
            "parameters distributed at start": "broadcast 16",
            "gradients reduced": "all_reduce 6",
            "gradient norm": "all_reduce 3",
            "parameters gathered after the optimizer": "all_gather 3",
            "barriers of libraries": "barrier 6",
            "data": "all_reduce 3, barrier 3",
            "evaluation": "barrier 1",
            "flags agreed": "broadcast 6",
            "metrics": "all_reduce 10, barrier 10",
            "objects exchanged": "broadcast 2",
        },
    ),
    "lightning_fit.py zero3": Program(
        "Lightning, ZeRO-3",
        3,
        {
            "barriers of libraries": "barrier 9",  # three while the optimizer is built, six of Lightning
            "parameters distributed at start": "all_gather 16, broadcast 32",
            # Numbers and order of modules and parameters, in training and in the validation before it.
            "model compared between ranks": "broadcast 16",
            "parameters gathered for forward": "all_gather 16",  # all are small, and kept from the first pass on
            "parameters gathered for backward": "all_gather 8",
            "gradients reduced": "reduce_scatter 6",
            "gradient norm": "all_reduce 3",
            "parameters gathered after the optimizer": "all_gather 48",  # those that are kept
            "data": "all_reduce 3, barrier 3",
            "evaluation": "barrier 1",
            "flags agreed": "broadcast 6",
            "metrics": "all_reduce 10, barrier 10",
            "objects exchanged": "broadcast 2",
        },
    ),
    "trainer.py zero3 resume": Program(
        "Trainer, ZeRO-3, resumed",
        2,
        {
            **_TRAINER_RESUMED,
            "barriers of libraries": "barrier 3",
            "parameters distributed at start": "all_gather 21, broadcast 42",
            "checkpoint loaded": "all_gather 21",  # those that are kept
            "parameters gathered for forward": "all_gather 1",
            "parameters gathered for backward": "all_gather 21",
            "model compared between ranks": "broadcast 8",
            "gradients reduced": "reduce_scatter 4",
            "gradient norm": "all_reduce 2",
            "parameters gathered after the optimizer": "all_gather 42",
            "checkpoint saved": "all_gather 42, all_reduce 4, barrier 4",
        },
    ),
    "trl_sft.py fsdp": Program(
        "TRL, SFT with FSDP2",
        4,
        {
            "barriers of libraries": "barrier 4",
            "loss": "all_gather 4",
            "metrics": "all_gather 51",
            # As the Trainer's, with one batch in an evaluation instead of two.
            "parameters gathered for forward": "all_gather 40",
            "parameters gathered for backward": "all_gather 25",
            "gradients reduced": "reduce_scatter 16",
            "gradient norm": "all_reduce 4",
            "checkpoint saved": "all_gather 8, broadcast 12, gather 8, scatter 8",
        },
    ),
    "trl_sft.py zero3": Program(
        "TRL, SFT with ZeRO-3",
        4,
        {
            "barriers of libraries": "barrier 7",  # three while the optimizer is built
            "loss": "all_gather 4",
            "metrics": "all_gather 51",
            "parameters distributed at start": "all_gather 21, broadcast 42",
            "parameters gathered for forward": "all_gather 22",
            "parameters gathered for backward": "all_gather 21",
            "model compared between ranks": "broadcast 8",
            "gradients reduced": "reduce_scatter 8",
            "gradient norm": "all_reduce 4",
            "parameters gathered after the optimizer": "all_gather 84",
            "checkpoint saved": "all_gather 84, all_reduce 8, barrier 8",
        },
    ),
    "trl_sft.py zero3 resume": Program(
        "TRL, SFT with ZeRO-3, resumed",
        2,
        {
            **_TRL_RESUMED,
            "barriers of libraries": "barrier 7",
            "parameters distributed at start": "all_gather 21, broadcast 42",
            "checkpoint loaded": "all_gather 21",
            "parameters gathered for forward": "all_gather 1",
            # Not the head's, which was loaded, and which no module releases: the head does not run.
            "parameters gathered for backward": "all_gather 20",
            "model compared between ranks": "broadcast 8",
            "gradients reduced": "reduce_scatter 4",
            "gradient norm": "all_reduce 2",
            "parameters gathered after the optimizer": "all_gather 42",
            "checkpoint saved": "all_gather 42, all_reduce 4, barrier 4",
        },
    ),
    "trl_sft.py ddp resume": Program(
        "TRL, SFT with DDP, resumed",
        2,
        {
            **_DDP_BUILT,
            **_TRL_RESUMED,
            "barriers of libraries": "barrier 4",
            "buffers broadcast": "broadcast 2",
            "gradients reduced": "all_reduce 2",
            "used parameters exchanged": "all_reduce 2",
        },
    ),
    "trl_sft.py fsdp resume": Program(
        "TRL, SFT with FSDP2, resumed",
        2,
        {
            **_TRL_RESUMED,
            "barriers of libraries": "barrier 4",
            "parameters gathered for forward": "all_gather 20",
            "parameters gathered for backward": "all_gather 12",
            "gradients reduced": "reduce_scatter 8",
            "gradient norm": "all_reduce 2",
            "checkpoint loaded": "all_gather 6, barrier 4, broadcast 2, gather 2, scatter 4",
            "checkpoint saved": "all_gather 4, broadcast 6, gather 4, scatter 4",
        },
    ),
    "accelerate_loop.py ddp resume": Program("accelerate, DDP, resumed", 3, _ACCELERATE_DDP),
    "deepspeed_loop.py 1 resume": Program("DeepSpeed alone, ZeRO-1, resumed", 3, _DEEPSPEED_ZERO1),
    "deepspeed_loop.py 3 resume": Program("DeepSpeed alone, ZeRO-3, resumed", 3, _DEEPSPEED_ZERO3),
    "deepspeed_loop.py moe resume": Program(
        "DeepSpeed MoE with ZeRO-2, resumed",
        3,
        _DEEPSPEED_MOE,
        "data expert world",
        rules=3,
        miss=_MOE_MISS,
    ),
    "megatron_core.py 1 1 1 2": Program(
        "Megatron-Core with experts",
        3,
        {
            "objects exchanged": "all_gather 4",  # the optimizer's groups of parameters, of two optimizers
            # Four layers in four micro-batches of three steps and an evaluation: the numbers, then tokens and their
            # probabilities.
            "numbers of tokens of experts": "all_gather 64",
            "tokens dispatched to experts": "all_to_all 128",
            "tokens combined from experts": "all_to_all 64",
            "gradients of tokens of experts": "all_to_all 144",
            # Maximum, predicted logit and sum of exponentials, in a tensor-parallel group of one rank.
            "loss": "all_reduce 48",
            "gradients reduced": "all_reduce 6",  # of experts, in a group of one rank, and of other parameters
            "gradient norm": "all_reduce 6",
        },
        "data expert world",
        rules=3,
        miss="no rules; a dry run routes other numbers of tokens: their sizes are not compared",
    ),
}
"""Program, with its arguments -> what its log must contain. One that resumes needs the files of the other."""
