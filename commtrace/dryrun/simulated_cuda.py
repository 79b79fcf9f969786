"""Simulated CUDA devices: patched `torch.cuda` functions, and CPU tensors that report a CUDA device.

    x.cuda(), x.to(0), torch.ones(2, device="cuda")    a CPU tensor whose storage is registered as being on the device
    x.device, x.is_cuda, x.type()                      the values of a tensor on the device
    a result of an operator                            on the device if one of its arguments is
    streams, events, memory statistics, nvtx           do nothing; nothing is allocated

Below Python, everything is on the CPU: kernels, autograd, DDP's reducer. The patches remain until the process ends.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.distributed import distributed_c10d
from torch.jit import _builtins
from torch.utils._device import _device_constructors

from . import cuda_autocast
from .inert import Inert
from .operators import tensors_in
from .storage_set import StorageSet, has_storage

_CPU: Final = torch.device("cpu")
_PROPERTIES: Final = {
    "name": "simulated by commtrace dryrun", "major": 9, "minor": 0, "total_memory": 80 << 30,
    "multi_processor_count": 132, "warp_size": 32, "L2_cache_size": 50 << 20, "gcnArchName": "",
    "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 48 << 10, "shared_memory_per_block_optin": 227 << 10,
    "shared_memory_per_multiprocessor": 228 << 10, "clock_rate": 1_980_000, "memory_clock_rate": 2_619_000,
    "memory_bus_width": 5120, "is_integrated": 0, "is_multi_gpu_board": 0,
    "pci_bus_id": 0, "pci_device_id": 0, "pci_domain_id": 0,
}  # fmt: skip
"""Those of an H100 with 80 GB; clocks in kHz, the width in bits."""
_CONSTANT_RESULTS: Final[tuple[tuple[Any, tuple[str, ...]], ...]] = (
    (True, ("is_available", "is_initialized", "is_bf16_supported", "is_tf32_supported", "can_device_access_peer")),
    (False, ("is_current_stream_capturing", "_is_in_bad_fork")),
    (0, (
        "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
        "max_memory_cached", "utilization", "memory_usage", "device_memory_used", "get_sync_debug_mode",
    )),
    (None, (
        "init", "_lazy_init", "synchronize", "empty_cache", "ipc_collect", "set_per_process_memory_fraction",
        "reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated",
        "reset_max_memory_cached", "set_stream", "set_sync_debug_mode", "_sleep", "_record_memory_history",
    )),
    ("", ("memory_summary",)),
    ((80 << 30, 80 << 30), ("mem_get_info", "get_memory_info")),
    ((9, 0), ("get_device_capability",)),
    (_PROPERTIES["name"], ("get_device_name",)),
)  # fmt: skip
"""Constant return values, each with the functions that return it."""

_MODULES: Final = (
    torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs, torch.accelerator,
    getattr(torch.accelerator, "memory", torch.accelerator), torch._C,  # torch.accelerator.memory: torch 2.9
)  # fmt: skip
_DTYPES: Final = ("Byte", "Char", "Short", "Int", "Long", "Half", "BFloat16", "Float", "Double", "Bool")
_STATES: Final = 1 << 64
"""Number of seeds, and of offsets."""
_SPREAD: Final = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: equal sums of seed and offset stay apart
_OFFSET_OF_DRAW: Final = 4
"""The least by which a draw moves the offset of CUDA's generator."""
_LIKE: Final = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")


class SimulatedStreamOrEvent(Inert):
    """Stand-in for a CUDA stream or event; its work is always complete."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = torch.device("cuda", _index_of(device))
        self.stream_id = self.cuda_stream = self.cuda_event = self.priority = 0
        self._recorded_s = 0.0

    def query(self) -> bool:
        """Return whether all work is done."""
        return True

    def record(self, stream: Any = None) -> None:
        """Store the current time."""
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end: SimulatedStreamOrEvent) -> float:
        """Return the real time between two events in ms, because programs divide by it."""
        return 1e3 * (end._recorded_s - self._recorded_s)

    def record_event(self, event: Any = None) -> Any:
        """Record an event, by default a new one, and return it."""
        event = event or SimulatedStreamOrEvent(self.device)
        event.record()
        return event

    def __enter__(self) -> SimulatedStreamOrEvent:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the stream."""


