"""torch.distributed, at the dispatcher: nearly every collective, whoever calls it, passes `c10d::` as an operator.

A kernel on the key BackendSelect is called first, on every device, and hands on with `redispatch`. (Never with
`call_boxed`: that keeps the GIL, which gloo's worker thread needs while it holds the lock that we would wait for.)
Beside the operators, three things are not dispatched and are wrapped: `Work.wait` and its like, which show the end of a
call; the coalescing methods of ProcessGroup; and `_c10d_functional`'s waits, which are operators of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from commtrace.hooks.native import recorder as native
from commtrace.recording.session import session

from . import training as torch_training
from .c10d_operators import Operator, known_operators
from .dispatcher import Kernels
from .kernels import blind_spots, crossing, functional_kernel, kernel_for, wait_kernel
from .works import python_patches

_ALWAYS = (
    "direct calls on a backend object, ProcessGroup subclasses written in Python, symmetric memory (symm_mem::), "
    "and DeepCompile's own NCCL calls are not seen",
    "a message received from any source has no peer and does not match its sender's record",
)
_PYTHON = (
    "the Python recorder sees the waits that Python makes: a call whose Work is waited for in C++ (DDP's reducer) or "
    "on a CUDA stream has no end time and is marked unobservable"
)
_NATIVE = (
    "the native recorder sees the ends of calls on the host: a call on a device has no end time and is marked "
    "unobservable"
)
_NATIVE_DEVICE = (
    "a call on a device has times where it runs in its caller's stream or Python waits for its Work; where C++ waits "
    "(DDP's reducer), or nobody does, and in a captured graph, it has none"
)

_kernels = Kernels()
_installed = False


def install() -> None:
    """Hook torch.distributed. Does nothing if it is hooked already, or if this torch has no torch.distributed."""
    global _installed
    if _installed or not dist.is_available():
        return
    _installed = True
    try:
        _install()
    except BaseException:
        uninstall()  # half a hook would give half a log
        raise


def _install() -> None:
    operators, unknown = known_operators()
    in_cpp = native.usable()
    blind_spots[:] = (*_ALWAYS, _ends_unseen(in_cpp))
    blind_spots.extend(f"the operator {name} is not known to this version of commtrace" for name in unknown)
    if in_cpp:
        _kernels.take_out()
        native.install(operators, [name for name, _ in _functional_operators()])
    else:
        _install_python(operators)
    torch_training.install()


def _ends_unseen(in_cpp: bool) -> str:
    if not in_cpp:
        return _PYTHON
    return _NATIVE_DEVICE if session.settings is not None and session.settings.device_times else _NATIVE


def _install_python(operators: list[Operator]) -> None:
    if not _kernels:
        native.take_out()  # those of another recording by the other recorder
        try:
            _put_in(operators)
        except BaseException:
            _kernels.take_out()
            raise
    python_patches.install()


def _put_in(operators: list[Operator]) -> None:
    for operator in operators:
        _kernels.add("c10d", operator.variant, kernel_for(operator))
    for name, overload in _functional_operators():
        kernel = wait_kernel(overload) if name == "wait_tensor" else functional_kernel(overload)
        _kernels.add("_c10d_functional", name, kernel)
    crossing.measure()


def uninstall() -> None:
    """Take everything out again, but the kernels, which only hand on from here on."""
    global _installed
    _installed = False
    torch_training.uninstall()
    python_patches.uninstall()
    native.uninstall()


def take_out() -> None:
    """Take the kernels out, too, between recordings. Only where no other thread communicates: a benchmark."""
    _kernels.take_out()
    native.take_out()


def _functional_operators() -> list[tuple[str, Any]]:
    """(name, default overload) of each."""
    names = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("_c10d_functional::")
    }
    packets = ((name, getattr(torch.ops._c10d_functional, name)) for name in sorted(names))
    return [(name, packet.default) for name, packet in packets if hasattr(packet, "default")]
