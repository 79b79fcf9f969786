"""Roles of groups, as a library's module of process groups has them in its globals (Megatron-LM, GPT-NeoX)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from commtrace.patching import Patches

from . import tracer as torch_tracer
from .tracer import TorchTracer


class Registry:
    """A module that makes all groups in one function and keeps them in globals; told to each recorder that begins."""

    def __init__(self, module: str, maker: str, roles: Mapping[str, str]) -> None:
        """`maker`: the function. `roles`: of the globals, each of which holds a group, several of them, or none."""
        self._name, self._maker, self._roles = module, maker, roles
        self._patches = Patches()

    def install(self) -> None:
        """Hook the module, which has been imported. Does nothing if it is hooked already."""
        if self._patches:
            return
        self._patches.wrap(sys.modules[self._name], self._maker, self._making)
        torch_tracer.started.append(self.tell)

    def uninstall(self) -> None:
        """Take everything out again."""
        self._patches.undo()
        if self.tell in torch_tracer.started:
            torch_tracer.started.remove(self.tell)

    def tell(self, tracer: TorchTracer) -> None:
        """What the module knows goes into the tables; rows that are there already are not repeated. Never raises."""
        try:
            for name, group in self._groups():
                tracer.groups.set_role(group, self._roles[name], f"{self._name}.{name}")
        except Exception:
            tracer.recorder.fault()

    def _groups(self) -> Iterator[tuple[str, dist.ProcessGroup]]:
        """Those that are there, by the name of the global."""
        known = vars(sys.modules[self._name]) if self._name in sys.modules else {}
        for name in self._roles:
            held = known.get(name)
            several = held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else (held,)
            yield from ((name, group) for group in several if isinstance(group, dist.ProcessGroup))

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def maker(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                tracer = torch_tracer.current()
                if tracer is not None:
                    self.tell(tracer)

        return maker
