"""The meaning of each `c10d::` operator's arguments: payload, own share, peer, tag.

Arguments are found by their names in the operator's schema, so that new versions of torch may add
some. Trailing arguments that equal their defaults are not passed to a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from commtrace.operations import MESSAGES

Tensor = torch.Tensor


# (payload in bytes, bytes of it that are this rank's own share, whether shares differ in size); a plain tuple, because
# one is made for every call.
Size = tuple[int, int, bool]


class Form(NamedTuple):
    """Method that computes an operator's payload. The native recorder implements each kind as well (plan.h)."""

    kind: str
    measure: Callable[..., Size]  # (*positions of `about`, arguments, group size, rank in the group)
    about: tuple[str, ...]  # names of the arguments that it depends on


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; of a sparse tensor, of its indices and values."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return int(tensor._indices().nbytes + tensor._values().nbytes)
    return tensor.numel() * tensor.element_size()


def _total(tensors: Sequence[Tensor]) -> int:
    return nbytes(tensors[0]) if len(tensors) == 1 else sum(map(nbytes, tensors))


def _is_uneven(lists: Sequence[Sequence[Tensor]]) -> bool:
    return any(len({part.numel() for part in parts}) > 1 for parts in lists)


def _rooted(i: int, args: Sequence[Any], n: int, rank: int) -> Size:
    own = sum(map(nbytes, _flat(args[i])))
    return n * own, own, False  # all shares of gather and scatter must be equal


def _all_to_all(i: int, j: int, args: Sequence[Any], n: int, rank: int) -> Size:
    tensors = args[i]
    own = nbytes(tensors[rank]) if rank < len(tensors) else 0
    return _total(tensors), own, _is_uneven((tensors, args[j]))


def _all_to_all_single(i: int, inputs: int, outputs: int, args: Sequence[Any], n: int, rank: int) -> Size:
    tensor, sent, received = args[i], args[inputs], args[outputs]
    payload = nbytes(tensor)
    uneven = len(set(sent)) > 1 or len(set(received)) > 1
    if not sent:
        return payload, payload // n, uneven
    rows = tensor.shape[0]  # split sizes count rows, not elements
    return payload, payload // rows * sent[rank] if rows else 0, uneven


# A list of tensors, without a share of this rank.
_BUFFERS: Final = Form("buffers", lambda i, args, n, rank: (_total(args[i]), 0, False), ("tensors",))
_NOTHING: Final = Form("nothing", lambda args, n, rank: (0, 0, False), ())


def _pair(payload: str, share: str) -> Form:
    """Return the form of an operator with one tensor as the payload and another as this rank's share."""
    return Form("pair", lambda i, j, args, n, rank: (nbytes(args[i]), nbytes(args[j]), False), (payload, share))


def _pairs(payload: str, share: str) -> Form:
    """Return the form of an operator with tensor lists as the payload and as this rank's share."""
    return Form("pair", lambda i, j, args, n, rank: (_total(args[i]), _total(args[j]), False), (payload, share))


def _lists(payload: str, share: str) -> Form:
    """Return the form of an operator with lists of tensors, one per rank, as the payload."""

    def measure(i: int, j: int, args: Sequence[Any], n: int, rank: int) -> Size:
        return sum(map(_total, args[i])), _total(args[j]), _is_uneven(args[i])

    return Form("lists", measure, (payload, share))


def _unknown(name: str) -> Form:
    """Return a form that raises LookupError, so that calls of the operator are counted as not recorded."""

    def measure(*_: object) -> Size:
        raise LookupError(f"this version of commtrace does not support c10d::{name}; update commtrace")

    return Form("unknown", measure, ())


# Operator -> (operation, form).
_OPERATIONS: Final[dict[str, tuple[str, Form]]] = {
    "allreduce_": ("all_reduce", _BUFFERS),
    "allreduce_coalesced_": ("all_reduce", _BUFFERS),
    "broadcast_": ("broadcast", _BUFFERS),
    "reduce_": ("reduce", _BUFFERS),
    "allgather_": ("all_gather", _lists("output_tensors", "input_tensors")),
    "_allgather_base_": ("all_gather", _pair("output_tensor", "input_tensor")),
    "allgather_coalesced_": ("all_gather", _lists("output_lists", "input_list")),
    "allgather_into_tensor_coalesced_": ("all_gather", _pairs("outputs", "inputs")),
    "reduce_scatter_": ("reduce_scatter", _lists("input_tensors", "output_tensors")),
    "_reduce_scatter_base_": ("reduce_scatter", _pair("input_tensor", "output_tensor")),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _pairs("inputs", "outputs")),
    "alltoall_": ("all_to_all", Form("all_to_all", _all_to_all, ("input_tensors", "output_tensors"))),
    "alltoall_base_": (
        "all_to_all",
        Form("all_to_all_single", _all_to_all_single, ("input", "input_split_sizes", "output_split_sizes")),
    ),
    "gather_": ("gather", Form("rooted", _rooted, ("input_tensors",))),
    "gather_into_tensor_": ("gather", Form("rooted", _rooted, ("input_tensor",))),  # torch 2.15
    "scatter_": ("scatter", Form("rooted", _rooted, ("output_tensors",))),
    "send": ("send", _BUFFERS),
    "recv_": ("recv", _BUFFERS),
    "recv_any_source_": ("recv", _BUFFERS),
    "barrier": ("barrier", _NOTHING),
    "monitored_barrier_": ("barrier", _NOTHING),
}

