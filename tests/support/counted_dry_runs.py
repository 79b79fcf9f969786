"""Dry runs whose operations between calls are counted, written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from factory import ALL_REDUCE, LogFactory, record

from commtrace.schema import Flag, Phase, State

GRADIENTS, PARAMETERS, ACTIVATIONS, STAGES = 11, 12, 13, 14
PURPOSES: Final = {
    GRADIENTS: "gradients reduced", PARAMETERS: "parameters gathered for forward", ACTIVATIONS: "activations",
    STAGES: "pipeline activations",
}  # fmt: skip


class Call(NamedTuple):
    """A call of a rank: GFLOP before it (forward counts those before calls in forward), MB, kind, phase, purpose."""

    gflop: int
    megabytes: int
    site: int = GRADIENTS
    kind: int = ALL_REDUCE
    phase: Phase = Phase.BACKWARD
    peer: int = -1
    flags: Flag = Flag.SIMULATED


def dry_run(
    folder: Path, calls: Mapping[int, Sequence[Call]], *, world_size: int = 2, steps: int = 4, role: str = "data",
    backend: str = "gloo", **process: Any,
) -> Path:  # fmt: skip
    """Write a dry run whose ranks make the same calls in each step."""
    log = LogFactory(folder)
    for rank, own in calls.items():
        facts = {"world_size": world_size, "simulated": True, "simulated_device": "cpu"}
        files = log.process(rank, pid=4711 + rank, **{**facts, **process})
        files.known({1: list(range(world_size)), 2: [rank]}, {1: role}, backend)
        for site, purpose in PURPOSES.items():
            files.add("sites", id=site, file="/x.py", line=site, function="f", purpose={"name": purpose})
        rows: list[Any] = []
        numbers, flops, forward, seqs = [], [], [], dict[tuple[int, ...], int]()
        for step in range(steps):
            for call in own:
                number = len(rows) + 1
                channel = (call.kind, call.peer) if call.peer >= 0 else (0,)
                seqs[channel] = seqs.get(channel, -1) + 1
                times = dict.fromkeys(("t_return", "t_wait", "t_end", "clock"), 0)
                rows.append(
                    record(
                        kind=call.kind, payload=call.megabytes * 1_000_000, local=0, seq=seqs[channel], step=step,
                        site=call.site, phase=call.phase, peer=call.peer, flags=call.flags | Flag.SIMULATED,
                        state=State.UNOBSERVABLE, t_begin=number, tag=0 if call.peer >= 0 else -1, **times,
                    )
                )  # fmt: skip
                numbers.append(number)
                flops.append(call.gflop * 10**9)
                forward.append(flops[-1] * (call.phase == Phase.FORWARD))
        files.add("flops", calls=numbers, flops=flops, forward=forward).write(rows).end()
    return folder
