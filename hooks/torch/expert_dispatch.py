"""Hook for token dispatchers of mixtures of experts: torchtitan's and Megatron-Core's.

A dispatcher sends the tokens to the ranks of their experts (`dispatch`) and the experts' results back (`combine`), with
an all_to_all function of its module. The gradients take the same ways in the backward pass, within an autograd node of
that function, whose hooks mark them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch

from commtrace.hooks import purposes
from commtrace.hooks.recorder_setup import guard
from commtrace.patching import Patches, Wrapper, around
from commtrace.schema import Purpose

from .redistribution import calling_module


class _Dispatchers(NamedTuple):
    """The dispatchers of a library.

    Attributes:
        classes: Their names; those that a version does not have are left out.
        dispatch: Methods that send tokens to experts.
        combine: Methods that send results back.
        exchanges: Functions in the module's globals that exchange tokens.
    """

    classes: tuple[str, ...]
    dispatch: tuple[str, ...]
    combine: tuple[str, ...]
    exchanges: tuple[str, ...]


MODULES: Final = {
    "torchtitan.models.common.token_dispatcher": _Dispatchers(
        ("AllToAllTokenDispatcher",), ("dispatch",), ("combine",), ("all_to_all_single", "all_to_all_single_autograd")
    ),
    "torchtitan.distributed.expert_parallel": _Dispatchers(  # until version 0.2
        ("ExpertParallel",),
        ("_token_dispatch",),
        ("_token_combine",),
        ("all_to_all_single", "all_to_all_single_autograd"),
    ),
    "megatron.core.transformer.moe.token_dispatcher": _Dispatchers(
        ("MoEAlltoAllTokenDispatcher",),
        ("token_permutation", "dispatch_preprocess", "token_dispatch"),
        ("token_unpermutation", "token_combine", "combine_postprocess"),
        ("all_to_all",),
    ),
}
"""Module -> its dispatchers."""

_MOST_NODES: Final = 8
"""Autograd nodes of one exchange: the function, and views and waits around it."""

_patches: Final[dict[str, Patches]] = {name: Patches() for name in MODULES}


class _Direction(threading.local):
    """Whether this thread dispatches tokens or combines results."""

    direction: Purpose | None = None


_thread: Final = _Direction()


def install() -> None:
    """Hook the dispatchers of the modules that are imported."""
    for name, described in MODULES.items():
        module, patches = sys.modules.get(name), _patches[name]
        if module is None or patches:
            continue
        for cls in [vars(module)[cls] for cls in described.classes if cls in vars(module)]:
            for methods, purpose in (
                (described.dispatch, Purpose.EXPERT_DISPATCH),
                (described.combine, Purpose.EXPERT_COMBINE),
            ):
                for method in methods:
                    patches.wrap(cls, method, _in_direction(purpose))
        for function in described.exchanges:
            patches.wrap(module, function, _exchange)


def uninstall() -> None:
    """Restore everything."""
    for patches in _patches.values():
        patches.undo()


def _in_direction(purpose: Purpose) -> Wrapper:
    @around
    def method(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        before, _thread.direction = _thread.direction, purpose
        try:
            return original(*args, **kwargs)
        finally:
            _thread.direction = before

    return method


@around
def _exchange(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    tokens = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    direction = _thread.direction
    if direction is None or tokens is None or torch.compiler.is_compiling():
        return original(*args, **kwargs)
    facts: dict[str, str | int] = {}
    with guard():
        facts = _facts(tokens)
    if not tokens.is_floating_point():
        direction = Purpose.EXPERT_COUNTS
    purpose = Purpose.ACTIVATIONS_RECOMPUTED if purposes.recomputing() else direction
    with purposes.Marked(purposes.number(purpose, **facts)):
        result = original(*args, **kwargs)
    with guard():
        gradient = purposes.number(Purpose.EXPERT_GRADIENTS, **facts, of=direction.value)
        for node in _nodes(result, tokens):
            _mark_node(node, gradient)
    return result


def _facts(tokens: torch.Tensor) -> dict[str, str | int]:
    """Return the module, and the bytes of a token if tokens are rows."""
    module = calling_module()
    facts: dict[str, str | int] = {"module": module} if module else {}
    if tokens.is_floating_point() and tokens.dim() > 1:
        facts["token_bytes"] = tokens.element_size() * tokens[:1].numel() if len(tokens) else 0
    return facts


def _nodes(result: Any, source: torch.Tensor) -> Iterator[Any]:
    """Yield the autograd nodes that lead from a result back to the tensor that it was made of."""
    end = source.grad_fn
    nodes: list[Any] = [value.grad_fn for value in _tensors(result)]
    for _ in range(_MOST_NODES):
        nodes = [node for node in nodes if node is not None and node is not end and node.name() != _LEAF]
        if not nodes:
            return
        node = nodes.pop()
        yield node
        nodes += [successor for successor, _ in node.next_functions]


_LEAF: Final = "torch::autograd::AccumulateGrad"


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    return [item for item in (value if isinstance(value, tuple | list) else (value,)) if isinstance(item, torch.Tensor)]


def _mark_node(node: Any, purpose: int) -> None:
    """Mark the calls of an autograd node. The hooks return nothing, and so change no gradient."""
    before = [0]

    def begin(_: Any) -> None:
        before[0] = purposes.current()
        purposes.mark(purpose)

    def end(_: Any, __: Any) -> None:
        purposes.mark(before[0])

    node.register_prehook(begin)
    node.register_hook(end)
