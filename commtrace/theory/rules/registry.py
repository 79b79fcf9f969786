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
GPT_NEOX: Final = ("gpt-neox", "05048b6")
"""GPT-NeoX by its commit: it has no releases that its users run. Compared are the calls of commtrace's workload, which
is modelled on it."""
WORKLOAD: Final = ("commtrace", "0.1.0")
"""That workload, where GPT-NeoX leaves to DeepSpeed what it does itself."""

Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True)
class Rule:
    """Where a rule stands, and what it mirrors."""

    module: str
    name: str
    mirrors: str
    library: str
    version: str
    """Of the library whose source or behaviour the rule was written from."""


RULES: Final[list[Rule]] = []


def rule(mirrors: str, library: tuple[str, str]) -> Callable[[Function], Function]:
    """Enter a function into RULES. It stays as it is."""

    def enter(function: Function) -> Function:
        RULES.append(Rule(function.__module__, function.__name__, mirrors, *library))
        return function

    return enter
