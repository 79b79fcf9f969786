"""The list of rules: which function of which library each one mirrors, and in which version.

@rule("deepspeed.runtime.engine.DeepSpeedEngine._broadcast_model", DEEPSPEED)
def broadcast_model(job: Job) -> list[Message]: ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

TORCH: Final = ("torch", "2.13.0")
DEEPSPEED: Final = ("deepspeed", "0.19.8")

Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True)
class Rule:
    """Where a rule stands, and what it mirrors."""

    module: str
    name: str
    mirrors: str
    library: str
    version: str


RULES: Final[list[Rule]] = []


def rule(mirrors: str, library: tuple[str, str]) -> Callable[[Function], Function]:
    """Enter a function into RULES. It stays as it is."""

    def enter(function: Function) -> Function:
        RULES.append(Rule(function.__module__, function.__name__, mirrors, *library))
        return function

    return enter
