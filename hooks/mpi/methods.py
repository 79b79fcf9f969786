"""Methods of mpi4py that communicate: operation, payload, own share, peer and tag from their arguments.

mpi4py names its methods as MPI does: `Allreduce` blocks, `Iallreduce` returns a Request, `Allreduce_init` returns a
Prequest, which is started later, and `allreduce` pickles Python objects. Sizes follow docs/reference/log-format.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from mpi4py import MPI

from .buffers import Block, Blocks, simple, vector, vector_of_types
from .communicators import MpiGroup


class Size(NamedTuple):
    """Payload and this rank's own share of it in bytes, whether shares differ, and element type."""

    payload: int
    local: int = 0
    uneven: bool = False
    dtype: str | None = None


NOTHING: Final = Size(0)

Arguments = Mapping[str, Any]

# (arguments, group, rank of the root as the caller gives it) -> Size. Not called if the root is MPI.PROC_NULL.
Rule = Callable[[Arguments, MpiGroup, int], Size]


def _size_of(block: Block) -> Size:
    return Size(block.nbytes, dtype=block.dtype)


def _equal(block: Block, ranks: int, own: bool) -> Size:
    return Size(block.nbytes * ranks, block.nbytes if own else 0, False, block.dtype)


def _unequal(shares: Sequence[int], dtype: str | None, group: MpiGroup | None) -> Size:
    """Return the size of these shares; if `group` is given, one of them may be this rank's own."""
    own = len(shares) if group is None or group.remote is not None else group.rank
    return Size(sum(shares), shares[own] if own < len(shares) else 0, len(set(shares)) > 1, dtype)


def _argument(arguments: Arguments, name: str) -> Any:
    """Return a buffer, or the receive buffer if that one is MPI.IN_PLACE."""
    buffer = arguments[name]
    return arguments["recvbuf"] if buffer is MPI.IN_PLACE else buffer


