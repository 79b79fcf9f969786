"""Which line of the program made a call, and what the frames above it tell about the call.

The line is the innermost one that is not a mere wrapper: DeepSpeed's reducer rather than `deepspeed.comm.all_reduce`,
the user's `loss.backward()` rather than autograd's. Frames are classified once by code object, so a walk costs little.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Final

import commtrace
from commtrace.recording.table_writer import TableWriter

# What a frame tells, as bits.
WRAPPER: Final = 1  # only passes a call on
OBJECT: Final = 2  # sends pickled objects as tensors
FORWARD: Final = 4  # calls a module
OPTIMIZER: Final = 8  # steps an optimizer
HANDLE: Final = 16  # a message whose caller gets a handle ...
BLOCKING: Final = 32  # ... but for a caller that waits for it at once
BACKWARD: Final = 64  # runs autograd

# Wrappers, by path below the packages' root. What starts with one of these only passes a call on.
_WRAPPERS: Final = (
    "<eval_with_key>",
    "commtrace/dryrun/",
    "commtrace/hooks/",
    "contextlib.py",
    "deepspeed/comm/",
    "deepspeed/runtime/compiler.py",
    "deepspeed/runtime/pipe/p2p.py",
    "deepspeed/utils/comms_logging.py",
    "deepspeed/utils/nvtx.py",
    "functools.py",
    "mpi4py/util/",
    "torch/_compile.py",
    "torch/_dynamo/",
    "torch/_functorch/",
    "torch/_higher_order_ops/",
    "torch/_inductor/",
    "torch/_library/",
    "torch/_ops.py",
    "torch/_tensor.py",
    "torch/autograd/",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/nn/",
    "torch/distributed/tensor/",
    "torch/fx/",
    "torch/library.py",
    "torch/nn/modules/module.py",
    "torch/optim/optimizer.py",
    "torch/overrides.py",
    "torch/utils/_contextlib.py",
    "torch/utils/_device.py",
    "torch/utils/_python_dispatch.py",
    "typing_extensions.py",
)

# Functions that only pass a call on, in files that do more than that.
_PASSING_ON: Final = frozenset(
    {
        ("deepspeed/runtime/comm/coalesced_collectives.py", "_torch_reduce_scatter_fn"),
        ("deepspeed/runtime/zero/partition_parameters.py", "_dist_allgather_fn"),
    }
)

# Functions among the wrappers that tell something: (file, function) -> bits.
_C10D: Final = "torch/distributed/distributed_c10d.py"
_TELLING: Final = {
    (_C10D, "all_gather_object"): OBJECT,
    (_C10D, "broadcast_object_list"): OBJECT,
    (_C10D, "gather_object"): OBJECT,
    (_C10D, "recv_object_list"): OBJECT,
    (_C10D, "scatter_object_list"): OBJECT,
    (_C10D, "send_object_list"): OBJECT,
    (_C10D, "isend"): HANDLE,
    (_C10D, "irecv"): HANDLE,
    (_C10D, "send"): BLOCKING,
    (_C10D, "recv"): BLOCKING,
    ("torch/nn/modules/module.py", "_call_impl"): FORWARD,
    ("torch/optim/optimizer.py", "wrapper"): OPTIMIZER,
    ("torch/autograd/graph.py", "_engine_run_backward"): BACKWARD,
}

# A program that makes code as it runs (exec, torch.fx) must not make these tables grow for ever.
_MOST_CODES: Final = 50_000


class CallSites:
    """Numbers of call sites, in the tables of one recorder."""

    def __init__(self, tables: TableWriter) -> None:
        self._tables = tables
        # By id, because hashing a code object reads all of it; the object is kept so that its id stays its own.
        self._kinds: dict[int, tuple[CodeType, int]] = {}
        self._sites: dict[tuple[int, int], int] = {}
        self.cleared: list[Callable[[], object]] = []
        """Called when code is kept alive no more."""

    def find(self, depth: int, *, deep: bool) -> tuple[int, int]:
        """(site, what the frames tell) of the call `depth` frames up. Site 0: no Python frame at all.

        With `deep` the walk goes on above the site's frame, to the first one that calls a module or steps an optimizer.
        """
        try:
            innermost: FrameType | None = sys._getframe(depth + 1)
        except ValueError:
            return 0, 0
        kinds = self._kinds
        frame, seen = innermost, 0
        while frame is not None:
            code = frame.f_code
            known = kinds.get(id(code))
            kind = known[1] if known is not None else self.classify(code)
            seen |= kind
            if not kind & WRAPPER:
                break
            frame = frame.f_back
        named = frame or innermost
        while deep and frame is not None and not seen & (FORWARD | OPTIMIZER):
            code = frame.f_code
            known = kinds.get(id(code))
            seen |= known[1] if known is not None else self.classify(code)
            frame = frame.f_back
        return self.number(named), seen

    def in_training(self) -> bool:
        """Whether the outermost module that is being called is in training mode.

        Of a call under `no_grad`: such are those within an autograd function's forward or FSDP's, and evaluation.
        """
        frame: FrameType | None = sys._getframe()
        module = None
        while frame is not None:
            if self.classify(frame.f_code) & FORWARD:
                called = frame.f_locals.get("self")
                # A piece of a compiled program is a module, too, and always in training mode.
                module = module if type(called).__module__.startswith("torch.fx") else called
            frame = frame.f_back
        return getattr(module, "training", False) is True

    def of_backward(self) -> int:
        """Site of a call on a thread of autograd's own, without a Python frame: where a thread waits for autograd."""
        own = threading.get_ident()
        for thread, frame in sys._current_frames().items():
            site, seen = (0, 0) if thread == own else self._above(frame)
            if seen & BACKWARD:
                return site
        return 0

    def _above(self, frame: FrameType | None) -> tuple[int, int]:
        seen = 0
        while frame is not None:
            kind = self.classify(frame.f_code)
            seen |= kind
            if not kind & WRAPPER:
                break
            frame = frame.f_back
        return self.number(frame) if seen & BACKWARD else 0, seen

    def classify(self, code: CodeType) -> int:
        """What a frame of this code tells, as bits."""
        known = self._kinds.get(id(code))
        if known is None:
            if len(self._kinds) >= _MOST_CODES:
                self._sites.clear()  # first: its keys are only good while `_kinds` keeps the code objects
                self._kinds.clear()
                for listener in self.cleared:
                    listener()
            known = self._kinds[id(code)] = code, _classify(code)
        return known[1]

    def number(self, frame: FrameType | None) -> int:
        """The row of the line that a frame executes; 0 for no frame."""
        if frame is None:
            return 0
        code = frame.f_code
        key = id(code), frame.f_lasti
        number = self._sites.get(key)
        if number is None:
            self.classify(code)  # keeps the code object, and so its id
            function = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
            row = {"file": code.co_filename, "line": frame.f_lineno, "function": function}
            # Several instructions of one line are one site.
            number = self._sites[key] = self._tables.number("sites", tuple(row.values()), lambda: row)
        return number


