"""Switches the recording of this process off and on between two steps, without forgetting what its hooks know."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any, NamedTuple

from commtrace.hooks.torch import hook
from commtrace.patching import Patches


class Replacement(NamedTuple):
    """An attribute of a library that a hook has replaced."""

    patches: Patches
    owner: Any
    name: str
    original: Any
    replacement: Any

    def exchange(self, now: Any, then: Any) -> bool:
        """Put an object in the place of another one. Return False if that is not there."""
        if self.patches.attributes(self.owner).get(self.name) is not now:
            return False
        self.patches.assign(self.owner, self.name, then)
        return True


class Recording:
    """The recording of this process, which has begun: kernels of operators, and replaced functions and methods.

    When it is off, what torch's optimizers call at the ends of steps stays, and the thread that writes the log.
    """

    def __init__(self) -> None:
        self._off: list[Replacement] = []

    def switch(self, *, on: bool) -> None:
        """Switch it on or off. No call may be under way.

        It is always switched both ways, also if it is so already: replaced attributes make Python forget what it knew
        of their classes, and the steps after that take longer, whether they are recorded or not.
        """
        self._switch(on=not on)
        self._switch(on=on)

    def _switch(self, *, on: bool) -> None:
        if on and self._off:
            hook.add_kernels()
            while self._off:
                one = self._off.pop()
                assert one.exchange(one.original, one.replacement), f"{one.owner}.{one.name} has been replaced"
        elif not on and not self._off:
            hook.remove_kernels()
            replaced = replacements()
            # An attribute may be replaced by several hooks: the last one comes back first.
            while back := [one for one in replaced if one.exchange(one.replacement, one.original)]:
                self._off += back


def replacements() -> list[Replacement]:
    """Return what all hooks have replaced."""
    return [
        Replacement(patches, *undo.args)
        for patches in gc.get_objects()
        if isinstance(patches, Patches)
        for undo in patches._undo
        if isinstance(undo, partial) and undo.func == patches._restore
    ]
