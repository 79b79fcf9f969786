"""Purposes of the calls of DeepSpeed's sequence parallelism (Ulysses), and of losses over a sharded vocabulary.

The modules are imported by programs that use them. What another version of DeepSpeed does not have is left out.
"""

from __future__ import annotations

from typing import Final

from commtrace.hooks.marked_sources import Hooks, MarkedSources, Source
from commtrace.hooks.torch.autograd_functions import MarkedFunctions
from commtrace.schema import Purpose

_SEQUENCE: Final = "deepspeed.sequence"
_ULYSSES: Final = "deepspeed.runtime.sequence_parallel.ulysses_sp"

_SOURCES: Final = MarkedSources(
    Source(
        f"{_SEQUENCE}.cross_entropy",
        "",
        dict.fromkeys(("vocab_parallel_cross_entropy", "_global_sp_sum", "_resolve_vocab_metadata"), Purpose.LOSS),
    ),
    Source(f"{_SEQUENCE}.linear_cross_entropy", "", {"vocab_parallel_linear_cross_entropy": Purpose.LOSS}),
    Source(_ULYSSES, "UlyssesSPAttentionHF", {"forward": Purpose.ACTIVATIONS}),
    Source(_ULYSSES, "UlyssesSPDataLoaderAdapter", {"refill": Purpose.DATA}),
)
_FUNCTIONS: Final = (
    MarkedFunctions(f"{_SEQUENCE}.layer", Purpose.ACTIVATIONS, Purpose.ACTIVATION_GRADIENTS),
    *(
        MarkedFunctions(f"{_SEQUENCE}.{module}", Purpose.LOSS, Purpose.LOSS)
        for module in ("cross_entropy", "linear_cross_entropy", "vocab_parallel_ops")
    ),
)
_hooks: Final = Hooks(_SOURCES, *_FUNCTIONS)
install, uninstall = _hooks.install, _hooks.uninstall