def _classify(code: CodeType) -> int:
    path = _below_packages(code.co_filename.replace("\\", "/"))
    if not path.startswith(_WRAPPERS) and (path, code.co_name) not in _PASSING_ON:
        return 0
    return WRAPPER | _TELLING.get((path, code.co_name), 0)


_ROOTS: Final = ("/site-packages/", "/dist-packages/")
_STANDARD: Final = os.path.dirname(os.__file__).replace("\\", "/") + "/"
_OWN: Final = os.path.dirname(__file__).replace("\\", "/") + "/"
_SIMULATION: Final = os.path.join(os.path.dirname(commtrace.__file__), "dryrun").replace("\\", "/") + "/"


def _below_packages(path: str) -> str:
    """The part of a path below the packages' root, or below the folder of the library that it belongs to.

    "" for everybody else's code, whatever it is called.
    """
    if path.startswith("<eval_with_key>"):
        return path  # what torch.fx has written
    if "/torchinductor_" in path:
        return "torch/_inductor/"  # and torch.compile, in a folder of its own
    if path.startswith(_OWN):
        return "commtrace/hooks/" + path[len(_OWN) :]
    if path.startswith(_SIMULATION):
        return "commtrace/dryrun/" + path[len(_SIMULATION) :]
    for name in ("torch", "deepspeed"):  # installed or run from its sources
        package = os.path.dirname(getattr(sys.modules.get(name), "__file__", None) or "")
        if package and path.startswith(package + "/"):
            return f"{name}/" + path[len(package) + 1 :]
    for root in _ROOTS:
        if root in path:
            return path.rpartition(root)[2]
    return path[len(_STANDARD) :] if path.startswith(_STANDARD) else ""
