"""What a job row says of any model, whoever trains it: its parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final


def parameters(module: Any) -> list[dict[str, Any]]:
    """Name, shape, element type of each parameter of the whole model; shared ones once, partitioned ones whole.

    Of experts, those of this rank, with the mark `expert`.
    """
    return [
        {
            **_tensor(name, parameter),
            "trainable": bool(parameter.requires_grad),
            **({} if getattr(parameter, "allreduce", True) else {"expert": True}),  # DeepSpeed's mark of experts
        }
        for name, parameter in module.named_parameters()
    ]


def buffers(module: Any) -> list[dict[str, Any]]:
    """Name, shape, element type of each buffer."""
    return [_tensor(name, buffer) for name, buffer in module.named_buffers()]


def grouped(module: Any, groups: Iterable[Iterable[Any]]) -> list[list[int]]:
    """Groups of parameters as their numbers in `parameters`. Raises KeyError for one that is not the model's."""
    numbers = _numbers(module)
    return [[numbers[id(parameter)] for parameter in group] for group in groups]


_NEOX: Final = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "padded_vocab_size",
    "no_weight_tying",
    "gpt_j_residual",
    "hidden_dropout",
    "attention_dropout",
    "checkpoint_activations",
    "checkpoint_num_layers",
    "checkpoint_reentrant",
    "model_parallel_size",
    "sequence_parallel",
    "sequence_parallel_size",
    "context_parallel_size",
    "moe_num_experts",
    "moe_expert_interval",
    "moe_expert_parallel_size",
    "moe_top_k",
    "moe_train_capacity_factor",
    "moe_min_capacity",
    "moe_token_dropping",
    "fp32_allreduce",
    "gradient_clipping",
    "precision",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def architecture(module: Any) -> dict[str, Any]:
    """What decides the messages within a model, of one that says it as GPT-NeoX's models do (`neox_args`).

    Raises LookupError for another.
    """
    told = getattr(module, "neox_args", None)
    if told is None:
        raise LookupError
    found = {name: getattr(told, name) for name in _NEOX if hasattr(told, name)}
    return {name: value for name, value in found.items() if isinstance(value, bool | int | float | str)}


def modules(module: Any, leaf: Callable[[Any], bool]) -> list[dict[str, Any]]:
    """Modules that run by themselves, parents first: name, and the numbers of their own parameters.

    Containers that only hold others have no forward, and are left out. What is within a `leaf` counts as the leaf's
    own.
    """
    numbers = _numbers(module)
    found: list[dict[str, Any]] = []
    leaves: list[str] = []
    for name, one in module.named_modules():
        whole = leaf(one)
        if getattr(type(one).forward, "__name__", "") == "_forward_unimplemented":
            continue
        if any(name.startswith(f"{above}." if above else "") for above in leaves):
            continue
        own = [numbers[id(parameter)] for parameter in one.parameters(recurse=whole)]
        found.append({"name": name, "parameters": own})
        if whole:
            leaves.append(name)
    return found


def _numbers(module: Any) -> dict[int, int]:
    return {id(parameter): number for number, (_, parameter) in enumerate(module.named_parameters())}


def known(readers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What the readers give. A setting that this version of the library does not have, or not yet, is left out."""
    values = {}
    for name, read in readers.items():
        try:
            values[name] = read()
        except Exception:
            continue
    return values


def common(values: set[Any]) -> Any:
    """What all have. Raises ValueError, by which `known` leaves the fact out, where they differ."""
    (value,) = values
    return value


def dtype_name(dtype: Any) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _tensor(name: str, tensor: Any) -> dict[str, Any]:
    shape = getattr(tensor, "ds_shape", tensor.shape)  # ZeRO-3 leaves an empty tensor in place of a partitioned one
    return {"name": name, "shape": [int(size) for size in shape], "dtype": dtype_name(tensor.dtype)}
