"""Files and frames of libraries: what belongs to the program, and which frames only pass a communication call on.

Hooks classify the frames of the program by these rules, importers those that another tool has recorded, and reports
the files that a log names, which may be those of another machine.
"""

from __future__ import annotations

import os
import re

import commtrace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_BELOW_PACKAGES: Final = re.compile(r"(?:.*/)?(?:site|dist)-packages/(.*)", re.DOTALL)
_OF_PYTHON: Final = re.compile(r"/lib(?:64)?/python3[^/]*/")

_OF_COMMTRACE: Final = tuple(
    prefix + os.sep
    for folder in (os.path.dirname(commtrace.__file__), os.path.join(os.path.dirname(commtrace.__file__), "hooks"))
    for prefix in dict.fromkeys((folder, os.path.realpath(folder)))
)

# Path prefixes of wrappers, relative to the packages' root.
_WRAPPERS: Final = (
    "<eval_with_key>",
    "accelerate/utils/operations.py",
    "contextlib.py",
    "deepspeed/comm/",
    "deepspeed/runtime/compiler.py",
    "deepspeed/runtime/pipe/p2p.py",
    "deepspeed/utils/comms_logging.py",
    "deepspeed/utils/nvtx.py",
    "functools.py",
    "lightning/fabric/utilities/distributed.py",
    "lightning_fabric/utilities/distributed.py",
    "lightning_utilities/core/apply_func.py",
    "megatron/core/pipeline_parallel/p2p_communication.py",
    "mpi4py/util/",
    "torch/_dynamo/",
    "torch/_functorch/",
    "torch/_higher_order_ops/",
    "torch/_inductor/",
    "torch/_library/",
    "torch/_tensor.py",
    "torch/autograd/",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/nn/",
    "torch/distributed/tensor/",
    "torch/fx/",
    "torch/library.py",
    "torch/nn/functional.py",
    "torch/nn/modules/",
    "torch/nn/utils/clip_grad.py",
    "torch/optim/optimizer.py",
    "torch/overrides.py",
    "torch/utils/_contextlib.py",
    "torch/utils/_device.py",
    "torch/utils/checkpoint.py",
    "typing_extensions.py",
)

# Wrappers in other files: (file, function).
_WRAPPER_FUNCTIONS: Final = frozenset(
    {
        ("deepspeed/runtime/comm/coalesced_collectives.py", "_torch_reduce_scatter_fn"),
        ("deepspeed/runtime/zero/partition_parameters.py", "_dist_allgather_fn"),
        ("torch/distributed/pipelining/schedules.py", "_batch_p2p"),
        ("torch/distributed/pipelining/schedules.py", "_sorted_batch_p2p"),
        ("torch/distributed/pipelining/schedules.py", "<listcomp>"),  # in _batch_p2p
    }
)

# Methods in further files that pass calls on.
_PASSING_FILES: Final = (
    "accelerate/accelerator.py",
    "accelerate/state.py",
    "accelerate/utils/other.py",
    "lightning/fabric/fabric.py",
    "lightning/fabric/strategies/",
    "lightning/pytorch/strategies/",
    "lightning_fabric/fabric.py",
    "lightning_fabric/strategies/",
    "pytorch_lightning/strategies/",
    "transformers/trainer_pt_utils.py",
)
_PASSING_FUNCTIONS: Final = frozenset(
    {
        *("all_gather", "all_reduce", "barrier", "broadcast", "reduce", "reduce_boolean_decision"),
        *("gather", "gather_for_metrics", "pad_across_processes", "wait_for_everyone"),
        *("distributed_broadcast_scalars", "distributed_concat", "nested_gather"),
        "<genexpr>",  # in these
    }
)


def is_wrapper(path: str, function: str) -> bool:
    """Return whether a frame only passes a call on, given its path below the packages' root and its function."""
    passes_on = function in _PASSING_FUNCTIONS and path.startswith(_PASSING_FILES)
    return passes_on or path.startswith(_WRAPPERS) or (path, function) in _WRAPPER_FUNCTIONS


def path_below_packages(path: str) -> str | None:
    """Return the part of a path below the folder of installed packages; None if it is not below one."""
    match = _BELOW_PACKAGES.match(path)
    return match and match[1]


def is_library(path: str) -> bool:
    """Return whether a file belongs to an installed package or to Python, or is no file, as `<frozen os>`."""
    return path.startswith("<") or path_below_packages(path) is not None or _OF_PYTHON.search(path) is not None


def is_of_commtrace(path: str) -> bool:
    """Return whether a file of this process belongs to this package: the program's calls pass through its wrappers."""
    return path.startswith(_OF_COMMTRACE)
