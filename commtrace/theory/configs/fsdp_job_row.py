"""Row of the `job` table for a model under `fully_shard`, from a configuration: each layer is a unit, and the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from commtrace.theory.job import NotPredictedError
from commtrace.theory.model_shapes import ModelLists, ModuleSpec, model_lists
from commtrace.theory.rules.registry import TORCH, rule

from .dtensor_job_row import local_shape, tensor_plan_row
from .rank_layout import ELEMENT_TYPES, RankLayout

_LAYER: Final = re.compile(r"(?:.*\.)?(?:block_)?\d+(?=\.)")
"""Matches the layer in a parameter's name: `layers.block_0`, `model.layers.0`."""


@dataclass(frozen=True)
class FsdpSharding:
    """Arguments of `fully_shard`, with PyTorch's defaults."""

    shards: int  # ranks that parameters are sharded over
    reshard_after_forward: bool | int | None = None  # as in `fully_shard`
    reduce_dtype: str | None = None  # "fp32", in which gradients travel; None: in their own type
    sync_every_micro_batch: bool = False  # whether gradients are reduced in each micro-batch
    reshard_after_backward: bool = True  # whether parameters are resharded between micro-batches
    sequence_parallel: bool = False  # whether tensor-parallel ranks divide the sequence between their layers


def fsdp_row(model: ModuleSpec, precision: str, layout: RankLayout, sharding: FsdpSharding) -> dict[str, Any]:
    """Return the row of a model with fp32 parameters, which travel in the type of the precision."""
    if precision == "fp16":
        raise NotPredictedError("fp16 under fully_shard has no rules yet")
    lists = model_lists(model, "float32")
    units: dict[str, list[int]] = {"": []}  # numbers of each unit's parameters; the root first
    for number, parameter in enumerate(lists.parameters):
        layer = _LAYER.match(parameter["name"])
        units.setdefault(layer.group() if layer else "", []).append(number)
    tensor = tensor_plan_row(model, layout, sequence_parallel=sharding.sequence_parallel)
    rows = tensor.get("tensor_plan", [])
    last = layout.accumulation == 1
    return {
        "source": "fsdp",
        "engine": "fully_shard",
        "data_parallel_size": layout.data,
        "reduce_grads": last or sharding.sync_every_micro_batch,
        "all_reduce_grads": last or sharding.sync_every_micro_batch,
        "reshard_after_backward": last or sharding.reshard_after_backward,
        "units": [_unit(lists, name, numbers, precision, layout, sharding, rows) for name, numbers in units.items()],
        "parameters": lists.parameters,
        "buffers": lists.buffers,
        **tensor,
    }


def _unit(
    lists: ModelLists,
    name: str,
    numbers: list[int],
    precision: str,
    layout: RankLayout,
    sharding: FsdpSharding,
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    return {
        "name": name,
        "parameters": numbers,
        "shapes": [local_shape(lists, number, rows, layout.tensor) for number in numbers],
        "dims": [0] * len(numbers),
        "dtypes": [ELEMENT_TYPES[precision]] * len(numbers),
        "reduce_dtype": reduce_dtype(precision, sharding.reduce_dtype),
        "shards": sharding.shards,
        "copies": layout.data // sharding.shards,
        "reshard_after_forward": reshard_after_forward(name, sharding.reshard_after_forward),
        "unshard_in_backward": True,
    }


@rule("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init (reshard_after_forward)", TORCH)
def reshard_after_forward(unit: str, setting: bool | int | None) -> bool | int:
    """By default every unit except the root is resharded after forward."""
    return unit != "" if setting is None else setting


@rule("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.init_dtype_attrs", TORCH)
def reduce_dtype(precision: str, setting: str | None) -> str | None:
    """The reduce type is None where gradients have it anyway, because parameters are cast to it."""
    return None if setting is None or setting == precision != "fp32" else ELEMENT_TYPES[setting]
