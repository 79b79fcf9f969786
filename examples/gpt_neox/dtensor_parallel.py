"""Tensor parallelism with PyTorch's `parallelize_module`: parameters and activations are DTensors.

The model is sharded as in `tensor_parallel`: embedding and head by the vocabulary, attention by heads, the MLP by its
inner layer. With sequence parallelism, norms and residuals are sharded along the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .layers import Block
from .model import GPTNeoX


def parallelize(model: GPTNeoX, mesh: DeviceMesh, *, along_sequence: bool) -> None:
    """Shard the model over the ranks of the mesh, from the first rank's parameters."""
    tied = model.layers["head"].weight is model.layers["embedding"].weight
    parallelize_module(model, mesh, plan(model, along_sequence=along_sequence))
    if tied:
        model.layers["head"].weight = model.layers["embedding"].weight
    for layer in model.layers.values():
        if isinstance(layer, Block):
            layer.attention.heads //= mesh.size()


def plan(model: GPTNeoX, *, along_sequence: bool) -> dict[str, ParallelStyle]:
    """Return the parallel style of each sharded module, by name."""
    between = Shard(1) if along_sequence else Replicate()
    styles: dict[str, ParallelStyle] = {
        "layers.embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    }
    for name, layer in model.layers.items():
        if isinstance(layer, Block):
            styles |= {f"layers.{name}.{part}": style for part, style in _block(along_sequence=along_sequence).items()}
    if along_sequence:
        styles["layers.final_norm"] = SequenceParallel()
    styles["layers.head"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    return styles


def _block(*, along_sequence: bool) -> dict[str, ParallelStyle]:
    between = Shard(1) if along_sequence else Replicate()
    styles: dict[str, ParallelStyle] = {}
    if along_sequence:
        styles["input_layernorm"] = SequenceParallel()
        styles["attention"] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
        styles["post_attention_layernorm"] = SequenceParallel()
        styles["mlp"] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    return {
        **styles,
        "attention.query_key_value": ColwiseParallel(),
        "attention.dense": RowwiseParallel(output_layouts=between),
        "mlp.dense_h_to_4h": ColwiseParallel(),
        "mlp.dense_4h_to_h": RowwiseParallel(output_layouts=between),
    }


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> None:
    """Clip gradients as torch's `clip_grad_norm_` does, which does not accept parameters of several meshes."""
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    norms = []
    for members in groups.values():
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in members if parameter.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    for members in groups.values():
        torch.nn.utils.clip_grads_with_norm_(members, max_norm, total)
