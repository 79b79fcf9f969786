"""Collectives without a network: CPU kernels of the c10d operators, below the hooks.

A call is complete when it returns. Small results are computed as if every rank sent the same as this one; large
results are not touched. Small integers that another rank sends, broadcasts or scatters are real (`rank_messages`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from commtrace import reduce_ops

from .operators import tensors_in
from .rank_messages import RankMessages
from .storage_set import StorageSet, numel, storage_of
from .untouched_memory import MAX_COMPUTED_ELEMENTS, MAX_DATA_ELEMENTS, MMAP_BYTES

# Names of the argument that holds the results; in operators without these, `tensors`.
_OUTPUTS: Final = ("output_tensors", "output_tensor", "outputs", "output_lists", "output")
_ROOTED: Final = {"broadcast_", "scatter_"}
_CONCATENATING: Final = {"_allgather_base_", "gather_into_tensor_"}
_REDUCING: Final = {"allreduce_", "allreduce_coalesced_", "reduce_"}

_create_work: Any = vars(torch._C._distributed_c10d)["_create_work_from_future"]


class CollectiveCall:
    """One call of a c10d operator. `call[name]` returns an argument by its name in the schema."""

    def __init__(self, schema: Any, args: Sequence[Any]) -> None:
        # Trailing arguments that equal their defaults are not passed.
        self._arguments = {argument.name: argument.default_value for argument in schema.arguments}
        self._arguments.update(zip(self._arguments, args, strict=False))
        self.name: str = schema.name.partition("::")[2]
        self.group: Any = dist.ProcessGroup.unbox(self._arguments["process_group"])

    def __getitem__(self, name: str) -> Any:
        return self._arguments.get(name)

    @property
    def outputs(self) -> Any:
        """The argument that the call fills."""
        name = next((name for name in _OUTPUTS if name in self._arguments), "tensors")
        return self._arguments.get(name, [])

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors that this rank sends."""
        names = [name for name in self._arguments if name.startswith("input") and "sizes" not in name]
        return [tensor for name in names for tensor in tensors_in(self._arguments[name])]

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a rank in the group."""
        return dist.get_global_rank(self.group, rank)


class SimulatedCollectives:
    """The kernels of one simulated rank."""

    def __init__(self, uncomputed: StorageSet, messages: RankMessages) -> None:
        self._uncomputed, self._messages = uncomputed, messages
        self._library: Any = None
        self._counts: Counter[Any] = Counter()

    def install(self) -> None:
        """Replace torch's kernels for tensors on the CPU."""
        reduce_ops.install()
        self._library = torch._C._dispatch_library("IMPL", "c10d", "", __file__, 0)
        names = [name.partition("::") for name in sorted(torch._C._dispatch_get_all_op_names())]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that kernels are replaced
            for space, _, name in names:
                if space == "c10d" and "." not in name and name != "check_for_nan":
                    kernel = self._kernel(getattr(torch.ops.c10d, name).default._schema)
                    self._library.impl(name, "CPU", kernel)

    def _kernel(self, schema: Any) -> Callable[..., Any]:
        returned = len(schema.returns)

        def kernel(*args: Any) -> Any:
            call = CollectiveCall(schema, args)
            self._messages.count_call()
            with torch.no_grad():
                self._set_results(call)
            outputs = call.outputs
            # DDP's reducer reads the results from the future of the completed Work.
            future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            future.set_result([*tensors_in(outputs)])
            work = _create_work(future).boxed()
            return None if not returned else work if returned == 1 else (outputs, work)

        return kernel

    # ---- results -----------------------------------------------------------------------------------------------------

    def _set_results(self, call: CollectiveCall) -> None:
        if call.name in ("barrier", "monitored_barrier_"):
            return
        outputs = [*tensors_in(call.outputs)]
        if call.name == "send":
            self._send(call, outputs)
        elif call.name in ("recv_", "recv_any_source_"):
            self._receive(call, outputs)
        elif call.name in _ROOTED:
            self._from_root(call, outputs)
        else:
            inputs = call.inputs
            own = {storage_of(tensor)._cdata for tensor in inputs}
            for tensor in outputs if call.name not in _REDUCING else ():
                if storage_of(tensor)._cdata not in own:
                    _clear(tensor)
            if sum(map(numel, (*outputs, *inputs))) <= self._limit(inputs):
                self._fill_as_if_equal(call, inputs, outputs)
            self._uncomputed.add(outputs)

    def _send(self, call: CollectiveCall, tensors: list[torch.Tensor]) -> None:
        own, to = call.global_rank(call.group.rank()), call.global_rank(call["dst"])
        for tensor in tensors:
            key = self._key(call, own, to, call["tag"])
            self._messages.post(key, tensor, computed=tensor not in self._uncomputed)

    def _receive(self, call: CollectiveCall, tensors: list[torch.Tensor]) -> None:
        source = -1 if call["src"] is None else call.global_rank(call["src"])
        for tensor in tensors:
            key = self._key(call, source, call.global_rank(call.group.rank()), call["tag"])
            if source >= 0 and self._messages.fetch(source, key, tensor):
                self._uncomputed.discard_overwritten(tensor)
            else:
                _clear(tensor)
                self._uncomputed.add([tensor])

    def _from_root(self, call: CollectiveCall, outputs: list[torch.Tensor]) -> None:
        """Simulate a broadcast or scatter. Only the root has the values; other ranks get them if it has run."""
        root = call.global_rank(call["root_rank"])
        key = self._key(call, root)
        if call.group.rank() != call["root_rank"]:
            for index, tensor in enumerate(outputs):
                message_key = (*key, call.group.rank() if call.name == "scatter_" else 0, index)
                if self._messages.fetch(root, message_key, tensor):
                    self._uncomputed.discard_overwritten(tensor)
                else:
                    if call.name == "scatter_":  # others may keep what they have
                        _clear(tensor)
                    self._uncomputed.add([tensor])
            return
        shares = call["input_tensors"][0] if call.name == "scatter_" else None
        for index, tensor in enumerate(outputs if shares is None else shares):
            message_key = (*key, index, 0) if shares is not None else (*key, 0, index)
            self._messages.post(message_key, tensor, computed=tensor not in self._uncomputed)
        if shares is not None:
            self._copy(shares[call.group.rank()], outputs[0])

    def _fill_as_if_equal(self, call: CollectiveCall, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Compute the results as if every rank sent the same as this one."""
        n, rank = call.group.size(), call.group.rank()
        if call.name in _REDUCING:
            for tensor in outputs:
                _reduce(tensor, call["reduce_op"], n)
        elif call.name in _CONCATENATING:
            if numel(outputs[0]) != n * numel(inputs[0]):
                return  # only the root gathers
            outputs[0].view(n, -1).copy_(inputs[0].reshape(1, -1).expand(n, -1))
        elif "gather" in call.name:
            for index, output in enumerate(outputs):
                self._copy(inputs[index % len(inputs)], output)
        elif call.name == "_reduce_scatter_base_":
            self._copy(inputs[0].reshape(-1).chunk(n)[rank], outputs[0])
            _reduce(outputs[0], call["reduce_op"], n)
        elif call.name == "reduce_scatter_":
            self._copy(inputs[rank], outputs[0])
            _reduce(outputs[0], call["reduce_op"], n)
        elif call.name.startswith("alltoall"):
            for source, target in zip(inputs, outputs, strict=False):
                self._copy(source, target)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if numel(source) == numel(target) <= self._limit([source]) and source.dtype == target.dtype:
            target.copy_(source.reshape(target.shape))

    def _limit(self, inputs: list[torch.Tensor]) -> int:
        """Return the number of elements up to which results are computed: more of the bytes of pickled objects."""
        are_data = all(tensor.dtype is torch.uint8 for tensor in inputs) and not self._uncomputed.any(inputs)
        return MAX_DATA_ELEMENTS if inputs and are_data else MAX_COMPUTED_ELEMENTS

    def _key(self, call: CollectiveCall, *address: Any) -> tuple[Any, ...]:
        """Return the key of a message, which is the same on the sender and the receiver."""
        key = (str(call.group.group_name), "p2p" if len(address) > 1 else call.name, *address)
        self._counts[key] += 1
        return (*key, self._counts[key])


def _reduce(tensor: torch.Tensor, boxed_op: Any, n: int) -> None:
    """Reduce a tensor in place as if n ranks had the same one."""
    op = reduce_ops.number(boxed_op) if boxed_op is not None else None
    if tensor.dtype is torch.bool:
        return
    if op == int(reduce_ops.RED_OP_TYPE.SUM):
        tensor.mul_(n)
    elif op == int(reduce_ops.RED_OP_TYPE.PRODUCT):
        tensor.pow_(n)


def _clear(tensor: torch.Tensor) -> None:
    """Set a tensor to zero, unless its memory is a large block, which comes from the system as zeros."""
    if storage_of(tensor).nbytes() <= MMAP_BYTES:
        tensor.zero_()
