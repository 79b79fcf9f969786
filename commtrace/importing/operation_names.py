"""Names of operations, element types and communication kernels in other tools' files."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

UNKNOWN_OPERATION: Final = "unknown"

COLLECTIVE_NAMES: Final = {
    "all_reduce": "allreduce", "all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base",
}  # fmt: skip
"""Names of operations in `record_param_comms`, where they differ from those of the event table."""

_SPELLINGS: Final = {
    "all_reduce": ("allreduce",),
    "all_gather": ("allgather",),
    "reduce_scatter": ("reducescatter",),
    "all_to_all": ("alltoall", "alltoallv", "all2all"),
    "broadcast": ("broadcast", "bcast"),
    "reduce": ("reduce",),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "send": ("send", "isend"),
    "recv": ("recv", "irecv", "recvanysource"),
    "barrier": ("barrier", "monitoredbarrier"),
    **{op: (op,) for op in ("scan", "exscan", "put", "get", "accumulate")},
}
_OPERATIONS: Final = {spelling: op for op, spellings in _SPELLINGS.items() for spelling in spellings}
_PREFIX: Final = re.compile(r"^(nccl|rccl|gloo|c10d|ucc|xccl|hccl|symm_mem):+")
_DECORATION: Final = re.compile(
    r"intotensor|tensor|coalesced|base|single|oop|multimem|oneshot|twoshot|lowcontention|out$"
)


@lru_cache(1024)
def operation_of(name: str) -> str:
    """Return the operation that a library calls by this name, such as "_allgather_base"; "" if it is none."""
    plain = _PREFIX.sub("", name.lower()).replace("_", "")
    return _OPERATIONS.get(plain) or _OPERATIONS.get(_DECORATION.sub("", plain), "")


BYTE: Final = "Byte"
SCALAR_TYPES: Final = {
    "float32": ("Float", 4), "float64": ("Double", 8), "float16": ("Half", 2), "bfloat16": ("BFloat16", 2),
    "int32": ("Int", 4), "int64": ("Long", 8), "int16": ("Short", 2), "int8": ("Char", 1), "uint8": (BYTE, 1),
    "bool": ("Bool", 1), "uint16": ("UInt16", 2), "uint32": ("UInt32", 4), "uint64": ("UInt64", 8),
    "complex64": ("ComplexFloat", 8), "complex128": ("ComplexDouble", 16),
}  # fmt: skip
"""Element types: torch's names -> the names in traces (of `c10::ScalarType`), and bytes."""
_DTYPES: Final = {
    **{name: (name, width) for name, (_, width) in SCALAR_TYPES.items()},
    **{scalar.lower(): (name, width) for name, (scalar, width) in SCALAR_TYPES.items()},
    "long int": ("int64", 8), "signed char": ("int8", 1), "unsigned char": ("uint8", 1),
}  # fmt: skip


@lru_cache(256)
def element_type(name: str) -> tuple[str, int]:
    """Return torch's name of an element type and its bytes; ("", 0) if it is not known."""
    plain = name.removeprefix("c10::").removeprefix("torch.").lower()
    if plain.startswith("float8"):
        return plain, 1
    return _DTYPES.get(plain, ("", 0))


class KernelName(NamedTuple):
    """What the name of a communication kernel says: the operation ("" where it does not) and the library."""

    op: str
    library: str


# (pattern, operation or "", library). The first that matches counts. DeepEP's dispatch and combine are an all_to_all
# of tokens; its notify kernels exchange the counts for it. Custom all-reduces: vLLM's cross_device_reduce, SGLang and
# AITER, TensorRT-LLM and FlashInfer (one shot, two shots, Lamport), Meta's DDA.
_KERNELS: Final = tuple(
    (re.compile(pattern, re.IGNORECASE), op, library)
    for pattern, op, library in (
        (r"\bnccl(Dev)?Kernel_?(AllReduce)", "all_reduce", "nccl"),
        (r"\bnccl(Dev)?Kernel_?(AllGather)", "all_gather", "nccl"),
        (r"\bnccl(Dev)?Kernel_?(ReduceScatter)", "reduce_scatter", "nccl"),
        (r"\bnccl(Dev)?Kernel_?(Broadcast)", "broadcast", "nccl"),
        (r"\bnccl(Dev)?Kernel_?(Reduce)", "reduce", "nccl"),
        (r"\bnccl(Dev)?Kernel_?(AlltoAll)", "all_to_all", "nccl"),
        (r"\b(nccl|rccl|mscclpp|msccl)\w*Kernel", "", "nccl"),
        (r"\b(deep_ep|dpsk::ep)\b.*\b(dispatch|combine)\b", "all_to_all", "deep_ep"),
        (r"\b(deep_ep|dpsk::ep)\b.*\b\w*notify\w*", "all_to_all", "deep_ep"),
        (r"\b(deep_ep|dpsk::ep)\b.*\bbarrier\b", "barrier", "deep_ep"),
        (r"cross_device_reduce|allreduce_fusion|allReduceFusion|(one|two)_?shot_?all_?reduce", "all_reduce", "custom"),
        (r"\b(one|two)ShotAllReduce|lamport\w*allreduce|\bdda\w*AllReduce|quick_?all_?reduce", "all_reduce", "custom"),
        (r"\bdda\w*AllGather|(one|two)_?shot_?all_?gather", "all_gather", "custom"),
        (r"\bdda\w*ReduceScatter|(one|two)_?shot_?reduce_?scatter", "reduce_scatter", "custom"),
        (r"multimem_all_reduce", "all_reduce", "symm_mem"),
        (r"multimem_all_gather", "all_gather", "symm_mem"),
    )
)


@lru_cache(4096)
def communication_kernel(name: str) -> KernelName | None:
    """Return what the name of a kernel says about communication; None for a kernel that computes or copies."""
    for pattern, op, library in _KERNELS:
        if pattern.search(name):
            return KernelName(op, library)
    return None
