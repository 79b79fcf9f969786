"""Small files of the NCCL Inspector, built call by call, in each version of its format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

WORLD, BASE_US = "0x1111", 1_700_000_000_000_000


class InspectorFile:
    """The file of one process. Times are us after BASE_US.

    Attributes:
        lines: The lines so far.
    """

    def __init__(self, rank: int, world_size: int = 2, *, version: str = "v4.2", verbose: bool = False) -> None:
        self.rank, self.world_size, self.version, self.verbose = rank, world_size, version, verbose
        self.lines: list[Any] = []
        self.pid, self.host = 1000 + rank, "node0"
        self._numbers: dict[tuple[str, str], int] = {}

    def context(
        self, communicator: str = WORLD, position: int | None = None, ranks: int | None = None
    ) -> dict[str, Any]:
        """Return the members that say of which communicator and process a line is."""
        return {
            "header": {
                "id": communicator, "comm_name": "unknown", "nnodes": 1,
                "rank": self.rank if position is None else position, "n_ranks": ranks or self.world_size,
            },
            "metadata": {
                "inspector_output_format_version": self.version, "git_rev": "", "dump_timestamp_us": BASE_US + 10**6,
                "rec_mechanism": "nccl_profiler_interface", "hostname": self.host, "pid": self.pid,
            },
        }  # fmt: skip

    def call(
        self, name: str = "AllReduce", size: int = 1 << 20, us: float = 100, *, at: int = 0, number: int | None = None,
        communicator: str = WORLD, position: int | None = None, ranks: int | None = None, **more: Any,
    ) -> InspectorFile:  # fmt: skip
        """Append a collective; `at` is when its kernel starts, of a verbose file."""
        key = communicator, name
        self._numbers[key] = self._numbers.get(key, -1) + 1 if number is None else number
        perf = {
            "coll": name, "coll_sn": self._numbers[key], "coll_msg_size_bytes": size, "coll_exec_time_us": us,
            "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 1.0, "coll_busbw_gbs": 1.0,
            **self._trace("coll", at, us), **more,
        }  # fmt: skip
        return self.line("coll_perf", perf, communicator, position, ranks)

    def message(self, name: str, peer: int, size: int = 1 << 20, us: float = 50, *, at: int = 0) -> InspectorFile:
        """Append a Send or Recv."""
        perf = {
            "p2p": name, "p2p_sn": len(self.lines), "p2p_peer": peer, "p2p_msg_size_bytes": size,
            "p2p_exec_time_us": us, "p2p_timing_source": "kernel_gpu", **self._trace("p2p", at, us),
        }  # fmt: skip
        return self.line("p2p_perf", perf)

    def line(
        self, kind: str, content: dict[str, Any], communicator: str = WORLD, position: int | None = None,
        ranks: int | None = None,
    ) -> InspectorFile:  # fmt: skip
        """Append a line, with the marker before it that version 4.3 has."""
        context = self.context(communicator, position, ranks)
        if self.version < "v4.3":
            self.lines.append({**context, kind: content})
            return self
        names = {"coll_perf": "coll_records", "p2p_perf": "p2p_records", "proxy_trace": "proxy_records"}
        counts = {name: int(name == names[kind]) for name in names.values()}
        self.lines += [{**context, "dump_stats": counts}, {kind: content}]
        return self

    def stats(self, coll: int, p2p: int = 0) -> InspectorFile:
        """Append how many calls were overwritten so far."""
        stats = {"coll_records": 0, "coll_dropped_total": coll, "p2p_records": 0, "p2p_dropped_total": p2p}
        self.lines.append({**self.context(), "dump_stats": stats})
        return self

    def _trace(self, prefix: str, at: int, us: float) -> dict[str, Any]:
        if not self.verbose:
            return {}
        begin = BASE_US + at
        kernels = [{"channel_id": n, "kernel_start_ts": begin + n, "kernel_stop_ts": begin + round(us)} for n in (1, 0)]
        trace = {f"{prefix}_start_ts": begin - 20, f"{prefix}_stop_ts": begin - 10, "kernel_events": kernels}
        return {"event_trace_ts": trace}

    def text(self) -> str:
        """Return the content of the file."""
        return "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in self.lines)

    def write(self, folder: Path, suffix: str = ".log") -> Path:
        """Write the file as the Inspector names it, compressed if the suffix says so."""
        path = folder / f"{self.host}-pid{self.pid}{suffix}"
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
        return path