class SimulatedGenerator(torch.Generator):
    """CPU generator with the state of a CUDA generator: seed and offset, 16 bytes, which DTensor reads and changes.

    The same state gives the same numbers. The offset grows when the state is read, if numbers were drawn since it was
    last set or read.
    """

    def __init__(self) -> None:
        self.manual_seed(super().initial_seed())

    def manual_seed(self, seed: int, offset: int = 0) -> SimulatedGenerator:
        """Set seed and offset, uint64 each."""
        self._seed, self._offset = seed % _STATES, offset % _STATES
        super().manual_seed((self._seed + _SPREAD * self._offset) % _STATES)
        self._numbers = super().get_state()
        return self

    def seed(self) -> int:
        """Set a random seed, and return it."""
        self.manual_seed(super().seed())
        return self._seed

    def initial_seed(self) -> int:
        """Return the seed."""
        return self._seed

    def get_state(self) -> torch.Tensor:
        """Return seed and offset, uint8 of shape (16,)."""
        if not torch.equal(self._numbers, super().get_state()):
            self.manual_seed(self._seed, self._offset + _OFFSET_OF_DRAW)
        state = b"".join(value.to_bytes(8, sys.byteorder) for value in (self._seed, self._offset))
        return torch.tensor(list(state), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> SimulatedGenerator:
        """Set seed and offset from `get_state`."""
        seed, offset = (int.from_bytes(bytes(half), sys.byteorder) for half in (state[:8].tolist(), state[8:].tolist()))
        return self.manual_seed(seed, offset)


class _TensorType(type):
    """Metaclass of the legacy tensor types, such as torch.cuda.LongTensor."""

    def __call__(cls, *arguments: Any) -> Any:
        return getattr(torch, cls.__name__)(*arguments).cuda()

    def __instancecheck__(cls, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.type() == f"torch.cuda.{cls.__name__}"


class DeviceTensors:
    """Registry of the storages on the simulated device, and patches for the tensor functions that depend on it."""

    def __init__(self) -> None:
        self._storages = StorageSet()
        self._device_of, self._to, self._type = torch.Tensor.device.__get__, torch.Tensor.to, torch.Tensor.type

    def install(self) -> None:
        """Replace torch's functions."""
        tensor: Any = torch.Tensor
        tensor.device = property(self._device)
        tensor.is_cuda = property(lambda tensor: tensor.device.type == "cuda")
        tensor.is_cpu = property(lambda tensor: tensor.device.type == "cpu")
        tensor.get_device = lambda tensor: -1 if tensor.device.index is None else tensor.device.index
        tensor.to = lambda tensor, *args, **kwargs: self._to_device(tensor, *args, **kwargs)
        tensor.cuda = lambda tensor, device=None, non_blocking=False, **options: self._to_device(
            tensor, "cuda" if device is None else device, **options
        )
        tensor.cpu = lambda tensor, **options: self._to_device(tensor, _CPU, **options)
        tensor.type = lambda tensor, dtype=None, non_blocking=False: self._type_or_cast(tensor, dtype)
        tensor.pin_memory = lambda tensor, device=None: tensor
        tensor.is_pinned = lambda tensor, device=None: tensor.device == _CPU
        tensor.record_stream = lambda tensor, stream: None
        constructors = {function.__name__ for function in _device_constructors()} & vars(torch).keys()
        for name in (*constructors, *_LIKE):
            setattr(torch, name, self._wrap_constructor(getattr(torch, name)))
            _builtins._register_builtin(getattr(torch, name), f"aten::{name}")  # for torch.jit.script
        for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
            setattr(tensor, name, self._wrap_constructor(getattr(tensor, name)))
        parse_to = torch._C._nn._parse_to
        torch._C._nn._parse_to = lambda *args, **kwargs: parse_to(*map(_from_index, args), **kwargs)

    def place(self, tensors: Any, device: torch.device) -> Any:
        """Register the device of new tensors, and return them."""
        change = self._storages.add if device.type == "cuda" else self._storages.discard
        change(tensor for tensor in map(_local, tensors_in(tensors)) if has_storage(tensor))
        return tensors

    def redirect(self, kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> tuple[dict[str, Any], torch.device]:
        """Return the keyword arguments for running an operator on the CPU, and the device of its results."""
        if kwargs.get("device") is None:
            return kwargs, torch.device("cuda") if self._storages.any(tensors) else _CPU
        on_cpu = {"device": _CPU, "pin_memory": False}
        return {name: on_cpu.get(name, value) for name, value in kwargs.items()}, kwargs["device"]

    def generator_of(self, tensors: Sequence[torch.Tensor]) -> torch.Generator | None:
        """Return the default generator of the first tensor's device; None for the CPU's, which operators use anyway."""
        on_device = tensors and self._storages.any(tensors[:1])
        return torch.cuda.default_generators[torch.cuda.current_device()] if on_device else None

    def _device(self, tensor: torch.Tensor) -> torch.device:
        device: torch.device = self._device_of(tensor)
        local = _local(tensor)
        if device == _CPU and has_storage(local) and local in self._storages:
            return torch.device("cuda", torch.cuda.current_device())
        return device

    def _to_device(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Implement Tensor.to."""
        if "other" in kwargs:
            args = (kwargs.pop("other"), *args)
        target: Any = kwargs.pop("device", None)
        if args and isinstance(args[0], torch.Tensor):
            target, args = args[0].device, (args[0].dtype, *args[1:])
        elif args and isinstance(args[0], int | str | torch.device):
            target, args = args[0], args[1:]
        if target is None:
            return self._to(tensor, *args, **kwargs) if args or kwargs else tensor
        device = torch.device(_from_index(target))
        if device.type not in ("cpu", "cuda") or not has_storage(tensor):
            return self._to(tensor, _CPU if device.type == "cuda" else device, *args, **kwargs)
        if device.type != tensor.device.type:
            kwargs["copy"] = True
        moved = self._to(tensor, _CPU, *args, **kwargs)
        return moved if moved is tensor else self.place(moved, device)

    def _type_or_cast(self, tensor: torch.Tensor, dtype: Any) -> Any:
        """Implement Tensor.type."""
        if dtype is None:
            name: str = self._type(tensor)
            return name.replace("torch.", "torch.cuda.", 1) if tensor.is_cuda else name
        if isinstance(dtype, torch.dtype):
            return self._type(tensor, dtype)
        name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
        return self._to_device(self._type(tensor, name.replace(".cuda.", ".")), "cuda" if ".cuda." in name else "cpu")

    def _wrap_constructor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def construct(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            if kwargs.get("device") is None:
                return original(*args, **kwargs)
            device = torch.device(_from_index(kwargs["device"]))
            if device.type == "cuda":
                kwargs["device"] = _CPU
            return self.place(original(*args, **kwargs), device)

        return construct


def install(devices: int) -> DeviceTensors:
    """Simulate CUDA devices in this process, one per rank of the host, and return the registry of their tensors."""
    current = 0

    def exchange(device: Any) -> int:
        nonlocal current
        previous, index = current, _index_of(device)
        if index >= devices:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal {index}; number of simulated devices: {devices} (--ranks-per-node)"
            )
        current = index if index >= 0 else previous
        return previous

    def set_device(device: Any) -> None:
        exchange(device)

    generators = tuple(SimulatedGenerator() for _ in range(devices))
    functions: dict[str, Callable[..., Any]] = {
        name: functools.partial(_return_constant, value) for value, names in _CONSTANT_RESULTS for name in names
    }
    functions |= dict.fromkeys(("Stream", "ExternalStream", "Event"), SimulatedStreamOrEvent)
    functions |= dict.fromkeys(("current_stream", "default_stream"), lambda device=None: SimulatedStreamOrEvent(device))
    functions |= dict.fromkeys(("current_device", "current_device_index"), lambda: current)
    functions |= dict.fromkeys(("set_device", "set_device_index"), set_device)
    functions |= dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), exchange)
    functions |= dict.fromkeys(("_accelerator_exchangeDevice", "_accelerator_maybeExchangeDevice"), exchange)
    functions |= dict.fromkeys(("manual_seed", "manual_seed_all"), lambda seed: _seed(generators, seed))
    functions |= dict.fromkeys(("seed", "seed_all"), lambda: _seed(generators, torch.seed()))
    functions |= {
        "device_count": lambda: devices,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "get_device_properties": lambda device=None: SimpleNamespace(**_PROPERTIES),
        "get_arch_list": lambda: ["sm_90"],
        "memory_stats": lambda device=None: defaultdict(int),
        "memory_snapshot": lambda mempool_id=None: [],
        "cudart": Inert,
        "stream": contextlib.nullcontext,
        "get_rng_state": lambda device="cuda": generators[_index_of(device)].get_state(),
        "set_rng_state": lambda state, device="cuda": generators[_index_of(device)].set_state(state) and None,
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "initial_seed": lambda: generators[current].initial_seed(),
    }
    for module in _MODULES:
        vars(module).update({name: function for name, function in functions.items() if name in vars(module)})
    cuda: Any = torch.cuda
    cuda._initialized, cuda.default_generators = True, generators
    cuda.nvtx._nvtx, cuda.nccl.version = Inert(), lambda: (2, 27, 3)
    for name in (f"{dtype}Tensor" for dtype in _DTYPES):
        setattr(cuda, name, _TensorType(name, (), {"__module__": "torch.cuda"}))
    nccl: Any = type("ProcessGroupNCCL", (), {"Options": type("Options", (Inert,), {})})
    for module in (torch.distributed, distributed_c10d):
        vars(module).setdefault("ProcessGroupNCCL", nccl)
        vars(module).update(is_nccl_available=lambda: True, default_pg_nccl_timeout=timedelta(minutes=10))
    tensors = DeviceTensors()
    tensors.install()
    cuda.autocast_kernels = cuda_autocast.install()
    return tensors


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard of a DTensor, or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def _index_of(device: Any) -> int:
    return int(torch.cuda._utils._get_device_index(device, optional=True))


def _from_index(device: Any) -> Any:
    return torch.device("cuda", device) if type(device) is int else device


def _return_constant(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _seed(generators: Sequence[torch.Generator], seed: int) -> None:
    for generator in generators:
        generator.manual_seed(seed)
