"""Rules of theory that are broken on purpose, to show that their tests then fail."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from commtrace.theory import ExpectedCall
from commtrace.theory.model_shapes import ModelShape
from commtrace.theory.rules.registry import Rule

OF_EVALUATIONS = "check_order", "release_inflight", "unused_prefetches", "leave_gathered", "access"
"""Rules that only evaluations, checkpoints and gathers of a program need: theory/test_passes.py breaks them."""


def break_rule(rule: Rule, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any] | None = None) -> None:
    """Make a rule return something else (`change`, default: `wrong`), or do nothing if it returns nothing."""
    original = getattr(importlib.import_module(rule.module), rule.name)

    def broken(*arguments: Any, **named: Any) -> Any:
        if original.__annotations__.get("return") in ("None", None):
            return None  # a rule with side effects only
        return (change or wrong)(original(*arguments, **named))

    for module, name in list(places(original)):
        monkeypatch.setattr(module, name, broken)


def wrong(value: Any) -> Any:
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return "float64"
    if value is None:
        return 1
    if isinstance(value, (set, frozenset)):
        return type(value)([*value][1:]) if value else type(value)([0])
    if isinstance(value, Iterator):
        return wrong_list([*value])
    if isinstance(value, ModelShape):
        return replace(value, layers=value.layers + 1)
    if isinstance(value, dict):
        return {key: wrong(item) for key, item in value.items()}
    if isinstance(value, ExpectedCall):
        return replace(value, payload=value.payload + 1)
    if hasattr(value, "backward"):
        return value._replace(**{way: tuple(wrong([*getattr(value, way)])) for way in ("forward", "backward")})
    if isinstance(value, tuple):
        return value[::-1] if value[::-1] != value else (value[0] + 1, *value[1:])  # bounds
    if hasattr(value, "shard"):
        return replace(value, shard=value.shard + 1)
    if hasattr(value, "prefetch"):
        return replace(value, prefetch=value.prefetch // 1000, live=value.live // 1000, reuse=value.reuse // 1000)
    assert isinstance(value, list), value
    return wrong_list(value)


def wrong_list(value: list[Any]) -> list[Any]:
    """Return the list with another first size, another order or other buckets."""
    if not value:
        return [ExpectedCall("all_reduce", 3, "wrong")]
    first = value[0]
    if isinstance(first, ExpectedCall):
        return [replace(first, payload=first.payload + 1), *value[1:]]
    if isinstance(first, list):
        return [[*first, *value[1]], *value[2:]] if len(value) > 1 else [first[:1], first[1:]]
    if isinstance(first, tuple):
        return [(first[0] + 1, first[1] + 1), *value[1:]]
    if len(value) < 3 and isinstance(first, int):
        return [max(1, number // 3) for number in value]
    return value[::-1] if value[::-1] != value else [first + 1, *value[1:]]


def places(function: Callable[..., Any]) -> Iterator[tuple[Any, str]]:
    """Yield every module of theory that contains the function, and its name there."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("commtrace.theory", "examples.gpt_neox.theory")):
            yield from ((module, attribute) for attribute, value in vars(module).items() if value is function)