def nothing(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    """Return the size of a call without data."""
    return NOTHING


def _buffer(name: str) -> Rule:
    return lambda arguments, group, root: _size_of(simple(arguments[name]))


def _reduced(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    """Return the size of a reduction, whose buffers have the same size on all ranks."""
    sent = arguments["sendbuf"]
    received = sent is None or sent is MPI.IN_PLACE or root == MPI.ROOT
    return _size_of(simple(arguments["recvbuf"] if received else sent))


def _rooted(full: str, share: str, uneven: bool = False) -> Rule:
    """Make the rule of gather and scatter: the root's buffer has all shares, any other rank's only its own.

    If shares may differ, any other rank can measure only its own, which is then the payload.
    """

    def rule(arguments: Arguments, group: MpiGroup, root: int) -> Size:
        if not group.is_root(root):
            own = simple(arguments[share])
            return Size(own.nbytes, own.nbytes, True, own.dtype) if uneven else _equal(own, group.size, own=True)
        if uneven:
            return _unequal(*vector(arguments[full], group.blocks), group)
        return _equal(simple(arguments[full], group.blocks), group.blocks, group.remote is None)

    return rule


def _shares(buffer: str, ranks: str = "blocks") -> Rule:
    """Make the rule of a buffer with equal shares; attribute `ranks` of the group is their number."""

    def rule(arguments: Arguments, group: MpiGroup, root: int) -> Size:
        count = getattr(group, ranks)
        share = simple(_argument(arguments, buffer), count or 1)
        return _equal(share, count, ranks == "blocks" and group.remote is None)

    return rule


def _vector(buffer: str, ranks: str = "blocks", measure: Callable[[Any, int], Blocks] = vector) -> Rule:
    """Make the rule of a buffer with shares that may differ."""
    return lambda arguments, group, root: _unequal(
        *measure(_argument(arguments, buffer), getattr(group, ranks)), group if ranks == "blocks" else None
    )


def _reduce_scatter_block(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    in_place = arguments["sendbuf"] is MPI.IN_PLACE
    return _equal(simple(arguments["recvbuf"], group.size if in_place else 1), group.size, group.remote is None)


def _reduce_scatter(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    sent, counts = simple(_argument(arguments, "sendbuf")), arguments.get("recvcounts")
    if counts is not None:
        shares = [int(count) for count in counts]
        entries = sum(shares)
        nbytes = [sent.nbytes // entries * count if entries else 0 for count in shares]
        return _unequal(nbytes, sent.dtype, group)
    own = simple(arguments["recvbuf"]).nbytes
    return Size(sent.nbytes, own if group.remote is None else 0, own * group.size != sent.nbytes, sent.dtype)


def _fetched(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    """Return the size of the data sent to the target or, for NO_OP, of the data it returns."""
    return _size_of(simple(arguments["result" if arguments.get("op") == MPI.NO_OP else "origin"]))


class Message(NamedTuple):
    """A message between two ranks: the names of the arguments with its buffer (None: an object), peer and tag."""

    op: str
    buffer: str | None
    peer: str
    tag: str


@dataclass(frozen=True, eq=False)
class Method:
    """One method of mpi4py that communicates."""

    owner: type
    name: str
    op: str
    parameters: tuple[str, ...]
    measure: Rule = nothing
    messages: tuple[Message, ...] = ()  # messages that the method carries; a Sendrecv has two
    root: str | None = None  # name of the argument with the root, or the target of a one-sided operation
    objects: bool = False  # whether it pickles Python objects
    returns: str = ""  # "request": returns a Request at once; "prequest": returns a Prequest, not started; "": blocks

    @cached_property
    def reduces(self) -> bool:
        """Whether it reduces with an operation."""
        return "op" in self.parameters

    @cached_property
    def message_object(self) -> bool:
        """Whether it is a method of a Message, which holds its communicator."""
        return self.owner is MPI.Message

    @cached_property
    def one_sided(self) -> bool:
        """Whether it ends with the next synchronization of the window."""
        return self.root == "target_rank" and not self.returns

    @cached_property
    def receives(self) -> bool:
        """Whether a message arrives; its status has the size and the sender."""
        return any(message.op == "recv" for message in self.messages)

    @cached_property
    def status_at(self) -> int | None:
        """Position of the argument that takes the status."""
        return self.parameters.index("status") if "status" in self.parameters else None

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given arguments by name."""
        arguments = dict(zip(self.parameters, args, strict=False))
        arguments.update(kwargs)
        return arguments


_BOTH: Final = ("sendbuf", "recvbuf")
_ROOT: Final = ("sendbuf", "recvbuf", "root")

# (class, blocking form on buffers, operation, parameters, rule)
_COLLECTIVES: Final[tuple[tuple[type, str, str, tuple[str, ...], Rule], ...]] = (
    (MPI.Comm, "Barrier", "barrier", (), nothing),
    (MPI.Comm, "Bcast", "broadcast", ("buf", "root"), _buffer("buf")),
    (MPI.Comm, "Gather", "gather", _ROOT, _rooted("recvbuf", "sendbuf")),
    (MPI.Comm, "Gatherv", "gather", _ROOT, _rooted("recvbuf", "sendbuf", uneven=True)),
    (MPI.Comm, "Scatter", "scatter", _ROOT, _rooted("sendbuf", "recvbuf")),
    (MPI.Comm, "Scatterv", "scatter", _ROOT, _rooted("sendbuf", "recvbuf", uneven=True)),
    (MPI.Comm, "Allgather", "all_gather", _BOTH, _shares("recvbuf")),
    (MPI.Comm, "Allgatherv", "all_gather", _BOTH, _vector("recvbuf")),
    (MPI.Comm, "Alltoall", "all_to_all", _BOTH, _shares("sendbuf")),
    (MPI.Comm, "Alltoallv", "all_to_all", _BOTH, _vector("sendbuf")),
    (MPI.Comm, "Alltoallw", "all_to_all", _BOTH, _vector("sendbuf", measure=vector_of_types)),
    (MPI.Comm, "Reduce", "reduce", (*_BOTH, "op", "root"), _reduced),
    (MPI.Comm, "Allreduce", "all_reduce", (*_BOTH, "op"), _reduced),
    (MPI.Comm, "Reduce_scatter_block", "reduce_scatter", (*_BOTH, "op"), _reduce_scatter_block),
    (MPI.Comm, "Reduce_scatter", "reduce_scatter", (*_BOTH, "recvcounts", "op"), _reduce_scatter),
    (MPI.Intracomm, "Scan", "scan", (*_BOTH, "op"), _reduced),
    (MPI.Intracomm, "Exscan", "exscan", (*_BOTH, "op"), _reduced),
    (MPI.Topocomm, "Neighbor_allgather", "all_gather", _BOTH, _shares("recvbuf", "sources")),
    (MPI.Topocomm, "Neighbor_allgatherv", "all_gather", _BOTH, _vector("recvbuf", "sources")),
    (MPI.Topocomm, "Neighbor_alltoall", "all_to_all", _BOTH, _shares("sendbuf", "destinations")),
    (MPI.Topocomm, "Neighbor_alltoallv", "all_to_all", _BOTH, _vector("sendbuf", "destinations")),
    (MPI.Topocomm, "Neighbor_alltoallw", "all_to_all", _BOTH, _vector("sendbuf", "destinations", vector_of_types)),
)


def _collectives() -> Iterator[Method]:
    for owner, name, op, parameters, rule in _COLLECTIVES:
        root = "root" if "root" in parameters else None
        yield Method(owner, name, op, parameters, rule, root=root)
        yield Method(owner, f"I{name.lower()}", op, parameters, rule, root=root, returns="request")
        yield Method(owner, f"{name}_init", op, (*parameters, "info"), rule, root=root, returns="prequest")
        if not name.endswith(("v", "w")) and not name.startswith("Reduce_scatter"):
            first = "obj" if op == "broadcast" else "sendobj"
            others = (parameter for parameter in parameters if parameter in ("op", "root"))
            pickled = (first, *others) if parameters else ()
            yield Method(owner, name.lower(), op, pickled, root=root, objects=op != "barrier")


_SEND: Final = Message("send", "buf", "dest", "tag")
_RECV: Final = Message("recv", "buf", "source", "tag")
_SEND_OBJECT, _RECV_OBJECT = _SEND._replace(buffer=None), _RECV._replace(buffer=None)


def _messages() -> Iterator[Method]:
    def method(name: str, parameters: str, *messages: Message, returns: str = "") -> Method:
        objects = messages[0].buffer is None
        return Method(
            MPI.Comm, name, messages[0].op, tuple(parameters.split()),
            messages=messages, objects=objects, returns=returns,
        )  # fmt: skip

    for mode in ("", "b", "s", "r"):
        blocking = f"{mode}send".capitalize()
        yield method(blocking, "buf dest tag", _SEND)
        yield method(f"I{mode}send", "buf dest tag", _SEND, returns="request")
        yield method(f"{blocking}_init", "buf dest tag", _SEND, returns="prequest")
        if mode != "r":
            yield method(f"{mode}send", "obj dest tag", _SEND_OBJECT)
            yield method(f"i{mode}send", "obj dest tag", _SEND_OBJECT, returns="request")
    yield method("Recv", "buf source tag status", _RECV)
    yield method("Irecv", "buf source tag", _RECV, returns="request")
    yield method("Recv_init", "buf source tag", _RECV, returns="prequest")
    yield method("recv", "buf source tag status", _RECV_OBJECT)
    yield method("irecv", "buf source tag", _RECV_OBJECT, returns="request")
    yield method("Psend_init", "buf partitions dest tag info", _SEND, returns="prequest")
    yield method("Precv_init", "buf partitions source tag info", _RECV, returns="prequest")

    send, recv = Message("send", "sendbuf", "dest", "sendtag"), Message("recv", "recvbuf", "source", "recvtag")
    exchange = "sendbuf dest sendtag recvbuf source recvtag"
    yield method("Sendrecv", f"{exchange} status", send, recv)
    yield method("Isendrecv", exchange, send, recv, returns="request")
    pickled = send._replace(buffer=None), recv._replace(buffer=None)
    yield method("sendrecv", f"{exchange} status".replace("sendbuf", "sendobj"), *pickled)
    in_place = send._replace(buffer="buf"), recv._replace(buffer="buf")
    yield method("Sendrecv_replace", "buf dest sendtag source recvtag status", *in_place)
    yield method("Isendrecv_replace", "buf dest sendtag source recvtag", *in_place, returns="request")

    owner = MPI.Message
    yield Method(owner, "Recv", "recv", ("buf", "status"), messages=(_RECV,))
    yield Method(owner, "Irecv", "recv", ("buf",), messages=(_RECV,), returns="request")
    yield Method(owner, "recv", "recv", ("status",), messages=(_RECV_OBJECT,), objects=True)
    yield Method(owner, "irecv", "recv", (), messages=(_RECV_OBJECT,), objects=True, returns="request")


def _one_sided() -> Iterator[Method]:
    for name, op, parameters in (
        ("Put", "put", ("origin", "target_rank", "target")),
        ("Get", "get", ("origin", "target_rank", "target")),
        ("Accumulate", "accumulate", ("origin", "target_rank", "target", "op")),
        ("Get_accumulate", "accumulate", ("origin", "result", "target_rank", "target", "op")),
        ("Fetch_and_op", "accumulate", ("origin", "result", "target_rank", "target_disp", "op")),
        ("Compare_and_swap", "accumulate", ("origin", "compare", "result", "target_rank", "target_disp")),
    ):
        rule = _fetched if "result" in parameters else _buffer("origin")
        yield Method(MPI.Win, name, op, parameters, rule, root="target_rank")
        if "_and_" not in name:
            yield Method(MPI.Win, f"R{name.lower()}", op, parameters, rule, root="target_rank", returns="request")
    yield Method(MPI.Win, "Fence", "barrier", ("assertion",))


METHODS: Final[tuple[Method, ...]] = (*_collectives(), *_messages(), *_one_sided())
"""Every method that is recorded. The hook skips those that the installed mpi4py lacks."""
