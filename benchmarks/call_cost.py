"""Time that a tool adds to one all_reduce of 1,024 fp32 elements, in us.

A fake process group sends nothing, so only the cost of `torch.distributed` and of the tool is measured. As many calls
come first that are not timed, because a tool's first calls touch memory that later ones use again. (DeepSpeed's logger
is not warmed up: its calls take longer the more it has logged.) In a training, code and memory of a call have left the
caches by the next one; so single calls are also measured, each after a layer's forward, backward and optimizer. On two
gloo ranks, the time that a program waits is measured. DeepSpeed's comms logger records calls of `deepspeed.comm` only,
so its baseline is the same call of `deepspeed.comm` with the logger off.
"""

from __future__ import annotations

import argparse
import runpy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import groups
import results
import sides
import torch
import torch.distributed as dist
import training_steps
from measuring import Row

from commtrace.hooks import purposes
from commtrace.schema import Purpose


def main() -> None:
    """Run the benchmark on both groups, and write its results."""
    parser = results.parser(__doc__, pairs=36, settle=0.15)
    parser.add_argument("--fake-calls", type=int, default=2000, help="calls per block on the fake group")
    parser.add_argument("--gloo-calls", type=int, default=200, help="calls per block on gloo")
    parser.add_argument("--cold-calls", type=int, default=40, help="calls after computation per block")
    options = results.parsed(parser, fake_calls=20, gloo_calls=5, cold_calls=3)
    rows = groups.run(on_fake, options, backend="fake") + groups.run(on_gloo, options, backend="gloo")
    results.write("call_cost", rows, options)


def on_fake(options: argparse.Namespace) -> list[Row]:
    """Measure on a fake process group, where nothing is sent."""
    case = "all_reduce, fake group"
    all_reduce = partial(dist.all_reduce, torch.ones(1024))
    switches = {**sides.commtrace_sides(), **sides.summary_sides(), **sides.torch_sides()}
    rows = measure(case, switches, all_reduce, options.fake_calls, options, warm=options.fake_calls)
    rows += after_computation(all_reduce, options)
    rows += through_mappings(options)
    rows += with_purpose(all_reduce, options)
    for times in sorted({min(200, options.fake_calls), options.fake_calls}):
        rows += with_deepspeed(case, times, options)
    return rows


def after_computation(call: Callable[[], object], options: argparse.Namespace) -> list[Row]:
    """Measure a call of which little is left in the caches."""
    amount = groups.Amount(options.cold_calls, options.pairs, options.settle)
    compute = training_steps.alone()
    return [
        groups.Comparison("all_reduce after computation, fake group", name, switch, call, before=compute).microseconds(
            amount
        )
        for name, switch in sides.commtrace_sides().items()
        if options.only in name and "with call sites" in name
    ]


MAPPINGS = """
import torch.autograd
import torch.distributed as dist

def _reduce(tensor):
    dist.all_reduce(tensor)
    return tensor

class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return _reduce(tensor)

def reduce(tensor):
    return _Reduce.apply(tensor)
"""
"""A tensor-parallel sum, as in Megatron's `mpu/mappings.py`."""


def through_mappings(options: argparse.Namespace) -> list[Row]:
    """Measure the cost of recording the caller beside the call site, as in `mpu/mappings.py`."""
    with tempfile.TemporaryDirectory() as directory:
        reduce = [reduce_of(Path(directory) / "megatron" / "mpu" / name) for name in ("sums.py", "mappings.py")]
        plain, mapping = (partial(function, torch.ones(1024)) for function in reduce)
        return beside("all_reduce through mpu/mappings.py, beside another file", plain, mapping, options)


def with_purpose(all_reduce: Callable[[], object], options: argparse.Namespace) -> list[Row]:
    """Measure the cost of recording a purpose, and of it with the mark that a hook makes for a single call."""
    rows = beside("all_reduce with a purpose, beside without", all_reduce, all_reduce, options, within_mark)
    rows += in_a_marked_function("all_reduce in a marked function, beside another", all_reduce, options)
    compute = training_steps.alone()
    return rows + in_a_marked_function("a marked function after computation, beside another", int, options, compute)


