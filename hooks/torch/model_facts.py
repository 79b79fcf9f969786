"""Facts about a model for the job row of any engine: parameters, buffers, modules, architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from commtrace.job_facts import MISSING, fields_of
from commtrace.job_row import ModelSettings, ModuleRow, TensorRow

Value = TypeVar("Value")


def available(read: Callable[[], Value]) -> Value:
    """Return what a function reads; MISSING, which a row leaves out, if a setting is missing or not yet set."""
    try:
        return read()
    except Exception:
        return MISSING  # type: ignore[no-any-return]


def parameters(module: Any) -> list[TensorRow]:
    """Return the parameters: shared ones once, only local experts."""
    rows = []
    for name, parameter in module.named_parameters():
        row = _tensor(name, parameter)
        row.trainable = bool(parameter.requires_grad)
        if not getattr(parameter, "allreduce", True):  # as DeepSpeed marks experts
            row.expert = True
        rows.append(row)
    return rows


def buffers(module: Any) -> list[TensorRow]:
    """Return the buffers."""
    return [_tensor(name, buffer) for name, buffer in module.named_buffers()]


def grouped(module: Any, groups: Iterable[Iterable[Any]]) -> list[list[int]]:
    """Return parameter groups as indices into `parameters`. Raises KeyError for another model's."""
    numbers = parameter_numbers(module)
    return [[numbers[id(parameter)] for parameter in group] for group in groups]


_PROGRAM: Final = "NeoXArgs"
"""Class of the settings of GPT-NeoX's own program, which makes calls of its own."""


def architecture(module: Any, arguments: Any = None) -> ModelSettings:
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
    settings = {name: getattr(neox_args, name, None) for name in fields_of(ModelSettings)}
    scalars = {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str)}
    architecture = ModelSettings.read(scalars)
    if type(neox_args).__name__ == _PROGRAM:
        architecture.program = _PROGRAM
    return architecture


def modules(module: Any, leaf: Callable[[Any], bool]) -> list[ModuleRow]:
    """Return the modules that have a forward, parents first.

    The parameters of modules within a `leaf` count as the leaf's own.
    """
    numbers = parameter_numbers(module)
    rows: list[ModuleRow] = []
    leaves: list[str] = []
    for name, submodule in module.named_modules():
        is_leaf = leaf(submodule)
        if getattr(type(submodule).forward, "__name__", "") == "_forward_unimplemented":
            continue
        if any(name.startswith(f"{ancestor}." if ancestor else "") for ancestor in leaves):
            continue
        own = [numbers[id(parameter)] for parameter in submodule.parameters(recurse=is_leaf)]
        rows.append(ModuleRow(name=name, parameters=own))
        if is_leaf:
            leaves.append(name)
    return rows


def parameter_numbers(module: Any) -> dict[int, int]:
    """Return the number of each parameter in `parameters`, by its id."""
    return {id(parameter): number for number, (_, parameter) in enumerate(module.named_parameters())}


def common(values: set[Any]) -> Any:
    """Return the only value of a set. Raises ValueError for several values, so that `available` leaves it out."""
    (value,) = values
    return value


def dtype_name(dtype: Any) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _tensor(name: str, tensor: Any) -> TensorRow:
    shape = getattr(tensor, "ds_shape", tensor.shape)  # ZeRO-3 leaves an empty tensor instead of a partitioned one
    return TensorRow(name=name, shape=[int(size) for size in shape], dtype=dtype_name(tensor.dtype))
