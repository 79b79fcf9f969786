"""The plan of `parallelize_module` as commtrace's GPT-NeoX workload makes it, told from a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from commtrace.theory.job import NotPredictedError
from commtrace.theory.model_shapes import ModelLists, ModuleSpec, model_lists
from commtrace.theory.rules.registry import WORKLOAD, rule

from .rank_layout import ELEMENT_TYPES, RankLayout

_ROWS: Final = ("attention.dense", "mlp.dense_4h_to_h", "embedding")
_COLUMNS: Final = ("query_key_value", "dense_h_to_4h", "head")
_NORMS: Final = ("norm", "layernorm")
_PREPARED: Final = ("attention", "mlp")


def dtensor_row(model: ModuleSpec, precision: str, layout: RankLayout, *, along_sequence: bool) -> dict[str, Any]:
    """A model that is tensor-parallel alone, in one element type, trained by Adam parameter by parameter."""
    if layout.data > 1 or precision == "fp16":
        raise NotPredictedError("tensor parallelism without FSDP goes with one model and fp32 or bf16")
    found = model_lists(model, ELEMENT_TYPES[precision])
    return {
        "source": "dtensor",
        "engine": "parallelize_module",
        "data_parallel_size": 1,
        **tensor_plan_row(model, layout, along_sequence=along_sequence),
        "optimizer": "AdamW",
        "foreach": False,
        "parameters": found.parameters,
        "buffers": found.buffers,
    }


def tensor_plan_row(model: ModuleSpec, layout: RankLayout, *, along_sequence: bool) -> dict[str, Any]:
    """What the job row has of the plan; nothing where no ranks share a model."""
    if layout.tensor < 2:
        return {}
    return {"tensor_parallel_size": layout.tensor, "tensor_plan": tensor_plan(model, along_sequence=along_sequence)}


@rule("examples.gpt_neox.dtensor_parallel.plan", WORKLOAD)
def tensor_plan(model: ModuleSpec, *, along_sequence: bool) -> list[dict[str, Any]]:
    """A row for each module that has a style, in the order of the model's modules."""
    shapes = {one["name"]: one["shape"] for one in model_lists(model, "float32").parameters}
    rows = (_row(name, shapes, "Shard(1)" if along_sequence else "Replicate") for name in _modules(model, ""))
    return [row for row in rows if row is not None]


def _modules(part: ModuleSpec, prefix: str) -> Iterator[str]:
    for one in part.parts:
        yield prefix + one.name
        yield from _modules(one, f"{prefix}{one.name}.")


def _row(name: str, shapes: Mapping[str, Any], between: str) -> dict[str, Any] | None:
    along_sequence = between != "Replicate"
    weight, bias = shapes.get(f"{name}.weight"), shapes.get(f"{name}.bias")
    head = name.endswith("head")
    if head and weight is None:
        weight = shapes["layers.embedding.weight"]
    if name.endswith(_COLUMNS):
        inputs, desired, outputs = between if head else "Replicate", "Replicate", "Replicate" if head else "Shard(-1)"
        kind, local = "ColwiseParallel", True
    elif name.endswith(_ROWS):
        inputs = desired = "Replicate" if name.endswith("embedding") else "Shard(-1)"
        kind, outputs, local = "RowwiseParallel", between, True
    elif along_sequence and name.endswith(_NORMS):
        kind, inputs, desired, outputs, local = "SequenceParallel", "", "", "", False
    elif along_sequence and name.endswith(_PREPARED):
        kind, inputs, desired, outputs, local = "PrepareModuleInput", between, "Replicate", "", False
    else:
        return None
    return {
        "module": name,
        "style": kind,
        "inputs": _listed(inputs),
        "desired": _listed(desired),
        "outputs": _listed(outputs),
        "local": local,
        "embedding": name.endswith("embedding"),
        "weight": weight,
        "bias": bias,
        "sent": True,
    }


def _listed(layout: str) -> list[str]:
    return [layout] if layout else []


def local_shape(found: ModelLists, number: int, rows: Sequence[Mapping[str, Any]], ranks: int) -> list[int]:
    """Shape of what a rank has of a parameter."""
    name, _, kind = str(found.parameters[number]["name"]).rpartition(".")
    shape = [*found.parameters[number]["shape"]]
    style = next((row for row in rows if row["module"] == name), None)
    if style is None or style["style"] == "SequenceParallel":
        return shape
    rowwise = style["style"] == "RowwiseParallel" and not style["embedding"]
    if rowwise and kind == "bias":
        return shape
    at = 1 if rowwise else 0
    shape[at] //= ranks
    return shape
