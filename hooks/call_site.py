"""Call sites: the line of the program that made a call and its purpose, and properties of the frames above it.

The call site is the innermost line that is not in a wrapper: DeepSpeed's reducer rather than
`deepspeed.comm.all_reduce`, the user's `loss.backward()` rather than autograd's. Frames are
classified once per code object, so a walk is cheap. Where a library makes all calls of an operation
on one line (Megatron's mappings of tensor parallelism), its caller's line is part of the call site.

The purpose (`purposes`) is part of the row: a line makes calls for few purposes, so a record needs no
field for it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, Final

import commtrace
from commtrace.library_frames import is_wrapper, path_below_packages
from commtrace.recording.table_lines import TableLines
from commtrace.schema import Purpose

from . import purposes

# Properties of a frame, as bits; the same as in hooks/native/frames.h.
WRAPPER: Final = 1  # passes a call on; not a call site
OBJECT: Final = 2  # sends pickled objects as tensors
FORWARD: Final = 4  # calls a module
OPTIMIZER: Final = 8  # steps an optimizer
HANDLE: Final = 16  # sends or receives a message and returns a handle
BLOCKING: Final = 32  # sends or receives a message and waits for it
BACKWARD: Final = 64  # runs autograd
SHARED: Final = 128  # makes calls for many lines of the program: its caller is part of the site
DISPATCH: Final = 256  # handles a call that torch's C++ code has made: a dispatch mode, or a kernel of ours
CONTEXT: Final = 512  # a pass of an autograd function: its first argument is the context
PURPOSE_SHIFT: Final = 16  # above it: the purpose of the function's calls, if it has one (`purposes.of_code`)

_OUTERMOST: Final = FORWARD | OPTIMIZER  # no walk goes beyond
_FUNCTION: Final = -1 << PURPOSE_SHIFT

# Further properties of wrappers: (file, function) -> bits.
_C10D: Final = "torch/distributed/distributed_c10d.py"
_PROPERTIES: Final = {
    **{(_C10D, f"{name}_object"): OBJECT for name in ("all_gather", "gather")},
    **{(_C10D, f"{name}_object_list"): OBJECT for name in ("broadcast", "recv", "scatter", "send")},
    (_C10D, "isend"): HANDLE,
    (_C10D, "irecv"): HANDLE,
    (_C10D, "send"): BLOCKING,
    (_C10D, "recv"): BLOCKING,
    ("torch/nn/modules/module.py", "_call_impl"): FORWARD,
    ("torch/optim/optimizer.py", "wrapper"): OPTIMIZER,
    ("torch/autograd/graph.py", "_engine_run_backward"): BACKWARD,
}

# Methods of dispatch modes and tensor subclasses of any library, and files that call them.
_DISPATCH_FUNCTIONS: Final = ("__torch_dispatch__", "__torch_function__")
_DISPATCH_FILES: Final = (
    "commtrace/current_step.py",
    "commtrace/dryrun/",
    "commtrace/hooks/",
    "commtrace/patching.py",
    "torch/_compile.py",
    "torch/_ops.py",
    "torch/utils/_python_dispatch.py",
)

# Files of SHARED functions, in any folder. `backward` is not SHARED: autograd calls it.
_SHARED_FILES: Final = ("megatron/mpu/mappings.py", "megatron/core/tensor_parallel/mappings.py")

_PROGRAM: Final = purposes.number(Purpose.PROGRAM)
_MARKED_LIBRARIES: Final = ("torch/", "deepspeed/", "megatron/", "mpi4py/")

# Limits memory in programs that create code at run time (exec, torch.fx).
_MAX_CODES: Final = 50_000


class CallSites:
    """Rows of the sites table of one recorder."""

    def __init__(self, tables: TableLines) -> None:
        self._tables = tables
        # By id: hashing a code object reads all of it. Objects are kept so that ids are not reused.
        self._kinds: dict[int, tuple[CodeType, int]] = {}
        self._sites: dict[tuple[int, ...], int] = {}
        self.cleared: list[Callable[[], object]] = []
        """Listeners, called when code objects are released: their addresses may then be reused."""

    def find(self, depth: int, *, deep: bool, reducer: int = 0, in_backward: bool = False) -> tuple[int, int]:
        """Find the call site of the call `depth` frames up.

        Args:
            depth: Number of frames of the hook itself to skip.
            deep: Continue above the call site, to the first frame that calls a module or steps an
                optimizer.
            reducer: Purpose of the call if C++ code makes it within autograd.
            in_backward: Whether autograd runs in this thread.

        Returns:
            The site's row (0: the thread has no Python frame) and the properties of all frames that were walked, as
            bits.
        """
        try:
            innermost: FrameType | None = sys._getframe(depth + 1)
        except ValueError:
            return 0, 0
        kinds = self._kinds
        frame, frame_flags, kind, first = innermost, 0, 0, DISPATCH
        while frame is not None:
            code = frame.f_code
            known = kinds.get(id(code))
            kind = known[1] if known is not None else self.classify(code)
            frame_flags |= kind
            if first & DISPATCH:
                first = kind
            if not kind & WRAPPER:
                break
            frame = frame.f_back
        site_frame, caller = frame or innermost, frame.f_back if frame is not None and kind & SHARED else None
        while caller is not None and (kind := self.classify(caller.f_code)) & (WRAPPER | SHARED):
            frame_flags |= kind
            caller = caller.f_back
        purpose, up_to_site = purposes.current(), frame_flags
        if deep or not (purpose or in_backward):
            last = _OUTERMOST if deep else _OUTERMOST | BACKWARD | _FUNCTION
            while frame is not None and not frame_flags & last:
                code = frame.f_code
                known = kinds.get(id(code))
                frame_flags |= known[1] if known is not None else self.classify(code)
                frame = frame.f_back
        if not purpose and (in_backward or frame_flags & _FUNCTION):
            purpose = self._purpose_in_function(innermost, in_backward=in_backward)
        if not purpose:
            purpose = purposes.OBJECTS if up_to_site & OBJECT else reducer if first & BACKWARD else 0
        return self.number(site_frame, caller, purpose), frame_flags & ~_FUNCTION

    def _purpose_in_function(self, frame: FrameType | None, *, in_backward: bool) -> int:
        """Return the purpose of a call that nothing marks, given by the functions that run; 0: they have none.

        It is the one of the outermost function that has one (a `backward` may call the `forward` of its function), of
        those within the module that is being called. In a backward pass, one further out may repeat a forward pass.
        """
        purpose, in_module = 0, False
        while frame is not None and (in_backward or not in_module):
            kind = self.classify(frame.f_code)
            if (of_code := kind >> PURPOSE_SHIFT) == purposes.RECOMPUTED:
                return of_code if purpose in (0, purposes.ACTIVATIONS) else purpose
            purpose = of_code if of_code and not in_module else purpose
            in_module = in_module or kind & _OUTERMOST != 0
            frame = None if kind & BACKWARD else frame.f_back
        return purpose

    def in_training(self) -> bool:
        """Return whether the outermost module that is being called is in training mode."""
        frame: FrameType | None = sys._getframe()
        calls = []
        while frame is not None:
            if self.classify(frame.f_code) & FORWARD:
                calls.append(frame)
            frame = frame.f_back
        return in_training(call.f_locals.get("self") for call in reversed(calls))

    def find_backward_site(self, purpose: int) -> int:
        """Return the call site of a call on an autograd thread, which has no Python frame.

        It is the line of the thread that waits for autograd.
        """
        own = threading.get_ident()
        for thread, frame in sys._current_frames().items():
            site, frame_flags = (0, 0) if thread == own else self._site_above(frame, purpose)
            if frame_flags & BACKWARD:
                return site
        return 0

    def _site_above(self, frame: FrameType | None, purpose: int) -> tuple[int, int]:
        frame_flags = 0
        while frame is not None:
            kind = self.classify(frame.f_code)
            frame_flags |= kind
            if not kind & WRAPPER:
                break
            frame = frame.f_back
        return self.number(frame, None, purpose) if frame_flags & BACKWARD else 0, frame_flags

    def classify(self, code: CodeType) -> int:
        """Return the properties of frames of this code, as bits, and above them the purpose of its calls."""
        known = self._kinds.get(id(code))
        if known is None:
            if len(self._kinds) >= _MAX_CODES:
                self._sites.clear()  # first: its keys are valid only while `_kinds` keeps the code objects
                self._kinds.clear()
                for listener in self.cleared:
                    listener()
            self._tables.lookups += 1
            known = self._kinds[id(code)] = code, _classify(code) | purposes.of_code(code) << PURPOSE_SHIFT
        return known[1]

    def number(self, frame: FrameType | None, caller: FrameType | None = None, purpose: int = 0) -> int:
        """Return the row of a frame's line, with its caller's line if given, and a purpose; 0 without a frame."""
        if frame is None:
            return 0
        key: tuple[int, ...] = id(frame.f_code), frame.f_lasti, purpose
        if caller is not None:
            key = *key, id(caller.f_code), caller.f_lasti
        number = self._sites.get(key)
        if number is None:
            row = self._line(frame)
            values = *row.values(), purpose
            if caller is not None:
                row["caller"] = self._line(caller)
                values += tuple(row["caller"].values())
            path = _below_packages(row["file"].replace("\\", "/"))
            if purpose and (path or purpose != purposes.BARRIER):
                row["purpose"] = purposes.facts(purpose)
            elif not path.startswith(_MARKED_LIBRARIES):  # what these do not mark is not known
                row["purpose"] = purposes.facts(_PROGRAM)
            # Several instructions of one line are one call site.
            number = self._sites[key] = self._tables.row_id("sites", values, lambda: row)
        return number

    def _line(self, frame: FrameType) -> dict[str, Any]:
        code = frame.f_code
        self.classify(code)  # keeps the code object, so that its id stays valid
        function = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
        return {"file": code.co_filename, "line": frame.f_lineno, "function": function}


def in_training(modules: Iterable[object]) -> bool:
    """Return whether the outermost module that is being called is in training mode.

    This distinguishes training from evaluation where gradients are off: the forwards of autograd functions and of FSDP
    run under `no_grad`. For a wrapper, it is the mode of the wrapped model, because `eval()` of DeepSpeed's engine does
    not change the engine's own flag.

    Args:
        modules: What is being called, the outermost first. One is read in general: locals of frames are copied.
    """
    for module in modules:
        # The parts of a compiled program are modules, too, and always in training mode.
        if not type(module).__module__.startswith("torch.fx"):
            # Not `module.module`: torch looks a missing attribute up slowly.
            wrapped = getattr(module, "_modules", {}).get("module", module)
            return getattr(wrapped, "training", False) is True
    return False


def is_autograd_function(code: CodeType) -> bool:
    """Return whether code is the forward or backward pass of an autograd function; its first argument is then `ctx`."""
    return code.co_name in ("forward", "backward") and code.co_varnames[:1] == ("ctx",)


def _classify(code: CodeType) -> int:
    return _of_library(code) | (CONTEXT if is_autograd_function(code) else 0)


def _of_library(code: CodeType) -> int:
    file = code.co_filename.replace("\\", "/")
    if file.endswith(_SHARED_FILES) and code.co_name != "backward":
        return SHARED
    path = _below_packages(file)
    if code.co_name in _DISPATCH_FUNCTIONS or path.startswith(_DISPATCH_FILES):
        return WRAPPER | DISPATCH
    if not is_wrapper(path, code.co_name):
        return 0
    return WRAPPER | _PROPERTIES.get((path, code.co_name), 0)


_STANDARD: Final = os.path.dirname(os.__file__).replace("\\", "/") + "/"
_OWN: Final = {  # path in a checkout -> path in the package
    os.path.dirname(__file__).replace("\\", "/") + "/": "commtrace/hooks/",
    **{
        os.path.join(os.path.dirname(commtrace.__file__), name).replace("\\", "/"): f"commtrace/{name}"
        for name in ("current_step.py", "dryrun/", "patching.py")
    },
}


def _below_packages(path: str) -> str:
    """Return a path relative to the packages' root, or to the folder of its library; "" for the program's own code."""
    if path.startswith("<eval_with_key>"):
        return path  # written by torch.fx
    if "/torchinductor_" in path:
        return "torch/_inductor/"  # written by torch.compile, into its own folder
    for folder, below in _OWN.items():
        if path.startswith(folder):
            return below + path[len(folder) :]
    for name in ("torch", "deepspeed"):  # installed, or run from a source tree
        package = os.path.dirname(getattr(sys.modules.get(name), "__file__", None) or "")
        if package and path.startswith(package + "/"):
            return f"{name}/" + path[len(package) + 1 :]
    if (in_packages := path_below_packages(path)) is not None:
        return in_packages
    return path[len(_STANDARD) :] if path.startswith(_STANDARD) else ""
