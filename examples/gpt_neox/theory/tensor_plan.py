"""The plan of `parallelize_module` in `dtensor_parallel`, as the hooks capture it, and a rank's shards under it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from commtrace.job_row import StyleRow, TensorRow
from commtrace.theory.model_shapes import ModuleSpec, model_lists
from commtrace.theory.rules.registry import WORKLOAD, rule

_ROW_PARALLEL: Final = ("attention.dense", "mlp.dense_4h_to_h", "embedding")
_COLUMN_PARALLEL: Final = ("query_key_value", "dense_h_to_4h", "head")
_NORMS: Final = ("norm", "layernorm")
_PREPARED: Final = ("attention", "mlp")


@rule("examples.gpt_neox.dtensor_parallel.plan", WORKLOAD)
def tensor_plan(model: ModuleSpec, *, sequence_parallel: bool) -> list[StyleRow]:
    """Return one row per parallelized module, in model order."""
    shapes = {parameter.name: parameter.shape for parameter in model_lists(model, "float32").parameters}
    rows = (_row(name, shapes, "Shard(1)" if sequence_parallel else "Replicate") for name in _modules(model, ""))
    return [row for row in rows if row is not None]


def _modules(module: ModuleSpec, prefix: str) -> Iterator[str]:
    for child in module.children:
        yield prefix + child.name
        yield from _modules(child, f"{prefix}{child.name}.")


def _row(name: str, shapes: Mapping[str, list[int]], activation_layout: str) -> StyleRow | None:
    sequence_parallel = activation_layout != "Replicate"
    weight, bias = shapes.get(f"{name}.weight"), shapes.get(f"{name}.bias")
    head = name.endswith("head")
    if head and weight is None:
        weight = shapes["layers.embedding.weight"]
    if name.endswith(_COLUMN_PARALLEL):
        inputs, desired, outputs = (
            activation_layout if head else "Replicate",
            "Replicate",
            "Replicate" if head else "Shard(-1)",
        )
        kind, local = "ColwiseParallel", True
    elif name.endswith(_ROW_PARALLEL):
        inputs = desired = "Replicate" if name.endswith("embedding") else "Shard(-1)"
        kind, outputs, local = "RowwiseParallel", activation_layout, True
    elif sequence_parallel and name.endswith(_NORMS):
        kind, inputs, desired, outputs, local = "SequenceParallel", "", "", "", False
    elif sequence_parallel and name.endswith(_PREPARED):
        kind, inputs, desired, outputs, local = "PrepareModuleInput", activation_layout, "Replicate", "", False
    else:
        return None
    return StyleRow(
        module=name,
        style=kind,
        inputs=_as_list(inputs),
        desired=_as_list(desired),
        outputs=_as_list(outputs),
        local=local,
        embedding=name.endswith("embedding"),
        weight=weight,
        bias=bias,
        sent=True,
    )


def _as_list(layout: str) -> list[str]:
    return [layout] if layout else []


def local_shape(parameter: TensorRow, plan: Sequence[StyleRow], ranks: int) -> list[int]:
    """Return the shape of a rank's shard of a parameter."""
    name, _, kind = parameter.name.rpartition(".")
    shape = [*parameter.shape]
    style = next((row for row in plan if row.module == name), None)
    if style is None or style.style == "SequenceParallel":
        return shape
    rowwise = style.style == "RowwiseParallel" and not style.embedding
    if rowwise and kind == "bias":
        return shape
    shape[1 if rowwise else 0] //= ranks
    return shape
