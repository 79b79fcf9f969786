"""Hook for torch.distributed at the dispatcher: nearly every collective is a `c10d::` operator.

A kernel on the key BackendSelect is called first, on every device, and passes the call on with
`redispatch`. (Never with `call_boxed`: it keeps the GIL, which gloo's worker thread needs while it
holds a lock that the call waits for.) The methods of Work that wait or poll and the coalescing
methods of ProcessGroup are not dispatched, and are therefore wrapped (`works`). The waits of
`_c10d_functional` are operators and have kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from commtrace import reduce_ops
from commtrace.hooks.native import compiled_kernels as native
from commtrace.patching import Patches
from commtrace.process_setup.setup_reader import library_facts
from commtrace.recording.session import session

from . import backend_methods, blind_spot_warnings, mesh_roles
from . import training as torch_training
from .c10d_operators import WAITS, Operator, known_operators, operator_names
from .dispatcher import Kernels
from .group_registry import declared_roles
from .process_groups import creations
from .recording_kernels import blind_spots, functional_kernel, kernel_for, measure_crossing, wait_kernel
from .works import WorkPatches

_ALWAYS = (
    "ProcessGroup subclasses written in Python, LocalTensorMode, symmetric memory (symm_mem::), and DeepCompile's own "
    "NCCL calls are not observed",
    "a message received from any source has no peer and does not match its sender's record",
)
_PYTHON = (
    "the Python recorder observes waits in Python only: a call whose Work is waited for in C++ (DDP's reducer) or on a "
    "CUDA stream has no end time and is marked unobservable"
)
_NATIVE = (
    "the native recorder observes ends of calls on the host only: a call on a device has no end time and is marked "
    "unobservable"
)
_NATIVE_DEVICE = (
    "a call on a device has times only if it runs in its caller's stream or Python waits for its Work, and not if C++ "
    "waits (DDP's reducer), nothing waits, or the call is in a captured graph"
)

_NO_ASYNC = "torch before 2.8 does not show which collectives are asynchronous: most lack the flag ASYNC"

_kernels = Kernels()
_patches = Patches()


@_patches.installer
def install() -> None:
    """Hook torch.distributed. Does nothing if this torch is built without it."""
    if not dist.is_available():
        return
    operators, unknown = known_operators()
    in_cpp = native.usable()
    device_times = session.settings is not None and session.settings.device_times
    blind_spots[:] = (*_ALWAYS, _PYTHON if not in_cpp else _NATIVE_DEVICE if device_times else _NATIVE)
    if all(operator.async_at is None for operator in operators if operator.op == "all_reduce"):
        blind_spots.append(_NO_ASYNC)
    blind_spots.extend(f"the operator {name} is not known to this version of commtrace" for name in unknown)
    if in_cpp:
        _kernels.remove()
        native.install(operators, [name for name, _ in _functional_operators()])
        _patches.on_undo(native.uninstall)
    else:
        _install_python(operators)
    if session.settings is None or not session.settings.simulated:
        _patches.wrap(distributed_c10d, "_new_process_group_helper", creations.timed(_name_in_pair))
        _patches.wrap(distributed_c10d, "split_group", creations.timed(_name_of_group))
    library_facts["torch"] = _facts
    _patches.on_undo(library_facts.pop, "torch")
    _patches.include(torch_training, blind_spot_warnings, declared_roles, mesh_roles)
    backend_methods.install(operators)
    _patches.on_undo(backend_methods.uninstall)


def _name_of_group(group: Any) -> str | None:
    return str(group.group_name) if isinstance(group, dist.ProcessGroup) else None


def _name_in_pair(group_and_store: Any) -> str | None:
    return _name_of_group(group_and_store[0])


def _facts() -> dict[str, int]:
    threads = {"threads": torch.get_num_threads(), "interop_threads": torch.get_num_interop_threads()}
    return {**threads, **creations.facts()}


uninstall = _patches.undo
"""Restore everything but the kernels, which then only pass calls on."""


def _install_python(operators: list[Operator]) -> None:
    if not _kernels:
        native.remove_kernels()  # of an earlier recording by the native recorder
        try:
            for operator in operators:
                _kernels.add("c10d", operator.variant, kernel_for(operator))
            for name, overload in _functional_operators():
                kernel = wait_kernel(overload) if name in WAITS else functional_kernel(overload)
                _kernels.add("_c10d_functional", name, kernel)
            measure_crossing()
        except BaseException:
            _kernels.remove()
            raise
    _patches.include(WorkPatches(), reduce_ops)


def remove_kernels() -> None:
    """Unregister the kernels between recordings, if no other thread communicates: in benchmarks."""
    _kernels.remove()
    native.remove_kernels()


def add_kernels() -> None:
    """Register the kernels of the native recorder again, which `remove_kernels` has unregistered: in benchmarks."""
    native.add_kernels(known_operators()[0], [name for name, _ in _functional_operators()])


def _functional_operators() -> list[tuple[str, Any]]:
    """Return name and default overload of the operators of `_c10d_functional`."""
    packets = ((name, getattr(torch.ops._c10d_functional, name)) for name in operator_names("_c10d_functional"))
    return [(name, packet.default) for name, packet in packets if hasattr(packet, "default")]
