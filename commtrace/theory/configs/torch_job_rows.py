"""Rows of the `job` table for a model under DistributedDataParallel or `fully_shard`, from a configuration."""

from __future__ import annotations

import re
from typing import Final

from commtrace.job_row import JobRow, UnitRow
from commtrace.theory.job import refuse
from commtrace.theory.model_shapes import ModuleSpec, model_lists
from commtrace.theory.rules.registry import TORCH, rule

from .rank_layout import ELEMENT_TYPES, RankLayout
from .versions_in_use import version_in_use

_LAYER: Final = re.compile(r"(?:.*\.)?(?:block_)?\d+(?=\.)")
"""Matches the layer in a parameter's name: `layers.block_0`, `model.layers.0`."""
_MIRRORED: Final = (2, 13)
"""Version of torch in `TORCH`."""
_REDUCES_IN_PARAMETER_TYPE: Final = (2, 15)
"""First version of torch in which `fully_shard` without a reduce type reduces in the type of the sharded parameter."""


@rule("torch.nn.parallel.DistributedDataParallel.__init__ (its defaults)", TORCH)
def ddp_row(model: ModuleSpec, precision: str, layout: RankLayout) -> JobRow:
    """Return the row of a model in one element type, under DDP with default settings.

    Its buckets have 25 MiB, the first one 1 MiB, and its broadcasts have 250 MiB.
    """
    lists = model_lists(model, ELEMENT_TYPES[precision])
    return JobRow(
        source="ddp",
        engine="DistributedDataParallel",
        broadcast_buffers=True,
        broadcast_bucket_size=250 << 20,
        bucket_bytes_cap=25 << 20,
        first_bucket_bytes_cap=1 << 20,
        bucket_bytes_caps=[],
        find_unused_parameters=False,
        static_graph=False,
        data_parallel_size=layout.reducing,
        ignored=[],
        mixed_precision=None,
        parameters=lists.parameters,
        buffers=lists.buffers,
    )


def fsdp_row(model: ModuleSpec, precision: str, layout: RankLayout, reduce_precision: str | None = None) -> JobRow:
    """Return the row of a model under `fully_shard`. Each layer is a unit, and so is the model itself.

    Parameters are fp32, are sent in the type of the precision, and are sharded over all data-parallel ranks with
    PyTorch's defaults. Gradients are reduced once a step, in `reduce_precision` ("fp32") or in their own type.
    """
    refuse((precision == "fp16", "fp16 under fully_shard has no rules yet"))
    lists = model_lists(model, "float32")
    units: dict[str, list[int]] = {"": []}  # numbers of each unit's parameters; the root first
    for number, parameter in enumerate(lists.parameters):
        layer = _LAYER.match(parameter.name)
        units.setdefault(layer.group() if layer else "", []).append(number)
    reduces = layout.gradient_accumulation_steps == 1  # in the first micro-batch, in which the job is captured
    return JobRow(
        source="fsdp",
        engine="fully_shard",
        data_parallel_size=layout.data_parallel_size,
        reduce_grads=reduces,
        all_reduce_grads=reduces,
        reshard_after_backward=True,
        units=[
            UnitRow(
                name=name,
                parameters=numbers,
                shapes=[lists.parameters[number].shape for number in numbers],
                dims=[0] * len(numbers),
                dtypes=[ELEMENT_TYPES[precision]] * len(numbers),
                reduce_dtype=reduce_dtype(precision, reduce_precision),
                shards=layout.data_parallel_size,
                copies=1,
                reshard_after_forward=reshard_after_forward(name),
                unshard_in_backward=True,
            )
            for name, numbers in units.items()
        ],
        parameters=lists.parameters,
        buffers=lists.buffers,
    )


@rule("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init (reshard_after_forward)", TORCH)
def reshard_after_forward(unit: str) -> bool:
    """Return whether a unit is resharded after forward: by default, every unit except the root."""
    return unit != ""


@rule("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.init_dtype_attrs", TORCH)
def reduce_dtype(precision: str, setting: str | None) -> str | None:
    """Return the reduce type; None where gradients have it already, because parameters are cast to it."""
    if setting is None and precision != "fp32" and version_in_use("torch", _MIRRORED) >= _REDUCES_IN_PARAMETER_TYPE:
        return ELEMENT_TYPES["fp32"]
    return None if setting is None or setting == precision != "fp32" else ELEMENT_TYPES[setting]
