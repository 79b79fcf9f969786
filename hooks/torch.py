"""torch.distributed, at the dispatcher: nearly every collective, whoever calls it, passes `c10d::` as an operator.

A kernel on the key BackendSelect is called first, on every device, and hands on with `redispatch`. (Never with
`call_boxed`: that keeps the GIL, which gloo's worker thread needs while it holds the lock that we would wait for.)
Beside the operators, three things are not dispatched and are wrapped: `Work.wait` and its like, which show the end of a
call; the coalescing methods of ProcessGroup; and `_c10d_functional`'s waits, which are operators of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commtrace.hooks import torch_training
from commtrace.hooks.c10d_operators import Operator, known_operators
from commtrace.hooks.patching import Patches
from commtrace.hooks.torch_tracer import SAMPLE_MASK, Entry, TorchTracer, current, is_fake, member, now, start
from commtrace.session import session

BLIND_SPOTS = (
    "direct calls on a backend object, ProcessGroup subclasses written in Python, symmetric memory (symm_mem::), "
    "and DeepCompile's own NCCL calls are not seen",
    "the Python recorder sees the waits that Python makes: a call whose Work is waited for in C++ (DDP's reducer) or "
    "on a CUDA stream has no end time and is marked unobservable",
)

_libraries: list[torch.library.Library] = []
_patches = Patches()
_blind_spots: list[str] = []


def install() -> None:
    """Hook torch.distributed. Does nothing if it is hooked already, or if this torch has no torch.distributed."""
    if _libraries or not dist.is_available():
        return
    operators, unknown = known_operators()
    _blind_spots[:] = [
        *BLIND_SPOTS,
        *(f"the operator {name} is not known to this version of commtrace" for name in unknown),
    ]
    c10d = torch.library.Library("c10d", "IMPL")
    for operator in operators:
        c10d.impl(operator.variant, kernel_for(operator), "BackendSelect", with_keyset=True)
    functional = torch.library.Library("_c10d_functional", "IMPL")
    for name in _functional_operators():
        functional.impl(name, _functional_kernel(name), "BackendSelect", with_keyset=True)
    _libraries.extend((c10d, functional))
    _wrap_works()
    torch_training.install()


def uninstall() -> None:
    """Take everything out again."""
    torch_training.uninstall()
    _patches.undo()
    while _libraries:
        _libraries.pop()._destroy()  # type: ignore[no-untyped-call]


_below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def _begin(args: Sequence[Any], operator: Operator) -> TorchTracer | None:
    """The tracer of this process, made with the first call; None where tracing is off or the call is none."""
    recorder = session.recorder
    if recorder is None:
        if session.settings is None or not _is_communication(args, operator):
            return None
        recorder = session.begin(member, blind_spots=_blind_spots, calibrate=_calibrate)
    return None if recorder is None else start(recorder)


def _is_communication(args: Sequence[Any], operator: Operator) -> bool:
    tensors = operator.outputs(args)
    return not (tensors and is_fake(tensors[0]))


def kernel_for(operator: Operator) -> Callable[..., Any]:
    """The kernel that records an operator's calls and hands them on."""
    redispatch = operator.overload.redispatch
    below = _below

    def kernel(keyset: Any, *args: Any) -> Any:
        entered = now()
        entry: Entry | None = None
        try:
            tracer = current()
            if tracer is None or tracer.recorder is not session.recorder:
                tracer = _begin(args, operator)
                entered = now()  # beginning happens once and is not what a call costs
            if tracer is not None:
                entry = tracer.before(operator, args)
        except Exception:
            _fault()
        if entry is None:
            return redispatch(keyset & below, *args)
        begun = now()
        try:
            result = redispatch(keyset & below, *args)
        except BaseException:
            entry.failed(now())
            raise
        t_return = now()
        try:
            entry.after(operator, args, result, t_return)
            if entry.slot & SAMPLE_MASK == 0:
                entry.cost(begun - entered + now() - t_return)
        except Exception:
            _fault()
        return result

    return kernel


