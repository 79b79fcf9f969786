"""The job row of FSDP2: its units in the model's order, and how each is sharded."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from commtrace.job_row import JobRow, UnitRow

from .dtensor_job import roles as tensor_roles
from .dtensor_job import tensor_parallel_size, tensor_plan
from .model_facts import architecture, available, buffers, common, dtype_name, grouped, parameters


def describe(root: Any) -> JobRow:
    """Return a row of the `job` table, without settings that this torch lacks. Never raises."""
    groups = available(lambda: [*groups_below(root)])
    return JobRow(
        source="fsdp",
        engine=available(lambda: _engine(root)),
        data_parallel_size=available(lambda: common({_copies(group) * _shards(group) for group in groups})),
        # In the first micro-batch, and therefore in all but the last one of a step.
        reduce_grads=available(lambda: common({group.reduce_grads for group in groups})),
        all_reduce_grads=available(lambda: common({group.all_reduce_grads for group in groups})),
        reshard_after_backward=available(lambda: common({group.reshard_after_backward for group in groups})),
        units=available(lambda: _units(root, groups)),
        parameters=available(lambda: parameters(root)),
        buffers=available(lambda: buffers(root)),
        model=available(lambda: architecture(root)),
        tensor_parallel_size=available(lambda: tensor_parallel_size(root)),
        tensor_plan=available(lambda: tensor_plan(root)),
    )


def _engine(root: Any) -> str:
    """Return "fully_shard", or "replicate", which uses the same code and does not shard."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state

    return "fully_shard" if type(_get_module_fsdp_state(root)) is FSDPState else "replicate"


def roles(root: Any) -> Iterator[tuple[Any, str, str]]:
    """Yield the roles of all meshes' groups, including those for resharding within a node."""
    for group in groups_below(root):
        for mesh in (group.mesh_info, group.post_forward_mesh_info):
            for name in ("replicate_process_group", "shard_process_group", "reduce_scatter_process_group"):
                yield getattr(mesh, name, None), "data", "torch.distributed.fsdp.fully_shard"
    yield from tensor_roles(root)


def groups_below(root: Any) -> Iterator[Any]:
    """Yield the parameter groups of all units, the root's first: each is communicated together."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    known_states = set()
    for module in root.modules():
        state = _get_module_fsdp_state(module)
        if state is not None and state not in known_states:
            known_states.add(state)
            yield from groups_of(state)


def groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of one FSDPState."""
    groups = getattr(state, "_fsdp_param_groups", None)
    # Older versions of torch have one group, or none, for each state.
    groups = [state._fsdp_param_group] if groups is None else groups
    return [group for group in groups if group is not None]


def _units(root: Any, groups: Sequence[Any]) -> list[UnitRow]:
    numbers = grouped(root, ([_registered(parameter) for parameter in group.fsdp_params] for group in groups))
    return [_unit(group, group_numbers) for group, group_numbers in zip(groups, numbers, strict=True)]


def _registered(parameter: Any) -> Any:
    """Return the parameter of the module: the sharded one, unless the program has called `unshard` already."""
    info = parameter._module_info
    return getattr(info.module, info.param_name)


def _unit(group: Any, numbers: list[int]) -> UnitRow:
    members = group.fsdp_params
    return UnitRow(
        name=group._module_fqn,
        parameters=numbers,
        shapes=[[int(size) for size in parameter._orig_size] for parameter in members],
        dims=[int(parameter.fsdp_placement.dim) for parameter in members],
        dtypes=[dtype_name(parameter.param_dtype or parameter.orig_dtype) for parameter in members],
        reduce_dtype=_reduce_dtype(group),
        shards=_shards(group),
        copies=_copies(group),
        reshard_after_forward=_reshard(group),
        unshard_in_backward=bool(group.unshard_in_backward),
    )


def _reduce_dtype(group: Any) -> str | None:
    """Return the dtype in which gradients are reduced; None: that of the all_gather.

    Since torch 2.15, gradients have the dtype of the sharded parameter if the policy names none, and those of one group
    are reduced in the dtype to which theirs are promoted.
    """
    if group._reduce_dtype is not None:
        return dtype_name(group._reduce_dtype)
    trained = [member for member in group.fsdp_params if _registered(member).requires_grad]
    dtypes: set[Any] = {getattr(member, "unsharded_grad_dtype", None) for member in trained} - {None}
    if not dtypes or dtypes == {member.param_dtype or member.orig_dtype for member in trained}:
        return None
    return dtype_name(functools.reduce(torch.promote_types, dtypes))


def _reshard(group: Any) -> bool | int:
    """Return whether parameters are resharded after forward; if to fewer ranks, to how many."""
    if group._use_post_forward_mesh:
        return int(group.post_forward_mesh_info.shard_mesh_size)
    return bool(group._reshard_after_forward)


def _shards(group: Any) -> int:
    return int(getattr(group.mesh_info, "shard_mesh_size", 1))


def _copies(group: Any) -> int:
    return int(getattr(group.mesh_info, "replicate_mesh_size", 1))
