"""The job row of a model under `fully_shard`, told from a configuration: each layer is a unit, and the whole model."""

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
"""Which part of a parameter's name is the layer's: `layers.block_0`, `model.layers.0`."""


@dataclass(frozen=True)
class FsdpSharding:
    """What `fully_shard` is given; the defaults are PyTorch's."""

    shards: int
    """Ranks among which parameters are divided."""
    reshard_after_forward: bool | int | None = None
    reduce_dtype: str | None = None
    """fp32: gradients travel in it; None: as they are."""
    sync_every_micro_batch: bool = False
    reshard_after_backward: bool = True
    along_sequence: bool = False
    """Tensor-parallel ranks divide the sequence between their layers."""


def fsdp_row(model: ModuleSpec, precision: str, layout: RankLayout, sharding: FsdpSharding) -> dict[str, Any]:
    """A model with fp32 parameters, which travel in the type of the precision."""
    if precision == "fp16":
        raise NotPredictedError("fp16 under fully_shard has no rules yet")
    found = model_lists(model, "float32")
    units = _units(found)
    tensor = tensor_plan_row(model, layout, along_sequence=sharding.along_sequence)
    rows = tensor.get("tensor_plan", [])
    last = layout.accumulation == 1
    return {
        "source": "fsdp",
        "engine": "fully_shard",
        "data_parallel_size": layout.data,
        "reduce_grads": last or sharding.sync_every_micro_batch,
        "all_reduce_grads": last or sharding.sync_every_micro_batch,
        "reshard_after_backward": last or sharding.reshard_after_backward,
        "units": [_unit(found, name, numbers, precision, layout, sharding, rows) for name, numbers in units.items()],
        "parameters": found.parameters,
        "buffers": found.buffers,
        **tensor,
    }


def _units(found: ModelLists) -> dict[str, list[int]]:
    """Numbers of the parameters of each unit; the root, whose name is empty, first."""
    units: dict[str, list[int]] = {"": []}
    for number, parameter in enumerate(found.parameters):
        layer = _LAYER.match(parameter["name"])
        units.setdefault(layer.group() if layer else "", []).append(number)
    return units


def _unit(
    found: ModelLists,
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
        "shapes": [local_shape(found, number, rows, layout.tensor) for number in numbers],
        "dims": [0] * len(numbers),
        "dtypes": [ELEMENT_TYPES[precision]] * len(numbers),
        "reduce_dtype": reduce_dtype(precision, sharding.reduce_dtype),
        "shards": sharding.shards,
        "copies": layout.data // sharding.shards,
        "reshard_after_forward": reshard_after_forward(name, sharding.reshard_after_forward),
        "unshard_in_backward": True,
    }


# --- rules ----------------------------------------------------------------------------------------------------------


@rule("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init (reshard_after_forward)", TORCH)
def reshard_after_forward(unit: str, wanted: bool | int | None) -> bool | int:
    """Unless it is said, every unit but the root is taken apart after forward."""
    return unit != "" if wanted is None else wanted


@rule("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.init_dtype_attrs", TORCH)
def reduce_dtype(precision: str, wanted: str | None) -> str | None:
    """None where gradients have that type anyway, because parameters are cast to it."""
    return None if wanted is None or wanted == precision != "fp32" else ELEMENT_TYPES[wanted]
