"""Hook for token dispatchers of mixtures of experts: torchtitan's and Megatron-Core's.

A dispatcher sends the tokens to the ranks of their experts (`dispatch`) and the experts' results back (`combine`), with
an all_to_all function of its module. The gradients take the same ways in the backward pass, within an autograd node of
that function, whose hooks mark them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from commtrace.hooks import purposes
from commtrace.hooks.recorder_setup import guard
from commtrace.patching import Patches, Wrapper, around
from commtrace.schema import Purpose

from .expert_routing import expert_routing, marks, row_bytes, rows
from .redistribution import calling_module


def _chosen_experts(dispatcher: Any, /, *args: Any, **kwargs: Any) -> int | None:
    """Return the number of a rank's tokens, each once for each of its experts; None if it is not known.

    It is the size of the matrix of the experts' numbers, shape (tokens, experts of a token). With sequence parallelism,
    `sp_size` ranks have the same tokens, and each dispatches an equal share, after padding.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
            tokens, experts = value.shape
            return -(-tokens // int(getattr(dispatcher, "sp_size", 1))) * experts
    return None


def _not_known(*_: Any, **__: Any) -> None:
    """Return that the number of tokens is not known before they are sent."""


class _Dispatchers(NamedTuple):
    """The dispatchers of a library.

    Attributes:
        classes: Their names; those that a version does not have are left out.
        dispatch: Methods that send tokens to experts.
        combine: Methods that send results back.
        exchanges: Functions in the module's globals that exchange tokens; "spmd.all_to_all": of a module there.
        chosen: Returns, from the arguments of a method that dispatches, how many tokens it is to send; None: not known.
    """

    classes: tuple[str, ...]
    dispatch: tuple[str, ...]
    combine: tuple[str, ...]
    exchanges: tuple[str, ...]
    chosen: Callable[..., int | None] = _not_known


MODULES: Final = {
    "torchtitan.models.common.token_dispatcher": _Dispatchers(
        ("AllToAllTokenDispatcher",),
        ("dispatch",),
        ("combine",),
        ("all_to_all_single", "all_to_all_single_autograd", "spmd.all_to_all"),
        _chosen_experts,
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
    """Whether this thread dispatches tokens or combines results, and how many tokens it is to dispatch."""

    direction: Purpose | None = None
    chosen: int | None = None


_thread: Final = _Direction()


def install() -> None:
    """Hook the dispatchers of the modules that are imported."""
    for name, described in MODULES.items():
        module, patches = sys.modules.get(name), _patches[name]
        if module is None or patches:
            continue
        for cls in [vars(module)[cls] for cls in described.classes if cls in vars(module)]:
            for methods, purpose, chosen in (
                (described.dispatch, Purpose.EXPERT_DISPATCH, described.chosen),
                (described.combine, Purpose.EXPERT_COMBINE, _not_known),
            ):
                for method in methods:
                    patches.wrap(cls, method, _in_direction(purpose, chosen))
        for exchange in described.exchanges:
            owner, _, function = exchange.rpartition(".")
            within = vars(module).get(owner) if owner else module
            if within is not None:
                patches.wrap(within, function, _exchange)
        patches.include(expert_routing)


def uninstall() -> None:
    """Restore everything."""
    for patches in _patches.values():
        patches.undo()


def _in_direction(purpose: Purpose, chosen: Callable[..., int | None]) -> Wrapper:
    @around
    def method(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        before = _thread.direction, _thread.chosen
        _thread.direction, _thread.chosen = purpose, None
        with guard():
            _thread.chosen = chosen(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            _thread.direction, _thread.chosen = before

    return method


@around
def _exchange(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    tokens = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    direction = _thread.direction
    if direction is None or tokens is None or torch.compiler.is_compiling():
        return original(*args, **kwargs)
    is_counts = not tokens.is_floating_point()
    kind = Purpose.EXPERT_COUNTS if is_counts else direction
    purpose, gradient, facts = purposes.current(), 0, _Facts("", 0)
    with guard():
        facts = _Facts(calling_module(), row_bytes(tokens) if tokens.dim() > 1 and not is_counts else 0)
        purpose, gradient = marks(kind, facts.known())
    with purposes.Marked(purpose):
        result = original(*args, **kwargs)
    with guard():
        for node in _nodes(result, tokens):
            _mark_node(node, gradient)
        if not any(_is_alone(value) for value in (*args, *kwargs.values())):
            _note(kind, facts, tokens, [*_tensors(result)])
    return result


def _is_alone(group: Any) -> bool:
    """Return whether an argument is a group of one rank, or its mesh: Megatron-Core then makes no call."""
    return isinstance(group, torch.distributed.ProcessGroup | DeviceMesh) and group.size() == 1


def _note(kind: Purpose, facts: _Facts, tokens: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
    """Note what an exchange sent, and its results, for the tables."""
    has_gradient = any(result.requires_grad for result in results)
    if kind is Purpose.EXPERT_COUNTS:
        expert_routing.note_counts(facts.module, "all_to_all", tokens.nbytes)
    elif kind is Purpose.EXPERT_COMBINE:
        expert_routing.note_combine(facts.module, has_gradient=has_gradient)
    elif tokens.dim() == 1:
        expert_routing.note_weights(facts.module, tokens.element_size(), has_gradient=has_gradient)
    else:
        sent = rows(tokens) if _thread.chosen is None else _thread.chosen
        received = sum(map(rows, results))
        expert_routing.note_dispatch(facts.module, facts.token_bytes, sent, received, has_gradient=has_gradient)


class _Facts(NamedTuple):
    """The module that exchanges tokens, and the bytes of a token; "" and 0 where not known."""

    module: str
    token_bytes: int

    def known(self) -> dict[str, str | int]:
        """Return those that are known."""
        return {name: value for name, value in self._asdict().items() if value}


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
        before[0] = purposes.mark(purpose)

    def end(_: Any, __: Any) -> None:
        purposes.mark(before[0])

    node.register_prehook(begin)
    node.register_hook(end)
