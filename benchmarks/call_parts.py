"""Where the time of a call goes in the Python recorder, in us: each part alone, with the arguments of a real call.

The call is an all_reduce of 1,024 fp32 elements on a fake process group, as in `call_cost`. "All of it" is the call
itself, which is longer than its parts together by what they have in common: arguments that are passed on, objects that
are made.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import groups
import results
import sides
import torch
import torch.distributed as dist
from measuring import Row

from commtrace.schema import Clock

CASE = "all_reduce, fake group"
ALL = "all of it"
KERNEL = "the kernel in Python, called by the dispatcher and redispatching, and the wrapped wait"
CALLS = 2000


def main() -> None:
    """Run the benchmark, and write its results."""
    parser = results.parser(__doc__, pairs=40)
    options = results.parsed(parser)
    results.write("call_parts", groups.run(on_fake, options, backend="fake"), options)


def on_fake(options: argparse.Namespace) -> list[Row]:
    """Measure all parts in turn, once in each round."""
    all_reduce = partial(dist.all_reduce, torch.ones(1024))
    bare = statistics.median(microseconds(all_reduce) for _ in range(options.pairs))
    with sides.traced("python"):
        all_reduce()
        parts: dict[str, Callable[[], object]] = {**parts_of(all_reduce), ALL: all_reduce}
        rounds = [in_turn(parts, all_reduce) for _ in range(options.pairs)]
    medians = {name: statistics.median(times[name] for times in rounds) for name in rounds[0]}
    nothing = medians.pop("nothing")
    rows = [
        Row(CASE, name, "us", us - (bare if name in (ALL, KERNEL) else nothing), pairs=options.pairs)
        for name, us in medians.items()
    ]
    for row in rows:
        results.show(row)
    return rows


def in_turn(parts: dict[str, Callable[[], object]], call: Callable[[], object]) -> dict[str, float]:
    """Return the times of all parts, and that of a call which the kernel redispatches without a record."""
    from commtrace.hooks.torch.tracer import TorchTracer

    def unrecorded(*_: object) -> None:
        """Stand in for `begin_call`. A mock would take longer than what is measured."""

    with mock.patch.object(TorchTracer, "begin_call", unrecorded):
        kernel = microseconds(call)
    return {KERNEL: kernel, **{name: microseconds(part) for name, part in parts.items()}}


def parts_of(call: Callable[[], object]) -> dict[str, Callable[[], object]]:
    """Return the parts of a call by name, as functions without arguments, and one that does nothing."""
    from commtrace import reduce_ops
    from commtrace.hooks.torch import tracer as module

    tracer, operator, args, result = one_call(call)
    recorder, group = tracer.recorder, tracer.groups.get(operator.group(args))
    tensor = operator.sample(args)
    record = [1, group.number, 0, 4096, 0, -1, -1, 1, 0, 0, 0, 0, 0]

    def write() -> None:
        slot = recorder.begin(*record)
        pending = recorder.returned(slot, module.now(), observable=True)
        recorder.ended(pending, 0, module.now(), Clock.WAIT)

    return {
        "nothing": lambda: None,
        "the reduction, which torch keeps in an object of C++": lambda: reduce_ops.number(args[operator.reduce_op_at]),
        "call site, phase and step": lambda: tracer.context.find(1, 0),
        "the record, when the call begins, returns and ends": write,
        "the process group": lambda: tracer.groups.get(operator.group(args)),
        "payload": lambda: operator.measure(args, group.size, group.rank),
        "number of the operation, type and reduction": lambda: tracer.kind(operator, tensor.dtype, 0),
        "number in the group, peer and tag": lambda: tracer._addressing(operator, args, group),
        "whether it is asynchronous, coalesced, fake, DDP's": lambda: (
            module._flags(operator, args, 0), tracer.batches.of(group.number), module.is_fake(operator.sample(args)),
            module._reducer_purpose(operator, tensor),
        ),
        "the Work, unpacked": lambda: module._unbox_work(result[-1]),
    }  # fmt: skip


def one_call(call: Callable[[], object]) -> tuple[Any, Any, Sequence[Any], Any]:
    """Make a call, and return its tracer, operator, arguments and result."""
    from commtrace.hooks.torch.tracer import TorchEntry

    seen: list[Any] = []

    def returned(entry: Any, operator: Any, args: Sequence[Any], result: Any, t_return: int) -> None:
        seen.append((entry.tracer, operator, args, result))
        original(entry, operator, args, result, t_return)

    original = TorchEntry.returned
    with mock.patch.object(TorchEntry, "returned", returned):
        call()
    (found,) = seen
    return found  # type: ignore[no-any-return]


def microseconds(part: Callable[[], object]) -> float:
    """Return the mean time of a part."""
    begun = time.perf_counter()
    for _ in range(CALLS):
        part()
    return (time.perf_counter() - begun) / CALLS * 1e6


if __name__ == "__main__":
    main()
