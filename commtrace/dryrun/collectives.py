"""Collectives that go nowhere: kernels for the CPU, below the hooks, in place of a network.

A call is complete when it returns. Its results are as if every rank had sent what this one did, where they are small,
and are not touched otherwise; small whole numbers from another rank are that rank's, where it has run (`mail`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from .operators import tensors_in
from .rank_messages import RankMessages
from .uncomputed_storages import UncomputedStorages
from .untouched_memory import MAX_COMPUTED_ELEMENTS, MMAP_BYTES

# What an operator's results are in. Of the others they are in `tensors`.
_OUTPUTS: Final = ("output_tensors", "output_tensor", "outputs", "output_lists", "output")
_ROOTED: Final = {"broadcast_", "scatter_"}
_REDUCING: Final = {"allreduce_", "allreduce_coalesced_", "reduce_"}

_RedOpType: Any = dist.ReduceOp.RedOpType
_work_from: Any = vars(torch._C._distributed_c10d)["_create_work_from_future"]


class CollectiveCall:
    """One call: arguments by the names of the operator's schema."""

    def __init__(self, schema: Any, args: Sequence[Any]) -> None:
        # Trailing arguments that equal their defaults do not arrive.
        self._given = {argument.name: argument.default_value for argument in schema.arguments}
        self._given.update(zip(self._given, args, strict=False))
        self.name: str = schema.name.partition("::")[2]
        self.group: Any = dist.ProcessGroup.unbox(self._given["process_group"])

    def __getitem__(self, name: str) -> Any:
        return self._given.get(name)

    @property
    def outputs(self) -> Any:
        """What the call fills."""
        name = next((name for name in _OUTPUTS if name in self._given), "tensors")
        return self._given.get(name, [])

    @property
    def inputs(self) -> list[torch.Tensor]:
        """What this rank gives."""
        names = [name for name in self._given if name.startswith("input") and "sizes" not in name]
        return [tensor for name in names for tensor in tensors_in(self._given[name])]

    def global_rank(self, rank: int) -> int:
        """Of a rank in the group."""
        return dist.get_global_rank(self.group, rank)


