"""The kernels that stand before torch's own: they record a call and hand it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import torch

from commtrace.hooks import recorder_setup as beginning
from commtrace.hooks.recorder_setup import KernelBackend, fault
from commtrace.recording.session import session

from .c10d_operators import Operator
from .dispatcher import BELOW
from .tracer import SAMPLE_MASK, Entry, TorchTracer, current, functional, is_fake, member, now, start

blind_spots: list[str] = beginning.blind_spots.setdefault("torch", [])
"""What the hooks that are in place cannot see."""


def begin() -> TorchTracer | None:
    """The tracer of this process, made with the first call; None where tracing is off."""
    recorder = session.recorder or beginning.begin()
    return None if recorder is None else start(recorder)


def _first(operator: Operator, args: Sequence[Any]) -> TorchTracer | None:
    if session.settings is None and session.recorder is None:
        return None
    tensor = operator.sample(args)
    return None if tensor is not None and is_fake(tensor) else begin()


def kernel_for(operator: Operator) -> Callable[..., Any]:
    """The kernel that records an operator's calls and hands them on."""
    redispatch = operator.overload.redispatch
    below = BELOW

    def kernel(keyset: Any, *args: Any) -> Any:
        entered = now()
        entry: Entry | None = None
        try:
            tracer = current()
            if tracer is None:
                tracer = _first(operator, args)
                entered = now()  # beginning happens once and is not what a call costs
            if tracer is not None:
                entry = tracer.before(operator, args)
        except Exception:
            fault()
        if entry is None:
            return redispatch(keyset & below, *args)
        begun = now()
        try:
            result = redispatch(keyset & below, *args)
        except BaseException:
            entry.failed(now())
            raise
        _return(entry, operator, args, result, begun - entered)
        return result

    return kernel


def _return(entry: Entry, operator: Operator, args: Sequence[Any], result: Any, cost: int) -> None:
    t_return = now()
    try:
        entry.after(operator, args, result, t_return)
        if entry.slot & SAMPLE_MASK == 0:
            entry.cost(cost + now() - t_return)
    except Exception:
        with suppress(Exception):
            entry.lost(t_return)
        fault()


def functional_kernel(overload: Any) -> Callable[..., Any]:
    """The kernel of an operator of `_c10d_functional`, whose calls arrive at `c10d` operators."""
    redispatch = overload.redispatch
    below = BELOW

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if session.settings is None:
            return redispatch(keyset & below, *args, **kwargs)
        with functional():
            return redispatch(keyset & below, *args, **kwargs)

    return kernel


def wait_kernel(overload: Any) -> Callable[..., Any]:
    """The kernel of `_c10d_functional::wait_tensor`."""
    redispatch = overload.redispatch
    below = BELOW

    def kernel(keyset: Any, tensor: torch.Tensor) -> Any:
        t_wait = now()
        result = redispatch(keyset & below, tensor)
        t_end = now()
        tracer = current()
        if tracer is not None:
            try:
                if not is_fake(tensor):
                    tracer.tensors.waited(tensor, t_wait, t_end)
            except Exception:
                fault()
        return result

    return kernel


class Crossing:
    """ns that a call spends on its way into and out of a kernel in Python, which the kernel itself cannot see."""

    def __init__(self) -> None:
        self._ns = 0

    def measured(self) -> int:
        """What `measure` found."""
        return self._ns

    def measure(self) -> None:
        """Call an operator of our own with all_reduce's kind of arguments, with and without such a kernel.

        When the hook is installed and not later: the program has no modes yet that would see the operator, and a thread
        that used it when the interpreter ends would find it removed under its hands (torch destroys libraries first).
        """
        library: Any = torch.library.Library("commtrace_calibration", "DEF")
        try:
            library.define("probe(Tensor[] tensors, Any group, Tensor? none, bool flag, int number) -> Tensor[]")
            library.impl("probe", lambda tensors, *_: tensors, "CPU")
            probe = torch.ops.commtrace_calibration.probe.default
            args = ([torch.zeros(1)], None, None, True, 1)
            bare = _least_ns(lambda: probe(*args))
            library.impl(
                "probe",
                lambda keyset, *args: probe.redispatch(keyset & BELOW, *args),
                "BackendSelect",
                with_keyset=True,
            )
            self._ns = max(0, _least_ns(lambda: probe(*args)) - bare)
        finally:
            library._destroy()


crossing = Crossing()
_PYTHON: Final = KernelBackend(crossing.measured, None)


def put_in_place(kernels: KernelBackend | None) -> None:
    """Another recorder's kernels are in place of these; None: these are again."""
    beginning.install_backend(kernels or _PYTHON)


put_in_place(None)
beginning.members["torch"] = member


def _least_ns(call: Callable[[], Any]) -> int:
    def once() -> int:
        begun = now()
        for _ in range(20):
            call()
        return (now() - begun) // 20

    return min(once() for _ in range(10))
