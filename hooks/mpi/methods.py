"""What the arguments of mpi4py's methods mean: operation, payload, own share, peer, tag.

mpi4py names its methods as MPI does: `Allreduce` blocks, `Iallreduce` gives a Request, `Allreduce_init` a Prequest that
is started later, and `allreduce` pickles Python objects. Sizes follow docs/reference/log-format.md, as torch's do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from mpi4py import MPI

from .buffers import NOTHING, Block, simple, vector, vector_of_types
from .communicators import MpiGroup


class Size(NamedTuple):
    """Payload in bytes, bytes of it that are this rank's own share, whether shares differ, element type."""

    payload: int
    local: int
    uneven: bool
    dtype: str | None


Arguments = Mapping[str, Any]

# (arguments, group, rank of the root as the caller gives it) -> Size
Rule = Callable[[Arguments, MpiGroup, int], Size]


def _of(block: Block) -> Size:
    return Size(block.nbytes, 0, False, block.dtype)


def _equal(block: Block, blocks: int, own: bool) -> Size:
    return Size(block.nbytes * blocks, block.nbytes if own else 0, False, block.dtype)


def _shares(shares: Sequence[int], dtype: str | None, own: int | None) -> Size:
    """`own`: which of them is this rank's own; None: none."""
    local = 0 if own is None or own >= len(shares) else shares[own]
    return Size(sum(shares), local, len(set(shares)) > 1, dtype)


def _own(group: MpiGroup) -> int | None:
    return None if group.remote is not None else group.rank


def _buffer(name: str) -> Rule:
    return lambda arguments, group, root: _of(NOTHING if root == MPI.PROC_NULL else simple(arguments[name]))