class SimulatedCollectives:
    """The kernels of one simulated rank."""

    def __init__(self, unknown: UncomputedStorages, mail: RankMessages) -> None:
        self._unknown, self._mail = unknown, mail
        self._library: Any = None
        self._counts: Counter[Any] = Counter()

    def install(self) -> None:
        """In place of those of torch, for tensors on the CPU."""
        self._library = torch.library.Library("c10d", "IMPL")
        names = [name.partition("::") for name in sorted(torch._C._dispatch_get_all_op_names())]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced
            for space, _, name in names:
                if space == "c10d" and "." not in name and name != "check_for_nan":
                    kernel = self._kernel(getattr(torch.ops.c10d, name).default._schema)
                    self._library.impl(name, kernel, "CPU", allow_override=True)

    def uninstall(self) -> None:
        """Torch's own again."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _kernel(self, schema: Any) -> Callable[..., Any]:
        returned = len(schema.returns)

        def kernel(*args: Any) -> Any:
            call = CollectiveCall(schema, args)
            with torch.no_grad():
                self._deliver(call)
            outputs = call.outputs
            work = _complete([*tensors_in(outputs)])
            return None if not returned else work if returned == 1 else (outputs, work)

        return kernel

    # ---- results -----------------------------------------------------------------------------------------------------

    def _deliver(self, call: CollectiveCall) -> None:
        if call.name in ("barrier", "monitored_barrier_"):
            return
        outputs = [*tensors_in(call.outputs)]
        if call.name == "send":
            self._post(call, outputs)
        elif call.name in ("recv_", "recv_any_source_"):
            self._receive(call, outputs)
        elif call.name in _ROOTED:
            self._from_root(call, outputs)
        else:
            inputs = call.inputs
            own = {tensor.untyped_storage()._cdata for tensor in inputs}
            for tensor in outputs if call.name not in _REDUCING else ():
                if tensor.untyped_storage()._cdata not in own:
                    _clear(tensor)
            if sum(tensor.numel() for tensor in (*outputs, *inputs)) <= MAX_COMPUTED_ELEMENTS:
                self._as_if_alike(call, inputs, outputs)
            self._unknown.add(outputs)

    def _post(self, call: CollectiveCall, tensors: list[torch.Tensor]) -> None:
        own, to = call.global_rank(call.group.rank()), call.global_rank(call["dst"])
        for tensor in tensors:
            where = self._where(call, own, to, call["tag"])
            self._mail.post(where, tensor, known=tensor not in self._unknown)

    def _receive(self, call: CollectiveCall, tensors: list[torch.Tensor]) -> None:
        source = -1 if call["src"] is None else call.global_rank(call["src"])
        for tensor in tensors:
            where = self._where(call, source, call.global_rank(call.group.rank()), call["tag"])
            if source >= 0 and self._mail.fetch(source, where, tensor):
                self._unknown.overwritten(tensor)
            else:
                _clear(tensor)
                self._unknown.add([tensor])

    def _from_root(self, call: CollectiveCall, outputs: list[torch.Tensor]) -> None:
        """broadcast, scatter: the root knows what everybody gets; nobody else does before it has run."""
        root = call.global_rank(call["root_rank"])
        where = self._where(call, root)
        if call.group.rank() != call["root_rank"]:
            for number, tensor in enumerate(outputs):
                place = (*where, call.group.rank() if call.name == "scatter_" else 0, number)
                if self._mail.fetch(root, place, tensor):
                    self._unknown.overwritten(tensor)
                else:
                    self._unknown.add([tensor])
            return
        shares = call["input_tensors"][0] if call.name == "scatter_" else None
        for number, tensor in enumerate(outputs if shares is None else shares):
            place = (*where, number, 0) if shares is not None else (*where, 0, number)
            self._mail.post(place, tensor, known=tensor not in self._unknown)
        if shares is not None:
            self._copy(shares[call.group.rank()], outputs[0])

    def _as_if_alike(self, call: CollectiveCall, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        n, rank = call.group.size(), call.group.rank()
        if call.name in _REDUCING:
            for tensor in outputs:
                _reduce(tensor, call["reduce_op"], n)
        elif call.name == "_allgather_base_":
            outputs[0].view(n, -1).copy_(inputs[0].reshape(1, -1).expand(n, -1))
        elif "gather" in call.name:
            for number, part in enumerate(outputs):
                self._copy(inputs[number % len(inputs)], part)
        elif call.name == "_reduce_scatter_base_":
            self._copy(inputs[0].reshape(-1).chunk(n)[rank], outputs[0])
            _reduce(outputs[0], call["reduce_op"], n)
        elif call.name == "reduce_scatter_":
            self._copy(inputs[rank], outputs[0])
            _reduce(outputs[0], call["reduce_op"], n)
        elif call.name.startswith("alltoall"):
            for source, target in zip(inputs, outputs, strict=False):
                self._copy(source, target)

    @staticmethod
    def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
        if source.numel() == target.numel() <= MAX_COMPUTED_ELEMENTS and source.dtype == target.dtype:
            target.copy_(source.reshape(target.shape))

    def _where(self, call: CollectiveCall, *about: Any) -> tuple[Any, ...]:
        """Where a message belongs: the same on the rank that sends it and on the one that gets it."""
        key = (str(call.group.group_name), "p2p" if len(about) > 1 else call.name, *about)
        self._counts[key] += 1
        return (*key, self._counts[key])


def _reduce(tensor: torch.Tensor, boxed: Any, n: int) -> None:
    """As if n ranks had the same."""
    op = boxed._get_method("op")() if boxed is not None else None
    if tensor.dtype is torch.bool:
        return
    if op == int(_RedOpType.SUM):
        tensor.mul_(n)
    elif op == int(_RedOpType.PRODUCT):
        tensor.pow_(n)


def _clear(tensor: torch.Tensor) -> None:
    """Memory that torch has taken itself may hold old numbers, but for what comes from the system anew."""
    if tensor.untyped_storage().nbytes() <= MMAP_BYTES:
        tensor.zero_()


def _complete(results: list[torch.Tensor]) -> Any:
    """A Work that is done, with a future that holds the results: DDP's reducer takes them from there."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(results)
    return _work_from(future).boxed()
