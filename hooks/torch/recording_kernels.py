"""Kernels in Python that run before torch's own: they record a call and redispatch it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Final

import torch

from commtrace import reduce_ops
from commtrace.hooks import recorder_setup
from commtrace.hooks.recorder_setup import KernelBackend, count_fault
from commtrace.recording.counters import is_sampled
from commtrace.recording.session import session

from .c10d_operators import Operator
from .dispatcher import BELOW
from .tracer import (
    TorchEntry,
    TorchTracer,
    current,
    ensure_tracer_of,
    functional,
    identity_in_default_group,
    is_fake,
    now,
)

blind_spots: list[str] = recorder_setup.blind_spots.setdefault("torch", [])
"""What the installed hooks cannot observe."""


def ensure_tracer() -> TorchTracer | None:
    """Return this process's tracer, created on first use; None if tracing is off or cannot start."""
    recorder = session.recorder or recorder_setup.ensure_recorder()
    return None if recorder is None else ensure_tracer_of(recorder)


def _ensure_tracer_for_call(operator: Operator, args: Sequence[Any]) -> TorchTracer | None:
    if session.settings is None and session.recorder is None:
        return None
    tensor = operator.sample(args)
    return None if tensor is not None and is_fake(tensor) else ensure_tracer()


def kernel_for(operator: Operator) -> Callable[..., Any]:
    """Return the kernel that records an operator's calls and redispatches them."""
    redispatch = operator.overload.redispatch
    below = BELOW

    def kernel(keyset: Any, *args: Any) -> Any:
        entered = now()
        entry: TorchEntry | None = None
        try:
            tracer = current()
            if tracer is None:
                tracer = _ensure_tracer_for_call(operator, args)
                entered = now()  # the recorder is set up once: that is not a cost of this call
            if tracer is not None:
                entry = tracer.begin_call(operator, args)
        except Exception:
            count_fault(unrecorded=1)
        if entry is None:
            return redispatch(keyset & below, *args)
        begun = now()
        try:
            result = redispatch(keyset & below, *args)
        except BaseException:
            entry.tracer.recorder.failed(entry.slot, now())
            raise
        _return(entry, operator, args, result, begun - entered)
        return result

    return kernel


def _return(entry: TorchEntry, operator: Operator, args: Sequence[Any], result: Any, cost: int) -> None:
    t_return = now()
    try:
        entry.returned(operator, args, result, t_return)
        sampled = is_sampled(entry.slot)
        if sampled or entry.first:
            entry.cost(cost + now() - t_return, sampled)
    except Exception:
        with suppress(Exception):
            entry.tracer.recorder.set_unobservable(entry.slot, t_return)
        count_fault()


def functional_kernel(overload: Any) -> Callable[..., Any]:
    """Return the kernel of an operator of `_c10d_functional`, which calls an operator of `c10d`."""
    redispatch = overload.redispatch
    below = BELOW
    names = [argument.name for argument in overload._schema.arguments]
    reduce_op_at = None if reduce_ops.READABLE or "reduce_op" not in names else names.index("reduce_op")

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if session.settings is None:
            return redispatch(keyset & below, *args, **kwargs)
        with functional(), nullcontext() if reduce_op_at is None else reduce_ops.passing(args[reduce_op_at]):
            return redispatch(keyset & below, *args, **kwargs)

    return kernel


def wait_kernel(overload: Any) -> Callable[..., Any]:
    """Return the kernel of a `_c10d_functional` operator that waits for a tensor or for several."""
    redispatch = overload.redispatch
    below = BELOW

    def kernel(keyset: Any, waited: Any) -> Any:
        t_wait = now()
        result = redispatch(keyset & below, waited)
        t_end = now()
        tracer = current()
        if tracer is not None:
            try:
                for tensor in (waited,) if isinstance(waited, torch.Tensor) else waited:
                    if not is_fake(tensor):
                        tracer.tensors.waited(tensor, t_wait, t_end)
            except Exception:
                count_fault()
        return result

    return kernel


_crossing_ns = 0


def measure_crossing() -> None:
    """Measure the ns that a call spends entering and leaving a kernel in Python.

    The kernel itself cannot measure them. An operator with arguments like those of all_reduce is
    called with and without such a kernel. Call this function when the hook is installed, not later:
    the program then has no modes that would intercept the operator, and no thread still uses it
    when torch destroys its libraries at interpreter exit.
    """
    global _crossing_ns
    library: Any = torch.library.Library("commtrace_calibration", "DEF")
    try:
        library.define("probe(Tensor[] tensors, Any group, Tensor? none, bool flag, int number) -> Tensor[]")
        library.impl("probe", lambda tensors, *_: tensors, "CPU")
        probe = torch.ops.commtrace_calibration.probe.default
        args = ([torch.zeros(1)], None, None, True, 1)
        bare = _shortest_ns(lambda: probe(*args))

        def kernel(keyset: Any, *args: Any) -> Any:
            return probe.redispatch(keyset & BELOW, *args)

        library.impl("probe", kernel, "BackendSelect", with_keyset=True)
        _crossing_ns = max(0, _shortest_ns(lambda: probe(*args)) - bare)
    finally:
        library._destroy()


def _shortest_ns(call: Callable[[], Any]) -> int:
    def mean_ns() -> int:
        begun = now()
        for _ in range(20):
            call()
        return (now() - begun) // 20

    return min(mean_ns() for _ in range(10))


PYTHON_BACKEND: Final = KernelBackend(lambda: _crossing_ns, None)
recorder_setup.install_backend(PYTHON_BACKEND)
recorder_setup.identities["torch"] = identity_in_default_group