def _rooted_buffer(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    return _of(NOTHING if root == MPI.PROC_NULL else simple(arguments["buf"]))


def _reduced(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    """Reductions: the buffers of all ranks are of one size. What it gives or, where that is in place, what it gets."""
    if root == MPI.PROC_NULL:
        return _of(NOTHING)
    given = arguments["sendbuf"]
    return _of(simple(arguments["recvbuf"] if given is None or given is MPI.IN_PLACE or root == MPI.ROOT else given))


def _gather(full: str, share: str) -> Rule:
    """gather, scatter: the root has the whole, every other rank one share of it, as large as each."""

    def rule(arguments: Arguments, group: MpiGroup, root: int) -> Size:
        if root == MPI.PROC_NULL:
            return _of(NOTHING)
        if group.is_root(root):
            return _equal(simple(arguments[full], group.blocks), group.blocks, group.remote is None)
        return _equal(simple(arguments[share]), group.size, own=True)

    return rule


def _gatherv(full: str, share: str) -> Rule:
    """As `_gather`; a rank that is not the root knows its own share only, and that is then the payload."""

    def rule(arguments: Arguments, group: MpiGroup, root: int) -> Size:
        if root == MPI.PROC_NULL:
            return _of(NOTHING)
        if group.is_root(root):
            return _shares(*vector(arguments[full], group.blocks), _own(group))
        own = simple(arguments[share])
        return Size(own.nbytes, own.nbytes, True, own.dtype)

    return rule


def _all_gather(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    return _equal(simple(arguments["recvbuf"], group.blocks), group.blocks, group.remote is None)


def _all_gatherv(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    return _shares(*vector(arguments["recvbuf"], group.blocks), _own(group))


def _sent(arguments: Arguments) -> Any:
    given = arguments["sendbuf"]
    return arguments["recvbuf"] if given is MPI.IN_PLACE else given


def _all_to_all(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    return _equal(simple(_sent(arguments), group.blocks), group.blocks, group.remote is None)


def _all_to_allv(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    return _shares(*vector(_sent(arguments), group.blocks), _own(group))


def _all_to_allw(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    return _shares(*vector_of_types(_sent(arguments), group.blocks), _own(group))


def _reduce_scatter_block(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    in_place = arguments["sendbuf"] is MPI.IN_PLACE
    return _equal(simple(arguments["recvbuf"], group.size if in_place else 1), group.size, group.remote is None)


def _reduce_scatter(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    sent, counts = simple(_sent(arguments)), arguments.get("recvcounts")
    if counts is not None:
        shares = [int(count) for count in counts]
        entries = sum(shares)
        nbytes = [sent.nbytes // entries * count if entries else 0 for count in shares]
        return _shares(nbytes, sent.dtype, _own(group))
    own = simple(arguments["recvbuf"]).nbytes
    return Size(sent.nbytes, own if group.remote is None else 0, own * group.size != sent.nbytes, sent.dtype)


def _neighbors_gather(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    return _equal(simple(arguments["recvbuf"], group.sources), group.sources, own=False)


def _neighbors_gatherv(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    return _shares(*vector(arguments["recvbuf"], group.sources), None)


def _neighbors_all(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    return _equal(simple(arguments["sendbuf"], group.destinations), group.destinations, own=False)


def _neighbors_allv(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    return _shares(*vector(arguments["sendbuf"], group.destinations), None)


def _neighbors_allw(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    return _shares(*vector_of_types(arguments["sendbuf"], group.destinations), None)


def _fetched(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    """What goes to the target; where nothing does (NO_OP), what comes back."""
    if root == MPI.PROC_NULL:
        return _of(NOTHING)
    return _of(simple(arguments["result" if arguments.get("op") == MPI.NO_OP else "origin"]))


def _nothing(arguments: Arguments, group: MpiGroup, root: int) -> Size:
    return _of(NOTHING)


class Message(NamedTuple):
    """A message between two ranks: names of the arguments that tell what, with whom and under which tag."""

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
    measure: Rule
    messages: tuple[Message, ...] = ()  # messages that the method carries; a Sendrecv has two
    root: str | None = None  # name of the argument with the root, or the target of a one-sided operation
    reduces: bool = False
    objects: bool = False  # whether it pickles Python objects
    returns: str = ""  # "request": returns before the end, with a Request; "prequest": begins nothing yet; "": blocks
    one_sided: bool = False  # ends with the next synchronization of the window
    message_object: bool = False  # whether it is a method of a Message, which holds its communicator
    partitions: bool = False

    @property
    def receives(self) -> bool:
        """Whether a message arrives; its status has the size and the sender."""
        return any(message.op == "recv" for message in self.messages)

    @property
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
_SEND: Final = Message("send", "buf", "dest", "tag")
_RECV: Final = Message("recv", "buf", "source", "tag")

# Name -> (operation, parameters, rule), of the blocking form on buffers.
_COLLECTIVES: Final[dict[type, dict[str, tuple[str, tuple[str, ...], Rule]]]] = {
    MPI.Comm: {
        "Barrier": ("barrier", (), _nothing),
        "Bcast": ("broadcast", ("buf", "root"), _rooted_buffer),
        "Gather": ("gather", _ROOT, _gather("recvbuf", "sendbuf")),
        "Gatherv": ("gather", _ROOT, _gatherv("recvbuf", "sendbuf")),
        "Scatter": ("scatter", _ROOT, _gather("sendbuf", "recvbuf")),
        "Scatterv": ("scatter", _ROOT, _gatherv("sendbuf", "recvbuf")),
        "Allgather": ("all_gather", _BOTH, _all_gather),
        "Allgatherv": ("all_gather", _BOTH, _all_gatherv),
        "Alltoall": ("all_to_all", _BOTH, _all_to_all),
        "Alltoallv": ("all_to_all", _BOTH, _all_to_allv),
        "Alltoallw": ("all_to_all", _BOTH, _all_to_allw),
        "Reduce": ("reduce", (*_BOTH, "op", "root"), _reduced),
        "Allreduce": ("all_reduce", (*_BOTH, "op"), _reduced),
        "Reduce_scatter_block": ("reduce_scatter", (*_BOTH, "op"), _reduce_scatter_block),
        "Reduce_scatter": ("reduce_scatter", (*_BOTH, "recvcounts", "op"), _reduce_scatter),
    },
    MPI.Intracomm: {"Scan": ("scan", (*_BOTH, "op"), _reduced), "Exscan": ("exscan", (*_BOTH, "op"), _reduced)},
    MPI.Topocomm: {
        "Neighbor_allgather": ("all_gather", _BOTH, _neighbors_gather),
        "Neighbor_allgatherv": ("all_gather", _BOTH, _neighbors_gatherv),
        "Neighbor_alltoall": ("all_to_all", _BOTH, _neighbors_all),
        "Neighbor_alltoallv": ("all_to_all", _BOTH, _neighbors_allv),
        "Neighbor_alltoallw": ("all_to_all", _BOTH, _neighbors_allw),
    },
}

# Name -> (operation, parameters), of the forms that pickle.
_OBJECT_COLLECTIVES: Final[dict[type, dict[str, tuple[str, tuple[str, ...]]]]] = {
    MPI.Comm: {
        "barrier": ("barrier", ()),
        "bcast": ("broadcast", ("obj", "root")),
        "gather": ("gather", ("sendobj", "root")),
        "scatter": ("scatter", ("sendobj", "root")),
        "allgather": ("all_gather", ("sendobj",)),
        "alltoall": ("all_to_all", ("sendobj",)),
        "reduce": ("reduce", ("sendobj", "op", "root")),
        "allreduce": ("all_reduce", ("sendobj", "op")),
    },
    MPI.Intracomm: {"scan": ("scan", ("sendobj", "op")), "exscan": ("exscan", ("sendobj", "op"))},
    MPI.Topocomm: {
        "neighbor_allgather": ("all_gather", ("sendobj",)),
        "neighbor_alltoall": ("all_to_all", ("sendobj",)),
    },
}


def _collectives() -> Iterator[Method]:
    for owner, methods in _COLLECTIVES.items():
        for name, (op, parameters, rule) in methods.items():
            shared: dict[str, Any] = {
                "owner": owner, "op": op, "measure": rule, "reduces": "op" in parameters,
                "root": "root" if "root" in parameters else None,
            }  # fmt: skip
            yield Method(name=name, parameters=parameters, **shared)
            yield Method(name=f"I{name.lower()}", parameters=parameters, returns="request", **shared)
            yield Method(name=f"{name}_init", parameters=(*parameters, "info"), returns="prequest", **shared)
    for owner, objects in _OBJECT_COLLECTIVES.items():
        for name, (op, parameters) in objects.items():
            yield Method(
                owner, name, op, parameters, _nothing, root="root" if "root" in parameters else None,
                reduces="op" in parameters, objects=op != "barrier",
            )  # fmt: skip


def _messages() -> Iterator[Method]:
    comm, send, recv = MPI.Comm, ("buf", "dest", "tag"), ("buf", "source", "tag")
    both = (Message("send", "sendbuf", "dest", "sendtag"), Message("recv", "recvbuf", "source", "recvtag"))
    replace = (both[0]._replace(buffer="buf"), both[1]._replace(buffer="buf"))
    exchange = ("sendbuf", "dest", "sendtag", "recvbuf", "source", "recvtag")
    exchange_in_place = ("buf", "dest", "sendtag", "source", "recvtag")

    def method(name: str, parameters: tuple[str, ...], messages: tuple[Message, ...], **more: Any) -> Method:
        return Method(comm, name, messages[0].op, parameters, _nothing, messages, **more)

    for mode in ("", "b", "s", "r"):
        blocking = f"{mode}send".capitalize()
        yield method(blocking, send, (_SEND,))
        yield method(f"I{mode}send", send, (_SEND,), returns="request")
        yield method(f"{blocking}_init", send, (_SEND,), returns="prequest")
        if mode != "r":
            pickled = ("obj", "dest", "tag")
            yield method(f"{mode}send", pickled, (_SEND._replace(buffer=None),), objects=True)
            yield method(f"i{mode}send", pickled, (_SEND._replace(buffer=None),), objects=True, returns="request")
    yield method("Recv", (*recv, "status"), (_RECV,))
    yield method("Irecv", recv, (_RECV,), returns="request")
    yield method("Recv_init", recv, (_RECV,), returns="prequest")
    yield method("recv", (*recv, "status"), (_RECV._replace(buffer=None),), objects=True)
    yield method("irecv", recv, (_RECV._replace(buffer=None),), objects=True, returns="request")
    yield method("Sendrecv", (*exchange, "status"), both)
    yield method("Sendrecv_replace", (*exchange_in_place, "status"), replace)
    yield method("Isendrecv", exchange, both, returns="request")
    yield method("Isendrecv_replace", exchange_in_place, replace, returns="request")
    exchanged = ("sendobj", *exchange[1:], "status")
    yield method("sendrecv", exchanged, (both[0]._replace(buffer=None), both[1]._replace(buffer=None)), objects=True)
    parts = ("buf", "partitions")
    yield method("Psend_init", (*parts, "dest", "tag", "info"), (_SEND,), returns="prequest", partitions=True)
    yield method("Precv_init", (*parts, "source", "tag", "info"), (_RECV,), returns="prequest", partitions=True)


def _matched() -> Iterator[Method]:
    shared: dict[str, Any] = {"owner": MPI.Message, "op": "recv", "measure": _nothing, "message_object": True}
    pickled = (_RECV._replace(buffer=None),)
    yield Method(name="Recv", parameters=("buf", "status"), messages=(_RECV,), **shared)
    yield Method(name="Irecv", parameters=("buf",), messages=(_RECV,), returns="request", **shared)
    yield Method(name="recv", parameters=("status",), messages=pickled, objects=True, **shared)
    yield Method(name="irecv", parameters=(), messages=pickled, objects=True, returns="request", **shared)


def _one_sided() -> Iterator[Method]:
    for name, op, parameters in (
        ("Put", "put", ("origin", "target_rank", "target")),
        ("Get", "get", ("origin", "target_rank", "target")),
        ("Accumulate", "accumulate", ("origin", "target_rank", "target", "op")),
        ("Get_accumulate", "accumulate", ("origin", "result", "target_rank", "target", "op")),
        ("Fetch_and_op", "accumulate", ("origin", "result", "target_rank", "target_disp", "op")),
        ("Compare_and_swap", "accumulate", ("origin", "compare", "result", "target_rank", "target_disp")),
    ):
        shared: dict[str, Any] = {
            "owner": MPI.Win, "op": op, "parameters": parameters, "root": "target_rank", "reduces": "op" in parameters,
            "measure": _fetched if "result" in parameters else _buffer("origin"),
        }  # fmt: skip
        yield Method(name=name, one_sided=True, **shared)
        if "_and_" not in name:
            yield Method(name=f"R{name.lower()}", returns="request", **shared)
    yield Method(MPI.Win, "Fence", "barrier", ("assertion",), _nothing)


METHODS: Final[tuple[Method, ...]] = (*_collectives(), *_messages(), *_matched(), *_one_sided())
"""Every method that is recorded. One that this mpi4py does not have is left out."""
