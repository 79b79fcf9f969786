"""Hook for DeviceMesh: the dimensions that use a group whose description does not name them.

A dimension over all ranks has the default group, and several dimensions may share it (experts are sharded over the
ranks that are data-parallel). Readers take the dimension from the purpose of a call then.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

from commtrace.hooks.recorder_setup import guard
from commtrace.patching import Patches, around
from commtrace.reading.roles_by_name import role_from_description, role_of_dimension

from . import tracer as torch_tracer
from .group_registry import declared_roles
from .tracer import TorchTracer

MODULE: Final = "torch.distributed.device_mesh"
_TABLE: Final = "dimensions"

_patches = Patches()
_new: list[weakref.ref[Any]] = []
"""Meshes whose groups have not been read: they may be assigned after the construction."""


@_patches.installer
def install() -> None:
    """Hook the constructor of meshes."""
    mesh = getattr(sys.modules[MODULE], "DeviceMesh", None)
    if mesh is not None:
        _patches.wrap(mesh, "__init__", _init_mesh)
        _patches.append(torch_tracer.start_listeners, _follow)
        _patches.on_undo(_new.clear)


uninstall = _patches.undo


@around
def _init_mesh(original: Callable[..., None], self: Any, /, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    with guard():
        _new.append(weakref.ref(self))
        _declare()  # at once, since a mesh may be deleted before the next drain


def _follow(tracer: TorchTracer) -> None:
    """Declare the dimensions of new meshes now, and as long as calls are recorded."""

    def declare() -> None:
        _declare()
        if tracer is not torch_tracer.current():  # the recording ends
            declared_roles.write(tracer)

    with guard():
        _declare()
    tracer.recorder.drain_callbacks.append(declare)


def _declare() -> None:
    """Declare the dimensions of the new meshes whose groups are known, and keep the others."""
    meshes, _new[:] = [*_new], []
    for reference in meshes:
        mesh = reference()
        roles = None if mesh is None else _roles(mesh)
        for group, role, source in roles or ():
            declared_roles.add(group, role, source, _TABLE)
        if mesh is not None and roles is None:
            _new.append(reference)


def _roles(mesh: Any) -> list[tuple[Any, str, str]] | None:
    """Return group, role and source for each dimension; None if the groups are not known, or not yet."""
    roles = [(name, role) for name in mesh.mesh_dim_names or () for role in [role_of_dimension(name)] if role]
    try:
        groups = [mesh.get_group(name) for name, _ in roles]
    except Exception:
        return None
    return [
        (group, role, f"DeviceMesh dimension {name}")
        for group, (name, role) in zip(groups, roles, strict=True)
        if role_from_description(str(group.group_desc)) is None
    ]
