"""Purposes of DeepSpeed's calls: the methods and functions that communicate, with the reason.

Those that another version of DeepSpeed does not have are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from commtrace.hooks import purposes
from commtrace.hooks.marked_sources import MarkedSources, Source, imported
from commtrace.hooks.recorder_setup import guard
from commtrace.hooks.torch.autograd_functions import MarkedFunctions
from commtrace.hooks.torch.recomputation import mark_reentrant
from commtrace.patching import Patches, around
from commtrace.schema import Purpose

_RUNTIME: Final = "deepspeed.runtime"
_REDUCING: Final = dict.fromkeys(
    ("reduce_ipg_grads", "reduce_gradients", "average_tensor", "allreduce_gradients", "buffered_allreduce_fallback"),
    Purpose.GRADIENTS,
)
_NORMS: Final = dict.fromkeys(
    ("scaled_global_norm", "get_grad_norm_direct", "get_global_norm_of_tensors", "get_norm_with_moe_layers"),
    Purpose.GRADIENT_NORM,
)
_STEP: Final = {
    **_REDUCING,
    **_NORMS,
    "has_overflow": Purpose.GRADIENT_OVERFLOW,
    "all_gather_dp_groups": Purpose.PARAMETERS_AFTER_OPTIMIZER,
}

_SOURCES: Final = MarkedSources(
    Source(
        f"{_RUNTIME}.engine",
        "DeepSpeedEngine",
        {
            **_REDUCING,
            "_broadcast_model": Purpose.PARAMETERS_AT_START,
            "save_checkpoint": Purpose.CHECKPOINT_SAVED,
            "load_checkpoint": Purpose.CHECKPOINT_LOADED,
        },
    ),
    Source(f"{_RUNTIME}.engine", "", {"clip_grad_norm_": Purpose.GRADIENT_NORM}),
    Source(f"{_RUNTIME}.utils", "CheckOverflow", {"has_overflow": Purpose.GRADIENT_OVERFLOW}),  # without ZeRO
    Source(
        f"{_RUNTIME}.pipe.engine",
        "PipelineEngine",
        {
            **dict.fromkeys(("_aggregate_total_loss", "_bcast_pipe_scalar", "_reduce_outputs"), Purpose.LOSS),
            **dict.fromkeys(("_send_tensor_meta", "_recv_tensor_meta"), Purpose.PIPELINE_SET_UP),
        },
    ),
    Source(f"{_RUNTIME}.pipe.module", "PipelineModule", {"_synchronize_tied_weights": Purpose.PARAMETERS_AT_START}),
    Source(
        f"{_RUNTIME}.activation_checkpointing.checkpointing",
        "",
        {"gather_partitioned_activations": Purpose.ACTIVATIONS_RECOMPUTED},
    ),
    *(
        Source(f"{_RUNTIME}.{module}", name, _STEP)
        for module, cls in (
            ("zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
            ("zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
            ("bf16_optimizer", "BF16_Optimizer"),
        )
        for name in ("", cls)
    ),
    Source(
        f"{_RUNTIME}.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        {
            "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads": Purpose.GRADIENTS,
            "_get_norm_groups": Purpose.GRADIENT_NORM,
            "_post_step": Purpose.PARAMETERS_AFTER_OPTIMIZER,
            "create_reduce_and_remove_grad_hooks": Purpose.PARAMETERS_AT_START,  # gathers each parameter
            "_fp32_state_allgather": Purpose.PARAMETERS_ON_REQUEST,  # safe_get_full_grad and others
        },
    ),
    Source(
        "deepspeed.utils.mixed_precision_linkage",
        "",
        dict.fromkeys(("get_full_hp_param", "get_full_hp_grad"), Purpose.PARAMETERS_ON_REQUEST),
    ),
    Source(
        f"{_RUNTIME}.zero.partition_parameters",
        "GatheredParameters",
        dict.fromkeys(("__enter__", "__exit__"), Purpose.PARAMETERS_ON_REQUEST),
    ),
    Source(
        f"{_RUNTIME}.zero.partition_parameters",
        "Init",
        dict.fromkeys(("_post_init_method", "_zero_init_param"), Purpose.PARAMETERS_AT_START),
    ),
    Source(
        f"{_RUNTIME}.zero.partitioned_param_coordinator",
        "",
        {"assert_ints_same_as_other_ranks": Purpose.MODEL_CHECKED},
    ),
)

_LAYERS: Final = MarkedFunctions("deepspeed.module_inject.layers", Purpose.ACTIVATIONS, Purpose.ACTIVATION_GRADIENTS)

_patches = Patches()


@_patches.installer
def install() -> None:
    """Mark the calls of DeepSpeed's methods and functions."""
    _patches.include(_SOURCES, _LAYERS)
    engine = imported(f"{_RUNTIME}.engine", "DeepSpeedEngine")
    if engine is not None:
        _patches.wrap(engine, "_configure_tensor_parallel_states", _compare_inputs)
    coordinator = imported(f"{_RUNTIME}.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator")
    if coordinator is not None:
        name = "_PartitionedParameterCoordinator__all_gather_params"
        _patches.wrap(coordinator, name, purposes.marking_by(2, read=_purpose_of_gathering))
    partitioning = imported(f"{_RUNTIME}.zero.partition_parameters", "Init")
    if partitioning is not None:
        _patches.wrap(partitioning, "_all_gather", purposes.marking_each(_purpose_of_access))
    checkpoint = imported(f"{_RUNTIME}.activation_checkpointing.checkpointing", "CheckpointFunction")
    mark_reentrant(_patches, checkpoint)


uninstall = _patches.undo


@around
def _compare_inputs(original: Callable[..., None], self: Any, /, *args: Any, **kwargs: Any) -> None:
    """Mark the hook with which the first forward pass compares the inputs of tensor-parallel ranks."""
    original(self, *args, **kwargs)
    with guard():
        hooks = self.module._forward_pre_hooks
        for number, hook in hooks.items():
            if getattr(hook, "__module__", "") == f"{_RUNTIME}.engine":
                hooks[number] = purposes.marking(Purpose.DATA)(hook)


def _purpose_of_gathering(_: Any, params: Any, forward: bool) -> int:
    if not forward:
        return purposes.number(Purpose.PARAMETERS_BACKWARD)
    repeated = torch._C._current_graph_task_id() >= 0
    return purposes.number(Purpose.PARAMETERS_RECOMPUTATION if repeated else Purpose.PARAMETERS_FORWARD)


def _purpose_of_access(*_: Any, **__: Any) -> int:
    """Return the purpose of gathering a parameter that is used outside of its module, where nothing else gathers it."""
    if not purposes.unclaimed():
        return 0
    if torch._C._current_graph_task_id() < 0:
        return purposes.number(Purpose.PARAMETERS_FORWARD)
    recomputed = torch.is_grad_enabled()
    return purposes.number(Purpose.PARAMETERS_RECOMPUTATION if recomputed else Purpose.PARAMETERS_BACKWARD)