def in_a_marked_function(
    case: str, call: Callable[[], object], options: argparse.Namespace, before: Callable[[], object] | None = None
) -> list[Row]:
    """Measure what it costs that a hook has wrapped a function, which marks its calls. `before` is not timed."""
    current = SimpleNamespace(call=call)

    @contextmanager
    def wrapping(switch: sides.Switch) -> Iterator[None]:
        with switch():
            current.call = purposes.marking(Purpose.GRADIENTS)(call)  # as the recorder that has begun wraps it
            try:
                yield
            finally:
                current.call = call

    def called() -> object:
        return current.call()

    return beside(case, called, called, options, wrapping, before)


@contextmanager
def within_mark(switch: sides.Switch) -> Iterator[None]:
    """Switch on, and mark all calls."""
    with switch(), purposes.Marked(purposes.GRADIENTS):
        yield


def beside(
    case: str,
    plain: Callable[[], object],
    other: Callable[[], object],
    options: argparse.Namespace,
    around: Callable[[sides.Switch], AbstractContextManager[object]] = lambda switch: switch(),
    before: Callable[[], object] | None = None,
) -> list[Row]:
    """Return the cost of a call beside a plain one, both traced; what is `around` the switch is for that call only."""
    calls = options.fake_calls if before is None else options.cold_calls
    amount = groups.Amount(calls, options.pairs, options.settle, calls)
    return [
        groups.Comparison(case, name, partial(around, switch), plain, other, switch, before).microseconds(amount)
        for name, switch in sides.commtrace_sides().items()
        if options.only in name and "with call sites" in name
    ]


def reduce_of(path: Path) -> Callable[[torch.Tensor], object]:
    """Write MAPPINGS to a file, and return its function `reduce`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MAPPINGS)
    function: Callable[[torch.Tensor], object] = runpy.run_path(str(path))["reduce"]
    return function


def on_gloo(options: argparse.Namespace) -> list[Row]:
    """Measure on two gloo ranks, where a program waits for the other rank, too."""
    case, tensor = "all_reduce, two gloo ranks", torch.ones(1024)
    all_reduce = partial(dist.all_reduce, tensor)
    rows = measure(case, {**sides.commtrace_sides(), **sides.torch_sides()}, all_reduce, options.gloo_calls, options)
    rows += measure(
        "all_reduce, async, then wait, two gloo ranks",
        {name: switch for name, switch in sides.commtrace_sides().items() if sides.recorders()[-1] in name},
        lambda: dist.all_reduce(tensor, async_op=True).wait(),
        options.gloo_calls,
        options,
    )
    return rows + with_deepspeed(case, options.gloo_calls, options)


def with_deepspeed(case: str, times: int, options: argparse.Namespace) -> list[Row]:
    """Measure DeepSpeed's logger. Call this last in a process: once DeepSpeed is imported, commtrace hooks it, too."""
    comm = sides.deepspeed_comm()
    if comm is None:
        return []
    side: dict[str, sides.Switch] = {f"DeepSpeed comms logger, its first {times:,} calls": sides.comms_logger}
    return measure(case, side, partial(comm.all_reduce, torch.ones(1024)), times, options)


def measure(
    case: str,
    switches: dict[str, sides.Switch],
    call: Callable[[], object],
    times: int,
    options: argparse.Namespace,
    *,
    warm: int = 1,
) -> list[Row]:
    """Return a row for each side."""
    amount = groups.Amount(times, options.pairs, options.settle, warm)
    return [
        groups.Comparison(case, name, switch, call).microseconds(amount)
        for name, switch in switches.items()
        if options.only in name
    ]


if __name__ == "__main__":
    main()
