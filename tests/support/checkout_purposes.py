"""What programs of checkouts communicate, written by hand from their sources: torchtitan, pytorch/examples, picotron.

torchtitan at commit b64292ba1 of May 2026, pytorch/examples at 77f55b9, picotron at 59714b1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import framework_purposes
from framework_purposes import Program

# ---- torchtitan: three steps, checkpoints after the second and the last; resumed: two more, and two checkpoints ------

_LLAMA: Final = "titan.py --module llama3 --config llama3_debugmodel"
_SPLIT: Final = f"{_LLAMA} --parallelism.tensor_parallel_degree 2 --activation_checkpoint.mode"
_STAGES: Final = (
    f"{_LLAMA} --parallelism.pipeline_parallel_degree 2 --training.local_batch_size 4 "
    "--parallelism.pipeline_parallel_schedule"
)
_EXPERTS: Final = (
    "titan.py --module deepseek_v3 --config deepseek_v3_debugmodel --parallelism.expert_parallel_degree 2 "
    "--activation_checkpoint.mode"
)
_LAYERS: Final = 6
_UNITS: Final = _LAYERS + 2
"""Units of FSDP2: embedding, layers, and the final norm with the head."""
_LOSS_IN_CHUNKS: Final = "no rules: the loss in chunks gathers the final norm and the head on their own"
_NO_PIPELINES: Final = "no rules for pipelines of PyTorch"
_OWN_STYLES: Final = "no rules: torchtitan shards tensors without parallelize_module"


def _saved(**others: str) -> dict[str, str]:
    """Return the calls of both checkpoints, and the program's own: a barrier at the end, and `others`."""
    own = ", ".join([*(f"{op} {number}" for op, number in sorted(others.items())), "barrier 1"])
    # Plans and results of ranks as pickled objects (sizes and contents), the folder.
    return {"checkpoint saved": "all_gather 4, broadcast 6, gather 4, scatter 4", "the program's own": own}


_LOADED: Final = {"checkpoint loaded": "all_gather 3, broadcast 1, gather 1, scatter 2"}


def _sharded(steps: int = 3, units: int = _UNITS, backward: int = _UNITS) -> dict[str, str]:
    """Return the calls of FSDP2. The loss in chunks uses the last unit again, in the first step still gathered."""
    return {
        "parameters gathered for forward": f"all_gather {steps * (units + 1) - 1}",
        "parameters gathered for backward": f"all_gather {steps * backward}",
        "gradients reduced": f"reduce_scatter {steps * (units + 1)}",
        "gradient norm": f"all_reduce {steps}",
        # The loss, its maximum, the number of tokens seen, and the number of the next step's tokens.
        "metrics": f"all_reduce {4 * steps}",
    }


def _split(gathered: int = 0, scattered: int = 0, steps: int = 3) -> dict[str, str]:
    """Return the calls of FSDP2 with tensor and sequence parallelism, and those that recompute activations."""
    both = 2 * _LAYERS
    recomputed = [
        f"{op} {steps * number}" for op, number in (("all_gather", gathered), ("reduce_scatter", scattered)) if number
    ]
    return {
        **({"activations recomputed": ", ".join(recomputed)} if recomputed else {}),
        **_sharded(steps),
        "parameters distributed at start": "broadcast 1",
        "activations": f"all_gather {steps * both}, reduce_scatter {steps * (both + 1)}",
        "activation gradients": f"all_gather {steps * (both + 1)}, reduce_scatter {steps * both}",
        # Norms have sharded inputs.
        "gradients reduced": f"all_reduce {steps * (both + 1)}, reduce_scatter {steps * (_UNITS + 1)}",
        "gradient norm": f"all_reduce {2 * steps}",
        "distributed tensors outside of the model": f"all_gather {steps}",  # before the chunks of the loss
        "loss": f"all_reduce {steps * 3 * 8}",  # of eight chunks
        "metrics": f"all_reduce {2 * steps}",  # the loss is a DTensor that is not reduced
    }


