"""Captured jobs: settings that determine an engine's communication, and the roles of its groups."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from commtrace.job_row import JobRow

from . import tracer as torch_tracer
from .tracer import TorchTracer

Describe = Callable[[Any], JobRow]
Roles = Callable[[Any], Iterator[tuple[Any, str, str]]]

_numbers = itertools.count(1)
_all_jobs: list[Jobs] = []


def any_engine() -> bool:
    """Return whether an engine of any kind has been built."""
    return any(jobs._known for jobs in _all_jobs)


class Jobs:
    """Engines of one kind, kept weakly: tracing must not keep a model in memory."""

    def __init__(self, describe: Describe, roles: Roles, message_roles: Roles = lambda engine: iter(())) -> None:
        """Describe a kind of engine.

        Args:
            describe: Returns an engine's row of the `job` table.
            roles: Yields (group, role, source of the role); later ones take precedence. The group
                may be None.
            message_roles: Yields the same for point-to-point messages with a different role than
                their group.
        """
        self._describe, self._roles, self._message_roles = describe, roles, message_roles
        _all_jobs.append(self)
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Write to the tables of each recorder that starts from now on."""
        torch_tracer.start_listeners.append(self.write)

    def uninstall(self) -> None:
        """Forget all engines."""
        torch_tracer.start_listeners.remove(self.write)
        self._known.clear()

    def add(self, engine: Any) -> None:
        """Add an engine that has been built."""
        self._known[engine] = next(_numbers)  # not its id, which the next engine may get
        self.write_now()

    def __contains__(self, engine: object) -> bool:
        """Return whether this engine was built while it was hooked."""
        return engine in self._known

    def write_now(self) -> None:
        """Write to the tables of the running recorder, if there is one."""
        tracer = torch_tracer.current()
        if tracer is not None:
            self.write(tracer)

    def row(self, engine: Any, tracer: TorchTracer) -> int:
        """Return the id of an engine's row in the tracer's `job` table, written on first use."""
        return tracer.recorder.tables.row_id("job", self._known[engine], lambda: self._describe(engine).to_json())

    def write(self, tracer: TorchTracer) -> None:
        """Write jobs and roles to the tables, each row once. Never raises."""
        try:
            for engine in list(self._known):
                self.row(engine, tracer)
                for table, roles in (("roles", self._roles), ("message_roles", self._message_roles)):
                    for group, role, source in roles(engine):
                        if isinstance(group, dist.ProcessGroup):
                            tracer.groups.set_role(group, role, source, table)
        except Exception:
            tracer.recorder.counters.count_fault()
