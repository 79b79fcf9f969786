"""Purposes of calls that GPT-NeoX makes itself. Those that another version does not have are left out."""

from __future__ import annotations

from typing import Final

from commtrace.hooks.marked_sources import Hooks, MarkedSources, Source
from commtrace.hooks.torch.autograd_functions import MarkedFunctions
from commtrace.schema import Purpose

_SOURCES: Final = MarkedSources(
    Source(
        "megatron.training",
        "",
        {
            "reduce_losses": Purpose.METRICS,  # their mean over ranks is only logged
            "build_train_valid_test_data_loaders": Purpose.DATA,
            "save_checkpoint": Purpose.CHECKPOINT_SAVED,
            "load_checkpoint": Purpose.CHECKPOINT_LOADED,
        },
    ),
    Source("megatron.mpu", "", {"broadcast_data": Purpose.DATA}),
    Source(
        "megatron.model.utils",
        "",
        {"reduce_weight_grads_from_model_parallel_region": Purpose.GRADIENTS},  # norms with sequence parallelism
    ),
    Source("megatron.gradient_noise_scale.gradient_noise_scale", "GradientNoiseScale", {"update": Purpose.METRICS}),
)
_FUNCTIONS: Final = (
    MarkedFunctions("megatron.mpu.mappings", Purpose.ACTIVATIONS, Purpose.ACTIVATION_GRADIENTS),
    MarkedFunctions("megatron.mpu.cross_entropy", Purpose.LOSS, Purpose.LOSS),
)
_hooks: Final = Hooks(_SOURCES, *_FUNCTIONS)
install, uninstall = _hooks.install, _hooks.uninstall
