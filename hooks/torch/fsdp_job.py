"""The job row of FSDP2: its units in the model's order, and how each is sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .dtensor_job import roles as tensor_roles
from .dtensor_job import tensor_parallel_row
from .model_facts import common, dtype_name, grouped, model_row, read_available


def describe(root: Any) -> dict[str, Any]:
    """Return a row of the `job` table, without settings that this torch lacks. Never raises."""
    groups = read_available({"groups": lambda: [*_groups(root)]}).get("groups", [])
    return {
        "source": "fsdp",
        **read_available(
            {
                "engine": lambda: _engine(root),
                "data_parallel_size": lambda: common({_copies(group) * _shards(group) for group in groups}),
                # In the first micro-batch, and therefore in all but the last one of a step.
                "reduce_grads": lambda: common({group.reduce_grads for group in groups}),
                "all_reduce_grads": lambda: common({group.all_reduce_grads for group in groups}),
                "reshard_after_backward": lambda: common({group.reshard_after_backward for group in groups}),
                "units": lambda: _units(root, groups),
            }
        ),
        **model_row(root),
        **tensor_parallel_row(root),
    }


def _engine(root: Any) -> str:
    """Return "fully_shard", or "replicate", which uses the same code and does not shard."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state

    return "fully_shard" if type(_get_module_fsdp_state(root)) is FSDPState else "replicate"


def roles(root: Any) -> Iterator[tuple[Any, str, str]]:
    """Yield the roles of all meshes' groups, including those for resharding within a node."""
    for group in _groups(root):
        for mesh in (group.mesh_info, group.post_forward_mesh_info):
            for name in ("replicate_process_group", "shard_process_group", "reduce_scatter_process_group"):
                yield getattr(mesh, name, None), "data", "torch.distributed.fsdp.fully_shard"
    yield from tensor_roles(root)


def _groups(root: Any) -> Iterator[Any]:
    """Yield the parameter groups of all units, the root's first: each is communicated together."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    known_states = set()
    for module in root.modules():
        state = _get_module_fsdp_state(module)
        if state is not None and state not in known_states:
            known_states.add(state)
            yield from groups_of(state)


def groups_of(state: Any) -> Iterator[Any]:
    """Yield the parameter groups of one FSDPState."""
    groups = getattr(state, "_fsdp_param_groups", None)
    # Older versions of torch have one group, or none, for each state.
    groups = [state._fsdp_param_group] if groups is None else groups
    yield from (group for group in groups if group is not None)


def _units(root: Any, groups: Sequence[Any]) -> list[dict[str, Any]]:
    numbers = grouped(root, ([parameter.sharded_param for parameter in group.fsdp_params] for group in groups))
    return [_unit(group, group_numbers) for group, group_numbers in zip(groups, numbers, strict=True)]


def _unit(group: Any, numbers: list[int]) -> dict[str, Any]:
    parameters = group.fsdp_params
    return {
        "name": group._module_fqn,
        "parameters": numbers,
        # Before sharding; for a tensor-parallel parameter, of this rank's shard.
        "shapes": [[int(size) for size in parameter._orig_size] for parameter in parameters],
        "dims": [int(parameter.fsdp_placement.dim) for parameter in parameters],
        "dtypes": [dtype_name(parameter.param_dtype or parameter.orig_dtype) for parameter in parameters],
        "reduce_dtype": None if group._reduce_dtype is None else dtype_name(group._reduce_dtype),
        "shards": _shards(group),
        "copies": _copies(group),
        "reshard_after_forward": _reshard(group),
        "unshard_in_backward": bool(group.unshard_in_backward),
    }


def _reshard(group: Any) -> bool | int:
    """Return whether parameters are resharded after forward; if to fewer ranks, to how many."""
    if group._use_post_forward_mesh:
        return int(group.post_forward_mesh_info.shard_mesh_size)
    return bool(group._reshard_after_forward)


def _shards(group: Any) -> int:
    return int(getattr(group.mesh_info, "shard_mesh_size", 1))


def _copies(group: Any) -> int:
    return int(getattr(group.mesh_info, "replicate_mesh_size", 1))
