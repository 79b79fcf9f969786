"""The job that a DeepSpeed engine was given: everything that decides what it will communicate.

Read from the engine once, when it is built; a theory can then say what is to be expected without seeing a single call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def describe(engine: Any) -> dict[str, Any]:
    """One row of the `job` table. A setting that this DeepSpeed does not have is left out."""
    return {
        "source": "deepspeed",
        "engine": type(engine).__name__,
        **_known(
            {
                "zero_stage": lambda: int(engine.zero_optimization_stage()),
                "zero": lambda: _plain(engine._config.zero_config),
                "world_size": lambda: engine.world_size,
                "data_parallel_size": lambda: engine.dp_world_size,
                "sequence_parallel_size": lambda: engine.sequence_parallel_size,
                "tensor_parallel_size": lambda: engine.mp_world_size,
                "pipeline_stages": lambda: getattr(engine, "num_stages", 1),
                "micro_batch_size": lambda: engine.train_micro_batch_size_per_gpu(),
                "gradient_accumulation_steps": lambda: engine.gradient_accumulation_steps(),
                "train_batch_size": lambda: engine.train_batch_size(),
                "precision": lambda: _precision(engine),
                "communication_data_type": lambda: _name(engine.communication_data_type),
                "gradient_clipping": lambda: engine.gradient_clipping(),
                "prescale_gradients": lambda: engine.prescale_gradients(),
                "gradient_predivide_factor": lambda: engine.gradient_predivide_factor(),
                "sparse_gradients": lambda: engine.sparse_gradients_enabled(),
                "optimizer": lambda: type(engine.optimizer).__name__,
                "basic_optimizer": lambda: type(engine.basic_optimizer).__name__,
                "moe": lambda: engine.has_moe_layers,
            }
        ),
        "parameters": parameters(engine.module),
        "buffers": [_tensor(name, buffer) for name, buffer in engine.module.named_buffers()],
    }


def parameters(module: Any) -> list[dict[str, Any]]:
    """Name, shape, element type of each parameter of the whole model; shared ones once, partitioned ones whole."""
    return [
        {**_tensor(name, parameter), "trainable": bool(parameter.requires_grad)}
        for name, parameter in module.named_parameters()
    ]


def _tensor(name: str, tensor: Any) -> dict[str, Any]:
    shape = getattr(tensor, "ds_shape", tensor.shape)  # ZeRO-3 leaves an empty tensor in place of a partitioned one
    return {"name": name, "shape": [int(size) for size in shape], "dtype": _name(tensor.dtype)}


def _precision(engine: Any) -> str:
    if engine.fp16_enabled():
        return "fp16"
    return "bf16" if engine.bfloat16_enabled() else "fp32"


def _known(readers: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    values = {}
    for name, read in readers.items():
        try:
            values[name] = read()
        except (AttributeError, AssertionError, KeyError, TypeError):
            continue
    return values


def _plain(config: Any) -> dict[str, Any]:
    """A pydantic model as what JSON can hold."""
    return {name: value for name, value in config.model_dump(mode="json").items() if value is not None}


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
