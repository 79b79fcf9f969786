"""List of all rules: the library function that each reproduces, and its version.

    @rule("deepspeed.runtime.engine.DeepSpeedEngine._broadcast_model", DEEPSPEED)
    def broadcast_model(job: Job) -> list[ExpectedCall]: ...

The constants are the library versions that rules were written against. With another version of torch or DeepSpeed in
the log, reports and `commtrace check` predict with the same rules and name both versions (`other_versions`). A rule
that also covers older versions follows the log's version (`Job.is_older`), and names the older ones in `mirrors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

TORCH: Final = ("torch", "2.13.0")
DEEPSPEED: Final = ("deepspeed", "0.19.8")
GPT_NEOX: Final = ("gpt-neox", "ea7aefd8")
"""Commit of GPT-NeoX, because its users do not run releases. Tests compare the calls of `examples.gpt_neox`, which is
modelled on it."""
WORKLOAD: Final = ("commtrace", "0.1.0")
"""`examples.gpt_neox`, for what it does itself and GPT-NeoX leaves to DeepSpeed."""

Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True)
class Rule:
    """A function that mirrors a function of a library."""

    module: str  # dotted name of the rule's module
    name: str  # name of the rule's function
    mirrors: str  # functions of the library, separated by ";"
    library: str  # the library's name
    version: str  # the library's version whose source or behaviour the rule was written from


RULES: Final[list[Rule]] = []


def rule(mirrors: str, library: tuple[str, str]) -> Callable[[Function], Function]:
    """Return a decorator that adds a function to RULES. `library` is the library's name and version."""

    def register(function: Function) -> Function:
        RULES.append(Rule(function.__module__, function.__name__, mirrors, *library))
        return function

    return register


def other_versions(versions: Mapping[str, object]) -> str | None:
    """Return the libraries whose version differs from that of the rules; None if there are none."""
    other = [
        f"{name} {versions[name]} (rules: {version})"
        for name, version in (TORCH, DEEPSPEED)
        if name in versions and str(versions[name]).partition("+")[0] != version
    ]
    return ", ".join(other) or None


def name_versions(versions: str) -> str:
    """Return a sentence about what `other_versions` returned."""
    return f"Rules were written against other versions: {versions}."
