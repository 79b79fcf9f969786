"""Facts about a model for the job row of any engine: parameters, buffers, modules, architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final


def model_row(module: Any, arguments: Any = None) -> dict[str, Any]:
    """Return the part of a job row that describes the model; `arguments` as in `architecture`. Never raises."""
    return read_available(
        {
            "parameters": lambda: parameters(module),
            "buffers": lambda: buffers(module),
            "model": lambda: architecture(module, arguments),
        }
    )


def parameters(module: Any) -> list[dict[str, Any]]:
    """Return name, full shape and dtype of the parameters: shared ones once, only local experts."""
    return [
        {
            **_tensor(name, parameter),
            "trainable": bool(parameter.requires_grad),
            **({} if getattr(parameter, "allreduce", True) else {"expert": True}),  # as DeepSpeed marks experts
        }
        for name, parameter in module.named_parameters()
    ]


def buffers(module: Any) -> list[dict[str, Any]]:
    """Return name, shape and dtype of each buffer."""
    return [_tensor(name, buffer) for name, buffer in module.named_buffers()]


def grouped(module: Any, groups: Iterable[Iterable[Any]]) -> list[list[int]]:
    """Return parameter groups as indices into `parameters`. Raises KeyError for another model's."""
    numbers = _numbers(module)
    return [[numbers[id(parameter)] for parameter in group] for group in groups]


_NEOX: Final = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "padded_vocab_size", "no_weight_tying",
    "gpt_j_residual", "gpt_j_tied", "hidden_dropout", "attention_dropout",
    "checkpoint_activations", "checkpoint_num_layers", "checkpoint_reentrant",
    "model_parallel_size", "sequence_parallel", "sequence_parallel_size", "context_parallel_size",
    "moe_num_experts", "moe_expert_interval", "moe_expert_parallel_size", "moe_top_k", "moe_train_capacity_factor",
    "moe_min_capacity", "moe_token_dropping",
    "fp32_allreduce", "gradient_clipping", "precision", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    # settings of GPT-NeoX's own program
    "norm", "pos_emb", "max_position_embeddings", "activation", "num_kv_heads", "intermediate_size", "expansion_factor",
    "mlp_multiple_of", "use_bias_in_attn_linear", "use_bias_in_mlp",
    "is_pipe_parallel", "partition_activations", "fp16_lm_cross_entropy",
    "train_impl", "train_iters", "train_epochs", "eval_interval", "eval_iters", "do_valid", "do_test",
    "save", "checkpoint_factor", "checkpoint_scale", "exit_interval",
)  # fmt: skip

_PROGRAM: Final = "NeoXArgs"
"""Class of the settings of GPT-NeoX's own program, which makes calls of its own."""


def architecture(module: Any, arguments: Any = None) -> dict[str, Any]:
    """Return the settings that determine the messages of a GPT-NeoX model.

    They come from the attribute `neox_args` of the model or one of its modules, else from
    `arguments`, the `args` of `deepspeed.initialize`, if these are GPT-NeoX's own. Raises
    LookupError for other models.
    """
    candidates = (getattr(submodule, "neox_args", None) for submodule in module.modules())
    is_neox = type(arguments).__name__ == _PROGRAM
    neox_args = next((args for args in candidates if args is not None), arguments if is_neox else None)
    if neox_args is None:
        raise LookupError
    settings = {name: getattr(neox_args, name) for name in _NEOX if hasattr(neox_args, name)}
    scalars = {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str)}
    return {**scalars, **({"program": _PROGRAM} if type(neox_args).__name__ == _PROGRAM else {})}


def modules(module: Any, leaf: Callable[[Any], bool]) -> list[dict[str, Any]]:
    """Return the modules that have a forward, parents first: name, and indices of their own parameters.

    The parameters of modules within a `leaf` count as the leaf's own.
    """
    numbers = _numbers(module)
    rows: list[dict[str, Any]] = []
    leaves: list[str] = []
    for name, submodule in module.named_modules():
        is_leaf = leaf(submodule)
        if getattr(type(submodule).forward, "__name__", "") == "_forward_unimplemented":
            continue
        if any(name.startswith(f"{ancestor}." if ancestor else "") for ancestor in leaves):
            continue
        own = [numbers[id(parameter)] for parameter in submodule.parameters(recurse=is_leaf)]
        rows.append({"name": name, "parameters": own})
        if is_leaf:
            leaves.append(name)
    return rows


def _numbers(module: Any) -> dict[int, int]:
    return {id(parameter): number for number, (_, parameter) in enumerate(module.named_parameters())}


def read_available(readers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return what the readers return, without settings that are missing or not yet set."""
    values = {}
    for name, read in readers.items():
        try:
            values[name] = read()
        except Exception:
            continue
    return values


def common(values: set[Any]) -> Any:
    """Return the only value of a set. Raises ValueError for several values, so that `read_available` leaves it out."""
    (value,) = values
    return value


def dtype_name(dtype: Any) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _tensor(name: str, tensor: Any) -> dict[str, Any]:
    shape = getattr(tensor, "ds_shape", tensor.shape)  # ZeRO-3 leaves an empty tensor instead of a partitioned one
    return {"name": name, "shape": [int(size) for size in shape], "dtype": dtype_name(tensor.dtype)}
