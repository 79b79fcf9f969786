"""Order in which ZeRO-3's hooks of modules run: forward, backward, and when activations are recomputed.

Assumptions that the captured job cannot confirm: modules run once each, in the order in which they were made, nested as
they are registered; the model's input needs no gradient. Modules whose activations are recomputed
(`CheckpointedSegment`) run once more within the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from commtrace.theory.job import ModuleNode
from commtrace.theory.rules.registry import DEEPSPEED, rule

from . import zero3_coordinator as coordinator
from .zero3_coordinator import CheckpointedSegment, Coordinator, CoordinatorCalls

_OFFLOAD: Final = "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload."

HookCall: TypeAlias = tuple[Callable[[Coordinator, ModuleNode], None], ModuleNode]
"""A function of the coordinator (such as `fetch` and `release`), and the module that it is called for."""


@rule(_OFFLOAD + "setup_zero_stage3_hooks (before 0.15.4 DeepSpeedZeroOptimizer_Stage3.backward)", DEEPSPEED)
def micro_batch(state: Coordinator) -> None:
    """Run the hooks of all modules for a micro-batch: they fetch and release parameters in forward and backward."""
    if not state.resets_after_backward:
        coordinator.reset_step(state)
    backward_calls = backward(state.root, has_model_input=True, segments=state.segments)
    for call, module in (*forward(state.root), *backward_calls):
        call(state, module)
    if state.resets_after_backward:
        coordinator.reset_step(state)


def forward_pass(state: Coordinator) -> None:
    """Run a forward pass without backward, as in an evaluation."""
    coordinator.reset_step(state)
    for call, module in forward(state.root):
        call(state, module)


def forward(module: ModuleNode) -> Iterator[HookCall]:
    """Yield the hook calls of a module's forward pass, including those of the modules within it."""
    yield coordinator.fetch, module
    for child in module.children:
        yield from forward(child)
    yield coordinator.access, module
    yield coordinator.release, module


def backward(
    module: ModuleNode, *, has_model_input: bool = False, segments: Sequence[CheckpointedSegment] = ()
) -> Iterator[HookCall]:
    """Yield the hook calls of a module's backward pass, including those of the modules within it and of recomputation.

    It starts at the gradient of each output, and ends at the gradient of the input. The model's own input has no
    gradient: modules that get it come last in the backward pass, and are released after it.
    """
    if not module.outputs:
        return
    yield from ((coordinator.fetch, module) for _ in range(module.outputs))
    segment_ending = {segment.end: segment for segment in segments}
    position = len(module.children)
    while position:
        if position in segment_ending:
            segment = segment_ending[position]
            yield from recomputed_backward(module.children[segment.first : segment.end], segment)
            position = segment.first
        else:
            position -= 1
            child = module.children[position]
            reads_input = position == 0 or child.reads_input
            yield from backward(child, has_model_input=has_model_input and reads_input)
    yield coordinator.release_leftovers if has_model_input else coordinator.release, module


@rule(_OFFLOAD + "pre_sub_module_forward_function (within torch.utils.checkpoint)", DEEPSPEED)
def recomputed_backward(modules: Sequence[ModuleNode], segment: CheckpointedSegment) -> list[HookCall]:
    """Return the hook calls of recomputed modules: a second forward pass, before their backward pass or within it.

    With reentrant autograd, it comes before. Without, it comes when backward first needs what was not kept: at the last
    module that has parameters, whose backward has begun. It stops at that module, because it has then computed all that
    backward needs, or after it if a dropout there keeps a mask.
    """
    if segment.reentrant:
        recomputed = [call for module in modules for call in forward(module)]
        return [*recomputed, *(call for module in reversed(modules) for call in backward(module))]
    *others, last = modules
    started = [last] if segment.masked else path_to_last_parameters(last)
    last_forward, last_backward = [*forward(last)], [*backward(last)]
    stop = -1 if segment.masked else last_forward.index((coordinator.fetch, started[-1])) + 1
    return [
        *((coordinator.fetch, module) for module in started),
        *(call for module in others for call in forward(module)),
        *last_forward[:stop],
        *last_backward[last_backward.index((coordinator.fetch, started[-1])) + 1 :],
        *(call for module in reversed(others) for call in backward(module)),
    ]


def path_to_last_parameters(module: ModuleNode) -> list[ModuleNode]:
    """Return the path from a module to the last one within it, or itself, that has parameters of its own."""
    for child in reversed(module.children):
        path = path_to_last_parameters(child)
        if path:
            return [module, *path]
    return [module] if module.parameters else []


def run_step(state: Coordinator, micro_batches: int) -> list[CoordinatorCalls]:
    """Run a step. Return the calls of each micro-batch, and last those of the optimizer."""
    recorded = []
    for _ in range(micro_batches):
        micro_batch(state)
        recorded.append(state.take_recorded())
    coordinator.release_all(state)
    coordinator.gather_persistent(state)
    coordinator.invalidate_secondary(state)
    return [*recorded, state.take_recorded()]
