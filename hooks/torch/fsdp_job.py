"""The job that `fully_shard` was given: units, in the order in which the model has them, and how each is divided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .dtensor_job import cut
from .dtensor_job import roles as tensor_roles
from .model_facts import architecture, buffers, common, dtype_name, grouped, known, parameters


def describe(root: Any) -> dict[str, Any]:
    """One row of the `job` table. What this torch does not have is left out. Never raises."""
    groups = known({"groups": lambda: [*_groups(root)]}).get("groups", [])
    return {
        "source": "fsdp",
        **known(
            {
                "engine": lambda: _engine(root),
                "data_parallel_size": lambda: common({_copies(group) * _shards(group) for group in groups}),
                # Of the first micro-batch, and so of all but the last of a step.
                "reduce_grads": lambda: common({group.reduce_grads for group in groups}),
                "all_reduce_grads": lambda: common({group.all_reduce_grads for group in groups}),
                "reshard_after_backward": lambda: common({group.reshard_after_backward for group in groups}),
                "units": lambda: _units(root, groups),
            }
        ),
        **known(
            {
                "parameters": lambda: parameters(root),
                "buffers": lambda: buffers(root),
                "model": lambda: architecture(root),
            }
        ),
        **cut(root),
    }


def _engine(root: Any) -> str:
    """`replicate` is made of the same parts, and keeps every parameter whole."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state

    return "fully_shard" if type(_get_module_fsdp_state(root)) is FSDPState else "replicate"


def roles(root: Any) -> Iterator[tuple[Any, str, str]]:
    """Those of all meshes, of resharding within a node included."""
    for group in _groups(root):
        for mesh in (group.mesh_info, group.post_forward_mesh_info):
            for name in ("replicate_process_group", "shard_process_group", "reduce_scatter_process_group"):
                yield getattr(mesh, name, None), "data", "torch.distributed.fsdp.fully_shard"
    yield from tensor_roles(root)


def _groups(root: Any) -> Iterator[Any]:
    """Groups of parameters that travel together, of all units, the root's first."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    known_states = set()
    for module in root.modules():
        state = _get_module_fsdp_state(module)
        if state is not None and state not in known_states:
            known_states.add(state)
            several = getattr(state, "_fsdp_param_groups", None)
            # Older versions of torch have one group, or none, for each state.
            yield from (one for one in ([state._fsdp_param_group] if several is None else several) if one is not None)


def _units(root: Any, groups: Sequence[Any]) -> list[dict[str, Any]]:
    numbers = grouped(root, ([one.sharded_param for one in group.fsdp_params] for group in groups))
    return [_unit(group, of_group) for group, of_group in zip(groups, numbers, strict=True)]


def _unit(group: Any, numbers: list[int]) -> dict[str, Any]:
    found = group.fsdp_params
    return {
        "name": group._module_fqn,
        "parameters": numbers,
        # As FSDP has them: of a tensor-parallel parameter this rank's part.
        "shapes": [[int(size) for size in one._orig_size] for one in found],
        "dims": [int(one.fsdp_placement.dim) for one in found],
        "dtypes": [dtype_name(one.param_dtype or one.orig_dtype) for one in found],
        "reduce_dtype": None if group._reduce_dtype is None else dtype_name(group._reduce_dtype),
        "shards": _shards(group),
        "copies": _copies(group),
        "reshard_after_forward": _reshard(group),
        "unshard_in_backward": bool(group.unshard_in_backward),
    }


def _reshard(group: Any) -> bool | int:
    """The ranks among which the parameters are divided after forward, where they are fewer than before."""
    if group._use_post_forward_mesh:
        return int(group.post_forward_mesh_info.shard_mesh_size)
    return bool(group._reshard_after_forward)


def _shards(group: Any) -> int:
    return int(getattr(group.mesh_info, "shard_mesh_size", 1))


def _copies(group: Any) -> int:
    return int(getattr(group.mesh_info, "replicate_mesh_size", 1))
