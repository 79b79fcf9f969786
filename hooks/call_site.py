"""Which line of the program made a call, and whether it stands within a module's forward.

The line is the innermost one that is not a mere wrapper: DeepSpeed's reducer rather than `deepspeed.comm.all_reduce`, the
user's `loss.backward()` rather than autograd's. Frames are classified once by code object, so a walk costs little.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Final

from commtrace.tables import Tables

_WRAPPER, _OBJECT, _MODULE_CALL = 1, 2, 4

# Wrappers, by path below the packages' root. What starts with one of these only passes a call on.
_WRAPPERS: Final = (
    "commtrace/",
    "contextlib.py",
    "functools.py",
    "deepspeed/comm/",
    "deepspeed/runtime/compiler.py",
    "deepspeed/utils/comms_logging.py",
    "deepspeed/utils/nvtx.py",
    "torch/_compile.py",
    "torch/_dynamo/",
    "torch/_higher_order_ops/",
    "torch/_library/",
    "torch/_ops.py",
    "torch/_tensor.py",
    "torch/autograd/",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/distributed_c10d.py",
    "torch/library.py",
    "torch/nn/modules/module.py",
    "torch/overrides.py",
    "torch/utils/_contextlib.py",
    "torch/utils/_python_dispatch.py",
    "typing_extensions.py",
)

# Functions of torch.distributed that send pickled objects as tensors.
_OBJECT_FUNCTIONS: Final = frozenset(
    {
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    }
)


class CallSites:
    """Numbers of call sites, in the tables of one recorder."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        # By id, because hashing a code object reads all of it; the object is kept so that its id stays its own.
        self._kinds: dict[int, tuple[CodeType, int]] = {}
        self._sites: dict[tuple[int, int], int] = {}

    def find(self, depth: int, *, in_forward: bool) -> tuple[int, bool, bool]:
        """(site, carries objects, within a module's forward) of the call `depth` frames up.

        The last is looked for only if `in_forward` asks for it, because that walks the whole stack. Site 0: no Python
        frame at all.
        """
        try:
            innermost: FrameType | None = sys._getframe(depth + 1)
        except ValueError:
            return 0, False, False
        frame, seen = innermost, 0
        while frame is not None:
            kind = self._kind(frame.f_code)
            seen |= kind
            if not kind & _WRAPPER:
                break
            frame = frame.f_back
        named = frame
        while in_forward and frame is not None and not seen & _MODULE_CALL:
            seen |= self._kind(frame.f_code)
            frame = frame.f_back
        site = self._number(named or innermost)
        return site, bool(seen & _OBJECT), bool(seen & _MODULE_CALL)

    def _kind(self, code: CodeType) -> int:
        known = self._kinds.get(id(code))
        if known is None:
            known = self._kinds[id(code)] = code, _classify(code)
        return known[1]

    def _number(self, frame: FrameType | None) -> int:
        if frame is None:
            return 0
        key = id(frame.f_code), frame.f_lasti
        number = self._sites.get(key)
        if number is None:
            code, line = frame.f_code, frame.f_lineno
            self._kind(code)  # keeps the code object, and so its id
            row = {
                "file": code.co_filename,
                "line": line,
                "function": code.co_qualname if sys.version_info >= (3, 11) else code.co_name,
            }
            # Several instructions of one line are one site.
            number = self._sites[key] = self._tables.number(
                "sites", (code.co_filename, line, code.co_name), lambda: row
            )
        return number


def _classify(code: CodeType) -> int:
    path = code.co_filename.replace("\\", "/")
    kind = _WRAPPER if _below_packages(path).startswith(_WRAPPERS) else 0
    if kind and code.co_name in _OBJECT_FUNCTIONS:
        kind |= _OBJECT
    if kind and code.co_name == "_call_impl" and path.endswith("torch/nn/modules/module.py"):
        kind |= _MODULE_CALL
    return kind


_ROOTS: Final = ("/site-packages/", "/dist-packages/")


def _below_packages(path: str) -> str:
    """The part of a path below the packages' root, or below the folder of the library that it belongs to."""
    for root in _ROOTS:
        if root in path:
            return path.rpartition(root)[2]
    for name in ("torch", "deepspeed"):
        package = getattr(sys.modules.get(name), "__file__", None)
        if package and path.startswith(package.removesuffix("__init__.py")):
            return f"{name}/" + path[len(package.removesuffix("__init__.py")) :]
    if path.startswith(_OWN):
        return "commtrace/hooks/"
    return path.rpartition("/")[2] if "/lib/python" in path else ""


_OWN: Final = __file__.rpartition("/")[0] + "/"
