"""What is trained: objects that know a job and the roles of groups, told to the tables of each recorder that begins."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from . import tracer as torch_tracer
from .tracer import TorchTracer

Describe = Callable[[Any], dict[str, Any]]
Roles = Callable[[Any], Iterator[tuple[Any, str, str]]]

_numbers = itertools.count(1)
_every: list[Jobs] = []


def any_known() -> bool:
    """Whether some engine has been built."""
    return any(one.known for one in _every)


class Jobs:
    """Engines of one kind. Kept weakly: a tracer must not be the reason why a model stays in memory."""

    def __init__(self, describe: Describe, roles: Roles, message_roles: Roles | None = None) -> None:
        """`describe` gives the row of the `job` table, `roles` gives (group, role, who says so), most telling last.

        `message_roles` gives the same of messages from rank to rank that serve another dimension than their group.
        """
        self._describe, self._roles, self._message_roles = describe, roles, message_roles
        _every.append(self)
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @property
    def known(self) -> bool:
        """One of these engines has been built."""
        return len(self._known) > 0

    def install(self) -> None:
        """Tell each recorder that begins from now on."""
        if self.tell not in torch_tracer.started:
            torch_tracer.started.append(self.tell)

    def uninstall(self) -> None:
        """Forget everything."""
        if self.tell in torch_tracer.started:
            torch_tracer.started.remove(self.tell)
        self._known.clear()

    def add(self, engine: Any) -> None:
        """An engine has been built."""
        self._known[engine] = next(_numbers)  # an id may be used again for the next engine
        self.tell_now()

    def tell_now(self) -> None:
        """As `tell`, if something records."""
        tracer = torch_tracer.current()
        if tracer is not None:
            self.tell(tracer)

    def tell(self, tracer: TorchTracer) -> None:
        """What is known goes into the tables; rows that are there already are not repeated. Never raises."""
        try:
            for engine, number in list(self._known.items()):
                tracer.recorder.tables.number("job", number, functools.partial(self._describe, engine))
                for group, role, source in self._roles(engine):
                    if isinstance(group, dist.ProcessGroup):
                        tracer.groups.set_role(group, role, source)
                for group, role, source in self._message_roles(engine) if self._message_roles else ():
                    if isinstance(group, dist.ProcessGroup):
                        tracer.groups.set_message_role(group, role, source)
        except Exception:
            tracer.recorder.fault()
