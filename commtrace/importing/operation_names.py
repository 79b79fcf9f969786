"""Names of operations, element types and communication kernels in other tools' files."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

UNKNOWN_OPERATION: Final = "unknown"

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


_DTYPES: Final = {
    "float": ("float32", 4), "float32": ("float32", 4), "double": ("float64", 8), "float64": ("float64", 8),
    "half": ("float16", 2), "float16": ("float16", 2), "bfloat16": ("bfloat16", 2),
    "int": ("int32", 4), "int32": ("int32", 4), "long": ("int64", 8), "long int": ("int64", 8), "int64": ("int64", 8),
    "short": ("int16", 2), "int16": ("int16", 2), "char": ("int8", 1), "signed char": ("int8", 1), "int8": ("int8", 1),
    "byte": ("uint8", 1), "unsigned char": ("uint8", 1), "uint8": ("uint8", 1), "bool": ("bool", 1),
    "uint16": ("uint16", 2), "uint32": ("uint32", 4), "uint64": ("uint64", 8),
    "complexfloat": ("complex64", 8), "complexdouble": ("complex128", 16),
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
