"""Roles of groups: those that a library keeps in the globals of a module, and those that it passes to its objects."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch.distributed as dist

from commtrace.patching import Patches, around

from . import tracer as torch_tracer
from .tracer import TorchTracer


class Registry:
    """Hook for a module that makes all groups in one function and keeps them in globals, or in one object."""

    def __init__(self, module: str, maker: str, roles: Mapping[str, str], holder: str = "") -> None:
        """Describe a module.

        Args:
            module: Its dotted name.
            maker: Name of the function that makes the groups.
            roles: Name of a global -> role. A global may hold a group, a list or dict of groups, or None.
            holder: A global whose attributes these are instead; "": none.
        """
        self._name, self._maker, self._roles, self._holder = module, maker, roles, holder
        self._patches = Patches()
        self.install = self._patches.installer(self._install)
        self.uninstall = self._patches.undo

    def _install(self) -> None:
        self._patches.wrap(sys.modules[self._name], self._maker, around(self._make_groups))
        self._patches.append(torch_tracer.start_listeners, self.write)

    def write(self, tracer: TorchTracer) -> None:
        """Write the roles to the tables, each row once. Never raises."""
        try:
            for name, group in self._groups():
                tracer.groups.set_role(group, self._roles[name], f"{self._name}.{name}")
        except Exception:
            tracer.recorder.counters.count_fault()

    def _groups(self) -> Iterator[tuple[str, dist.ProcessGroup]]:
        """Yield the groups that exist, with the name of their global."""
        owner: Any = sys.modules.get(self._name)
        if self._holder:
            owner = getattr(owner, self._holder, None)
        variables = vars(owner) if owner is not None else {}
        for name in self._roles:
            value = variables.get(name)
            groups = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            )
            yield from ((name, group) for group in groups if isinstance(group, dist.ProcessGroup))

    def _make_groups(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            tracer = torch_tracer.current()
            if tracer is not None:
                self.write(tracer)


class DeclaredRoles:
    """Roles of groups that libraries pass to their objects, written to the tables of each recorder."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, str], str]] = (
            weakref.WeakKeyDictionary()
        )

    def install(self) -> None:
        """Write to the tables of each recorder that starts from now on."""
        torch_tracer.start_listeners.append(self.write)

    def uninstall(self) -> None:
        """Forget all groups."""
        torch_tracer.start_listeners.remove(self.write)
        self._known.clear()

    def add(self, group: Any, role: str, source: str, table: str = "roles") -> None:
        """Declare the role of a group; `table` is that of `Groups.set_role`. Groups without this rank are left out."""
        if not isinstance(group, dist.ProcessGroup):
            return
        known = self._known.setdefault(group, {})
        tracer = torch_tracer.current()
        if (role, table) not in known:
            known[role, table] = source
            if tracer is not None:
                tracer.groups.set_role(group, role, source, table)

    def write(self, tracer: TorchTracer) -> None:
        """Write the roles to the tables. Never raises."""
        try:
            for group, roles in list(self._known.items()):
                for (role, table), source in roles.items():
                    tracer.groups.set_role(group, role, source, table)
        except Exception:
            tracer.recorder.counters.count_fault()


declared_roles: Final = DeclaredRoles()
"""Included by the hook of torch.distributed."""
