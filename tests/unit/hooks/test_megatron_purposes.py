"""Purposes of Megatron-Core's functions, in modules with their names, imported one after another."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

from commtrace.hooks.call_site import CallSites
from commtrace.hooks.megatron import core_purposes
from commtrace.recording.table_lines import TableLines
from commtrace.schema import Purpose

seen: list[object] = []


def communicate(*_: Any) -> None:
    """Note the purpose that a call made now has in a recording."""
    tables = TableLines()
    CallSites(tables).find(1, deep=False)
    seen.append(json.loads(tables.lines[-1])["purpose"]["name"])


class Reduce(torch.autograd.Function):
    """An autograd function that communicates in both passes."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        communicate(ctx)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        communicate(ctx)
        return gradients[0]


@pytest.fixture
def add_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    def add(name: str, **contents: Any) -> ModuleType:
        module = ModuleType(f"megatron.core.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        core_purposes.install()
        return module

    seen.clear()
    yield add
    core_purposes.uninstall()


def copy_of(cls: type) -> Any:
    """Return a class with code of its own."""
    methods = {}
    for name in ("forward", "backward"):
        function = getattr(cls, name)
        methods[name] = staticmethod(FunctionType(function.__code__.replace(), function.__globals__))
    return type(cls.__name__, cls.__mro__[1:], methods)


def test_reductions_have_the_purposes_of_their_functions(add_module: Callable[..., ModuleType]) -> None:
    groups = type("_ParamAndGradBucketGroup", (), {"start_grad_sync": communicate, "start_param_sync": communicate})
    buffers = add_module("distributed.param_and_grad_buffer", _ParamAndGradBucketGroup=groups)
    layers = add_module("distributed.finalize_model_grads", _allreduce_word_embedding_grads=communicate)
    buffers._ParamAndGradBucketGroup().start_grad_sync()
    buffers._ParamAndGradBucketGroup().start_param_sync()
    layers._allreduce_word_embedding_grads()
    assert seen == ["gradients reduced", "parameters gathered after the optimizer", "gradients reduced"]


def test_layers_mark_both_passes_where_nothing_else_says_more(add_module: Callable[..., ModuleType]) -> None:
    names = {"_Reduce": copy_of(Reduce), "_AllToAll": copy_of(Reduce)}
    mappings = add_module("tensor_parallel.mappings", **names)
    losses = add_module("tensor_parallel.cross_entropy", _VocabParallelCrossEntropy=copy_of(Reduce))
    counts = {"preprocess": lambda _: mappings._Reduce.apply(torch.ones(1))}
    dispatchers = add_module(
        "transformer.moe.token_dispatcher", MoEAlltoAllTokenDispatcher=type("Dispatcher", (), counts)
    )
    for function in (mappings._Reduce, mappings._AllToAll, losses._VocabParallelCrossEntropy):
        function.apply(torch.ones(1, requires_grad=True)).backward()
    dispatchers.MoEAlltoAllTokenDispatcher().preprocess()
    own = Purpose.PROGRAM.value
    passes = ["activations", "activation gradients", own, own, "loss", "loss"]
    assert seen == [*passes, "numbers of tokens of experts"]
    core_purposes.uninstall()
    mappings._Reduce.apply(torch.ones(1))
    assert seen[-1] == own