def _staged(steps: int = 3, stages: int = 2) -> dict[str, str]:
    """Return the messages of the first of two ranks: four micro-batches, and a description of each at the start."""
    sent, received = 4 * (stages // 2), 4 * (stages // 2 - 1)
    activations = [*([f"recv {steps * received}"] if received else []), f"send {steps * sent}"]
    gradients = [f"recv {steps * sent}", *([f"send {steps * received}"] if received else [])]
    set_up = 3 * (stages - 1)
    return {
        "pipeline stages set up": f"recv {set_up}, send {set_up}",
        "pipeline activations": ", ".join(activations),
        "pipeline gradients": ", ".join(gradients),
        "gradient norm": f"all_reduce {steps}",
    }


def _split_and_routed(steps: int = 3) -> dict[str, str]:
    """Return the calls of `_split` and `_routed` together, with full checkpointing: experts have units of their own."""
    layers, units = _LAYERS - 1, _UNITS + _LAYERS - 1
    tokens = f"all_to_all {steps * layers}"
    split = _split(gathered=2 * _LAYERS, scattered=2 * _LAYERS, steps=steps)
    summed = 2 * _LAYERS + 1 + 2 * _LAYERS + layers  # norms, the latents' projections and norms, routers
    return {
        **split,
        **_sharded(steps, units, units),
        # Routers take a local tensor, whose gradient is summed.
        "activation gradients": f"all_gather {steps * (2 * _LAYERS + 1)}, all_reduce {steps * layers}, "
        f"reduce_scatter {steps * 2 * _LAYERS}",
        "activations recomputed": f"all_gather {steps * 2 * _LAYERS}, all_to_all {steps * 3 * layers}, "
        f"reduce_scatter {steps * 2 * _LAYERS}",
        "gradients reduced": f"all_reduce {steps * summed}, reduce_scatter {steps * (units + 1)}",
        "gradient norm": f"all_reduce {4 * steps}",  # over both dimensions of the experts and of the others
        "metrics": split["metrics"],
        "numbers of tokens of experts": tokens,
        "tokens dispatched to experts": tokens,
        "tokens combined from experts": tokens,
        "gradients of tokens of experts": f"all_to_all {2 * steps * layers}",
    }


def _routed(steps: int = 3) -> dict[str, str]:
    """Return the calls of five layers with experts; selective checkpointing keeps what was received."""
    layers = _LAYERS - 1
    return {
        **_sharded(steps),
        "gradient norm": f"all_reduce {2 * steps}",  # of experts, and of other parameters
        "numbers of tokens of experts": f"all_to_all {steps * layers}",
        "tokens dispatched to experts": f"all_to_all {steps * layers}",
        "tokens combined from experts": f"all_to_all {steps * layers}",
        "gradients of tokens of experts": f"all_to_all {2 * steps * layers}",
    }


_TITAN: Final[Mapping[str, Program]] = {
    _LLAMA: Program("torchtitan, FSDP2", 3, {**_sharded(), **_saved()}, rules=3, miss=_LOSS_IN_CHUNKS),
    f"{_LLAMA} resume": Program(
        "torchtitan, FSDP2, resumed", 2, {**_sharded(2), **_LOADED, **_saved()}, rules=3, miss=_LOSS_IN_CHUNKS
    ),
    f"{_LLAMA} --parallelism.fsdp_reshard_after_forward never": Program(
        "torchtitan, FSDP2, never resharded", 3, {**_sharded(backward=1), **_saved()}, rules=3, miss=_LOSS_IN_CHUNKS
    ),
    # Gradients are summed over the ranks that have the same shard, too.
    f"{_LLAMA} --parallelism.data_parallel_replicate_degree 2": Program(
        "torchtitan, HSDP",
        3,
        {
            **_sharded(),
            "gradients reduced": f"all_reduce {3 * (_UNITS + 1)}, reduce_scatter {3 * (_UNITS + 1)}",
            **_saved(),
        },
        ranks=4,
        rules=3,
        miss=_LOSS_IN_CHUNKS,
    ),
    # Eight layers, and one unit of the embedding, the norm and the head, whose weight is the embedding's.
    "titan.py --module qwen3 --config qwen3_debugmodel": Program(
        "torchtitan, Qwen3 with FSDP2",
        3,
        {**_sharded(units=9, backward=9), **_saved()},
        rules=3,
        miss=_LOSS_IN_CHUNKS,
    ),
    f"{_STAGES} 1F1B": Program(
        "torchtitan, 1F1B", 3, {**_staged(), **_saved()}, "pipeline", rules=3, miss=_NO_PIPELINES
    ),
    f"{_STAGES} 1F1B resume": Program(
        "torchtitan, 1F1B, resumed", 2, {**_staged(2), **_LOADED, **_saved()}, "pipeline", rules=3, miss=_NO_PIPELINES
    ),
    f"{_STAGES} Interleaved1F1B": Program(
        "torchtitan, interleaved 1F1B", 3, {**_staged(stages=4), **_saved()}, "pipeline", rules=3, miss=_NO_PIPELINES
    ),
    f"{_STAGES} InterleavedZeroBubble --activation_checkpoint.mode none": Program(
        "torchtitan, interleaved zero-bubble",
        3,
        {**_staged(stages=4), **_saved()},
        "pipeline",
        rules=3,
        miss=_NO_PIPELINES,
    ),
    # Of the first stage: the embedding and three layers, gathered once a step, and to agree on shapes. The norm is
    # reduced over shards, then over stages.
    f"{_STAGES} 1F1B --parallelism.data_parallel_shard_degree 2": Program(
        "torchtitan, 1F1B and FSDP2",
        3,
        {
            **_staged(),
            "parameters gathered for forward": f"all_gather {4 * (1 + 3)}",
            "gradients reduced": f"reduce_scatter {4 * 3}",
            "gradient norm": f"all_reduce {2 * 3}",
            "metrics": f"all_reduce {4 * 3}",
            **_saved(),
        },
        "data pipeline world",
        ranks=4,
        rules=3,
        miss=_NO_PIPELINES,
    ),
    f"{_SPLIT} selective": Program(
        "torchtitan, tensor and FSDP2, selective checkpointing",
        3,
        {**_split(gathered=2 * _LAYERS), **_saved()},
        "data tensor world",
        ranks=4,
        rules=3,
        miss=_OWN_STYLES,
    ),
    f"{_SPLIT} full": Program(
        "torchtitan, tensor and FSDP2, full checkpointing",
        3,
        {**_split(gathered=2 * _LAYERS, scattered=2 * _LAYERS), **_saved()},
        "data tensor world",
        ranks=4,
        rules=3,
        miss=_OWN_STYLES,
    ),
    f"{_SPLIT} none": Program(
        "torchtitan, tensor and FSDP2, no checkpointing",
        3,
        {**_split(), **_saved()},
        "data tensor world",
        ranks=4,
        rules=3,
        miss=_OWN_STYLES,
    ),
    # The program's own: tokens of experts, to balance their load.
    f"{_EXPERTS} selective": Program(
        "torchtitan, DeepSeek-V3 with experts",
        3,
        {**_routed(), **_saved(all_reduce="3")},
        "data expert world",
        rules=3,
        miss="no rules for experts",
    ),
    f"{_EXPERTS} selective resume": Program(
        "torchtitan, DeepSeek-V3 with experts, resumed",
        2,
        {**_routed(2), **_LOADED, **_saved(all_reduce="2")},
        "data expert world",
        rules=3,
        miss="no rules for experts",
    ),
    f"{_EXPERTS} full --parallelism.tensor_parallel_degree 2": Program(
        "torchtitan, DeepSeek-V3 with experts and tensor",
        3,
        {**_split_and_routed(), **_saved(all_reduce="3")},
        "data expert tensor world",
        ranks=4,
        rules=3,
        miss="no rules for experts",
    ),
}

# ---- pytorch/examples ------------------------------------------------------------------------------------------------

_FSDP2: Final = "pytorch_examples.py FSDP2/example.py"
_AHEAD: Final = f"{_FSDP2} --mixed-precision --explicit-prefetching"
_BLOCKS: Final = 10
_PARAMETERS: Final = 125
_TRAINED: Final = {
    # Ten steps of ten blocks and the root, which stays gathered for backward.
    "parameters gathered for forward": f"all_gather {10 * (_BLOCKS + 1)}",
    "parameters gathered for backward": f"all_gather {10 * _BLOCKS}",
    "gradients reduced": f"reduce_scatter {10 * (_BLOCKS + 1)}",
    "gradient norm": "all_reduce 10",
}
_REQUESTED: Final = {
    **_TRAINED,
    "parameters gathered for forward": f"all_gather {10 * _BLOCKS}",
    # The root before each pass, and once to look at its parameters.
    "parameters gathered on request": "all_gather 11",
}
_FULL_STATE: Final = {"distributed tensors outside of the model": f"all_gather {3 * _PARAMETERS}"}
"""Each parameter and both of its moments, gathered by `full_tensor` to be saved."""
_DISTRIBUTED: Final = {"parameters distributed at start": f"scatter {3 * _PARAMETERS}"}
_NO_STYLES: Final = "no rules for parallelize_module"
_ROWWISE: Final = {"parameters distributed at start": "broadcast 1, scatter 3"}
"""Two layers: only the bias of the second one is on all ranks."""

_EXAMPLES: Final[Mapping[str, Program]] = {
    _FSDP2: Program("pytorch/examples, FSDP2", 10, {**_TRAINED, **_FULL_STATE}),
    f"{_FSDP2} --dcp-api": Program(
        "pytorch/examples, FSDP2 with DCP", 10, {**_TRAINED, "state dict": f"all_gather {3 * _PARAMETERS}"}
    ),
    # To load, rank 0 broadcasts all parameters and moments, and descriptions of both states (size and contents).
    f"{_FSDP2} --dcp-api resume": Program(
        "pytorch/examples, FSDP2 with DCP, resumed",
        10,
        {**_TRAINED, "state dict": f"all_gather {3 * _PARAMETERS}, broadcast {3 * _PARAMETERS + 4}"},
    ),
    _AHEAD: Program("pytorch/examples, FSDP2 with explicit prefetching", 10, {**_REQUESTED, **_FULL_STATE}),
    f"{_AHEAD} resume": Program(
        "pytorch/examples, FSDP2 with explicit prefetching, resumed",
        10,
        {**_REQUESTED, **_FULL_STATE, **_DISTRIBUTED},
    ),
    f"{_FSDP2} resume": Program("pytorch/examples, FSDP2, resumed", 10, {**_TRAINED, **_FULL_STATE, **_DISTRIBUTED}),
    # The gradient of the input is not needed.
    "pytorch_examples.py tensor_parallelism/tensor_parallel_example.py": Program(
        "pytorch/examples, tensor",
        10,
        {**_ROWWISE, "activations": "all_reduce 10"},
        "tensor",
        ranks=4,
        rules=3,
        miss=_NO_STYLES,
    ),
    "pytorch_examples.py tensor_parallelism/sequence_parallel_example.py": Program(
        "pytorch/examples, tensor and sequence",
        10,
        {**_ROWWISE, "activations": "all_gather 10, reduce_scatter 10", "activation gradients": "all_gather 10"},
        "tensor",
        ranks=4,
        rules=3,
        miss=_NO_STYLES,
    ),
    # Two layers, and one unit of FSDP2. The head's outputs are gathered. Norms have sharded inputs.
    "pytorch_examples.py tensor_parallelism/fsdp_tp_example.py": Program(
        "pytorch/examples, tensor and FSDP2",
        10,
        {
            "parameters distributed at start": f"scatter {2 * 7 + 2}",
            "activations": f"all_gather {10 * (2 * 2 + 2)}, reduce_scatter {10 * (2 * 2 + 1)}",
            "activation gradients": f"all_gather {10 * (2 * 2 + 1)}, reduce_scatter {10 * (2 * 2 + 1)}",
            "parameters gathered for forward": "all_gather 10",
            "gradients reduced": f"all_reduce {10 * (2 * 2 + 1)}, reduce_scatter 10",
        },
        "data tensor",
        ranks=4,
        rules=3,
        miss=_NO_STYLES,
    ),
}

# ---- picotron: four steps of two micro-batches of a Llama with two layers, a checkpoint ------------------------------

_PICOTRON: Final = "picotron_train.py"
_NO_RULES: Final = "no rules for picotron"
# Tokenizer and configuration: sizes and contents. The program's own: the number of parameters.
_STARTED: Final = {"objects exchanged": "broadcast 4", "the program's own": "all_reduce 1, barrier 6"}
# In each step a bucket of gradients, and the loss.
_REDUCED: Final = {**_STARTED, "gradients reduced": "all_reduce 4", "metrics": "all_reduce 4"}

_PICOTRON_PROGRAMS: Final[Mapping[str, Program]] = {
    f"{_PICOTRON} 1 1 1 2": Program(
        "picotron, data",
        4,
        _REDUCED,
        "data",
        rules=3,
        miss=_NO_RULES,
    ),
    f"{_PICOTRON} 1 1 1 2 resume": Program(
        "picotron, data, resumed",
        4,
        _REDUCED,
        "data",
        rules=3,
        miss=_NO_RULES,
    ),
    # The first of two stages, in four steps of two micro-batches.
    f"{_PICOTRON} 1 1 2 1": Program(
        "picotron, pipeline",
        4,
        {**_STARTED, "pipeline activations": f"send {4 * 2}", "pipeline gradients": f"recv {4 * 2}"},
        "pipeline",
        rules=3,
        miss=_NO_RULES,
    ),
    # Forward: the embedding, and two projections of each layer, backward: five of each layer, and the head, whose
    # outputs are gathered.
    f"{_PICOTRON} 2 1 1 1": Program(
        "picotron, tensor",
        4,
        {
            **_STARTED,
            "activations": f"all_gather {4 * 2}, all_reduce {4 * 2 * (1 + 2 * 2)}",
            "activation gradients": f"all_reduce {4 * 2 * (2 * 5 + 1)}",
            "metrics": "all_reduce 4",
        },
        "tensor",
        rules=3,
        miss=_NO_RULES,
    ),
    # Keys and values go around a ring of two ranks, in 4 steps of 2 micro-batches through 2 layers: once in forward
    # and in backward, and their gradients twice.
    f"{_PICOTRON} 1 2 1 2": Program(
        "picotron, context and data",
        4,
        {
            **_REDUCED,
            "keys and values of other ranks": f"recv {16 * 2}, send {16 * 2}",
            "gradients of keys and values of other ranks": f"recv {16 * (2 + 4)}, send {16 * (2 + 4)}",
        },
        "context data world",
        ranks=4,
        rules=3,
        miss=_NO_RULES,
    ),
}

PROGRAMS: Final[Mapping[str, Program]] = {**framework_purposes.PROGRAMS, **_TITAN, **_EXAMPLES, **_PICOTRON_PROGRAMS}
"""All programs: those of frameworks, too."""
