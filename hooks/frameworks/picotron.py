"""picotron: roles of its groups, and purposes of its calls, all of which are lines of the program itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from commtrace.hooks.marked_sources import Hooks, MarkedSources, Source
from commtrace.hooks.torch import marked_batches
from commtrace.hooks.torch.autograd_functions import MarkedFunctions
from commtrace.hooks.torch.group_registry import Registry
from commtrace.patching import Wrapper, around
from commtrace.schema import Phase, Purpose

_PHASES: Final = {
    "recv_forward": (Phase.FORWARD,),
    "send_forward": (Phase.FORWARD,),
    "recv_backward": (Phase.BACKWARD,),
    "send_backward": (Phase.BACKWARD,),
    "send_fwd_recv_bwd": (Phase.FORWARD, Phase.BACKWARD),
    "send_bwd_recv_fwd": (Phase.BACKWARD, Phase.FORWARD),
}
"""What stages exchange -> the phases of the messages, in order."""


def _exchanging(_: Purpose) -> Wrapper:
    """Return a wrapper that marks messages between stages with what they are for: activations, or gradients."""

    @around
    def exchange(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        operation = kwargs.get("operation", args[0] if args else None)
        phases = _PHASES.get(operation) if isinstance(operation, str) else None
        if phases is None:
            return original(*args, **kwargs)
        return marked_batches.send(phases, original, *args, **kwargs)

    return exchange


_registry: Final = Registry(
    "picotron.process_group_manager",
    "setup_process_group_manager",
    {
        "tp_group": "tensor",
        "cp_group": "context",
        "pp_group": "pipeline",
        "dp_group": "data",
        "cp_dp_group": "data",  # gradients are reduced among it
    },
    holder="process_group_manager",
)
_SOURCES: Final = MarkedSources(
    Source("picotron.data_parallel.bucket", "Bucket", {"sync_gradient": Purpose.GRADIENTS}),
    Source("picotron.data_parallel.data_parallel", "DataParallelNaive", {"_allreduce_grads": Purpose.GRADIENTS}),
    Source(
        "picotron.pipeline_parallel.pp_communications",
        "",
        dict.fromkeys(("pipeline_communicate", "bidirectional_pipeline_communicate"), Purpose.PIPELINE_ACTIVATIONS),
        _exchanging,
    ),
    Source("picotron.utils", "", {"average_loss_across_dp_cp_ranks": Purpose.METRICS}),
)
_FUNCTIONS: Final = (
    MarkedFunctions("picotron.tensor_parallel.tp_communications", Purpose.ACTIVATIONS, Purpose.ACTIVATION_GRADIENTS),
    MarkedFunctions("picotron.context_parallel.context_parallel", Purpose.ATTENTION, Purpose.ATTENTION_GRADIENTS),
)
_hooks: Final = Hooks(_registry, _SOURCES, *_FUNCTIONS, marked_batches)
install, uninstall = _hooks.install, _hooks.uninstall