# Operators that do not communicate.
IGNORED: Final = frozenset({"check_for_nan"})

# The operators of _c10d_functional that wait; the second exists since torch 2.15.
WAITS: Final = frozenset({"wait_tensor", "wait_tensors"})

# Output arguments. A wait for a tensor is matched to its call through them.
_OUTPUTS: Final = ("output_tensors", "output_tensor", "outputs", "output_lists", "output", "tensors")

# Arguments that have tensors on every rank: they determine dtype and device.
_SAMPLES: Final = ("input_tensors", "input_tensor", "inputs", "input_list", "input", "tensors", "tensor")
_SAMPLE_OF: Final = {
    "reduce_scatter_": "output_tensors",
    "scatter_": "output_tensors",
}  # their inputs are lists of lists


@dataclass(frozen=True)
class Operator:
    """An operator of this version of torch. `*_at` are positions of arguments; None: there is no such argument."""

    variant: str
    op: str
    overload: Any
    measure: Callable[[Sequence[Any], int, int], Size]  # (arguments, group size, rank in the group)
    group_at: int | None = None
    async_at: int | None = None
    reduce_op_at: int | None = None
    peer_at: int | None = None
    tag_at: int | None = None
    output_at: int = 0
    sample_at: int = 0
    form: str = ""  # the kind of its Form
    about: tuple[int, ...] = ()  # positions of the arguments that the form depends on
    reduce_op: str | None = None  # the reduction of an operator that has only one; None: it is an argument
    coalesced: bool = False  # several tensors in one call, which the backend may merge
    blocking: bool = False  # the call returns when the operation is complete, without a Work

    def group(self, args: Sequence[Any]) -> Any:
        """Return the ProcessGroup of a call: the default group for an operator that takes none."""
        return dist.group.WORLD if self.group_at is None else dist.ProcessGroup.unbox(args[self.group_at])

    def sample(self, args: Sequence[Any]) -> Tensor | None:
        """Return a tensor with the call's dtype and device; None for a call with an empty list."""
        value = args[self.sample_at]
        if type(value) is list:
            return value[0] if value else None
        return value  # type: ignore[no-any-return]

    @property
    def point_to_point(self) -> bool:
        """Whether the operator sends or receives a point-to-point message."""
        return self.op in MESSAGES

    def outputs(self, args: Sequence[Any]) -> list[Tensor]:
        """Return the tensors that a call fills."""
        return list(_flat(args[self.output_at]))


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for item in value:
            yield from _flat(item)


def operator_names(namespace: str) -> list[str]:
    """Return the names of a namespace's operators, without overloads."""
    qualified = (name.partition(".")[0].split("::") for name in torch._C._dispatch_get_all_op_names())
    return sorted({name for space, name in qualified if space == namespace})


def known_operators() -> tuple[list[Operator], list[str]]:
    """Return the operators to hook, and the names of those that commtrace does not support.

    Unsupported operators with a process group are hooked, too: their calls are counted as not
    recorded.
    """
    described = {name: _describe(name) for name in operator_names("c10d") if name not in IGNORED}
    operators = [operator for operator in described.values() if operator is not None]
    known = {operator.variant for operator in operators if operator.form != "unknown"}
    return operators, [f"c10d::{name}" for name in described if name not in known]


def shared_memory_all_reduce() -> Operator | None:
    """Return DeepSpeed's all_reduce through shared memory (`deepspeed::inference_all_reduce_`), if it is loaded."""
    overload = getattr(getattr(torch.ops.deepspeed, "inference_all_reduce_", None), "default", None)
    if overload is None:
        return None
    return Operator(
        variant="inference_all_reduce_",
        op="all_reduce",
        overload=overload,
        measure=lambda args, n, rank: (nbytes(args[0]), 0, False),
        reduce_op="SUM",
        blocking=True,
    )


def _describe(name: str) -> Operator | None:
    op, form = _OPERATIONS.get(name, ("unknown", _unknown(name)))
    overload = getattr(torch.ops.c10d, name).default
    at = {argument.name: i for i, argument in enumerate(overload._schema.arguments)}
    if not at.keys() >= {*form.about}:  # this torch has other argument names
        op, form = "unknown", _unknown(name)
    about = tuple(at[argument] for argument in form.about)
    sample = _SAMPLE_OF.get(name) or next((argument for argument in _SAMPLES if argument in at), None)
    if sample not in at or "process_group" not in at:
        return None
    return Operator(
        variant=name,
        op=op,
        overload=overload,
        measure=functools.partial(form.measure, *about),
        form=form.kind,
        about=about,
        group_at=at["process_group"],
        async_at=at.get("async_op", at.get("asyncOp")),  # the latter before torch 2.8
        reduce_op_at=at.get("reduce_op"),
        peer_at=next((at[n] for n in ("root_rank", "src", "dst") if n in at), None),
        tag_at=at.get("tag"),
        output_at=next((at[n] for n in _OUTPUTS if n in at), 0),
        sample_at=at[sample],
        coalesced=name.endswith("_coalesced_"),
        blocking=name == "monitored_barrier_",
    )
