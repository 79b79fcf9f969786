"""Purposes of Megatron-Core's calls. Those that another version does not have are left out.

`commtrace.hooks.torch.expert_dispatch` marks the tokens of experts, `core_schedules` the messages between stages, and
`core_optimizer` the calls of optimizers.
"""

from __future__ import annotations

from typing import Final

from commtrace.hooks.marked_sources import Hooks, MarkedSources, Source
from commtrace.hooks.torch.autograd_functions import MarkedFunctions
from commtrace.schema import Purpose

_CORE: Final = "megatron.core"
_DISPATCHERS: Final = ("MoEAlltoAllTokenDispatcher", "MoEAllGatherTokenDispatcher", "MoEFlexTokenDispatcher")

_SOURCES: Final = MarkedSources(
    Source(
        f"{_CORE}.distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup",
        {
            **dict.fromkeys(("start_grad_sync", "finish_grad_sync"), Purpose.GRADIENTS),
            **dict.fromkeys(("start_param_sync", "finish_param_sync"), Purpose.PARAMETERS_AFTER_OPTIMIZER),
        },
    ),
    Source(
        f"{_CORE}.distributed.distributed_data_parallel",
        "DistributedDataParallel",
        {"broadcast_params": Purpose.PARAMETERS_AT_START},
    ),
    Source(
        f"{_CORE}.distributed.finalize_model_grads",
        "",
        dict.fromkeys(
            (
                *("_allreduce_word_embedding_grads", "_allreduce_position_embedding_grads"),
                *("_allreduce_embedding_grads", "_allreduce_conditional_embedding_grads"),
                *("_allreduce_layernorm_grads", "_allreduce_non_tensor_model_parallel_grads"),
            ),
            Purpose.GRADIENTS,
        ),
    ),
    *(
        Source(f"{_CORE}.transformer.moe.token_dispatcher", dispatcher, {"preprocess": Purpose.EXPERT_COUNTS})
        for dispatcher in _DISPATCHERS
    ),
)
_FUNCTIONS: Final = (
    *(
        MarkedFunctions(
            f"{_CORE}.tensor_parallel.{module}",
            Purpose.ACTIVATIONS,
            Purpose.ACTIVATION_GRADIENTS,
            without=("_AllToAll",),  # tokens of experts
        )
        for module in ("mappings", "layers")
    ),
    MarkedFunctions(f"{_CORE}.tensor_parallel.cross_entropy", Purpose.LOSS, Purpose.LOSS),
)
_hooks: Final = Hooks(_SOURCES, *_FUNCTIONS)
install, uninstall = _hooks.install, _hooks.uninstall