def _fault() -> None:
    recorder = session.recorder
    if recorder is not None:
        recorder.fault()


def _functional_operators() -> list[str]:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("_c10d_functional::")}
    return sorted({name.split("::")[1].split(".")[0] for name in names})


def _functional_kernel(name: str) -> Callable[..., Any]:
    redispatch = getattr(torch.ops._c10d_functional, name).default.redispatch
    below = _below

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = current()
        if tracer is None or session.recorder is None:
            # The first call of all may come this way: its c10d operator begins the recording.
            return redispatch(keyset & below, *args, **kwargs)
        with tracer.functional():
            return redispatch(keyset & below, *args, **kwargs)

    def wait(keyset: Any, tensor: torch.Tensor) -> Any:
        t_wait = now()
        result = redispatch(keyset & below, tensor)
        tracer = current()
        if tracer is not None and session.recorder is tracer.recorder:
            try:
                tracer.tensor_waited(tensor, t_wait, now())
            except Exception:
                _fault()
        return result

    return wait if name == "wait_tensor" else kernel


def _wrap_works() -> None:
    work: Any = dist.Work
    for cls in (work, *work.__subclasses__()):
        for name in ("wait", "synchronize"):
            _patches.wrap(cls, name, _waiting)
        _patches.wrap(cls, "is_completed", _polling)
    _patches.wrap(dist.ProcessGroup, "_start_coalescing", _start_coalescing)
    _patches.wrap(dist.ProcessGroup, "_end_coalescing", _end_coalescing)


def _waiting(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = current()
        pending = None if tracer is None else tracer.pending(self)
        if pending is None or tracer is None:
            return original(self, *args, **kwargs)
        t_wait = now()
        try:
            result = original(self, *args, **kwargs)
        except BaseException:
            tracer.wait_failed(self)
            raise
        t_end = now()
        try:
            tracer.waited(self, t_wait, t_end)
        except Exception:
            _fault()
        return result

    return wait


def _polling(original: Callable[..., Any]) -> Callable[..., Any]:
    def is_completed(self: Any) -> Any:
        result = original(self)
        tracer = current()
        if result and tracer is not None:
            try:
                tracer.polled(self, now())
            except Exception:
                _fault()
        return result

    return is_completed


def _start_coalescing(original: Callable[..., Any]) -> Callable[..., Any]:
    def _start_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        tracer = current()
        if tracer is not None:
            tracer.batch_begins(self)
        return result

    return _start_coalescing


def _end_coalescing(original: Callable[..., Any]) -> Callable[..., Any]:
    def _end_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(self, *args, **kwargs)
        tracer = current()
        if tracer is not None:
            try:
                tracer.batch_ends(self, work)
            except Exception:
                _fault()
        return work

    return _end_coalescing


def _calibrate() -> int:
    """ns that a call spends on its way into and out of a kernel in Python, which the kernel itself cannot see.

    Measured on an operator of our own with all_reduce's kind of arguments, with and without such a kernel; the least of
    several tries, as other threads of the program run at the same time.
    """
    library = torch.library.Library("commtrace_calibration", "DEF")
    try:
        library.define("probe(Tensor[] tensors, Any group, Tensor? none, bool flag, int number) -> Tensor[]")
        library.impl("probe", lambda tensors, *_: tensors, "CPU")
        probe = torch.ops.commtrace_calibration.probe.default
        args = ([torch.zeros(1)], None, None, True, 1)
        bare = _least_ns(lambda: probe(*args))
        library.impl(
            "probe", lambda keyset, *args: probe.redispatch(keyset & _below, *args), "BackendSelect", with_keyset=True
        )
        return max(0, _least_ns(lambda: probe(*args)) - bare)
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _least_ns(call: Callable[[], Any]) -> int:
    def once() -> int:
        begin = now()
        for _ in range(20):
            call()
        return (now() - begin) // 20

    return min(once() for _ in range(10))
