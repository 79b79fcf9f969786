"""Import of a trace beside the parse of its JSON alone, and a report from the traces of eight ranks beside TraceLens.

The traces are a public one, repeated to the size of a rank's step of a large model, once for each rank:

    python benchmarks/importing.py --trace TraceLens/tests/traces/b200/eager_trace.json.gz \\
        --tracelens VENV/bin/TraceLens_generate_multi_rank_collective_report_pytorch
"""

from __future__ import annotations

import argparse
import gzip
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import commands
import groups
import orjson
import results
from measuring import Row

RANKS: Final = 8
PARSE: Final = "import sys, orjson; orjson.loads(open(sys.argv[1], 'rb').read())"
_IDENTIFIERS: Final = ("correlation", "External id", "Ev Idx", "Record function id", "Python id", "Python parent id")
_APART: Final = 1 << 24
"""What identifiers of one repetition are apart from those of the next."""


def main() -> None:
    """Run the benchmark and write its results."""
    parser = results.parser(__doc__, pairs=5)
    parser.add_argument("--trace", type=Path, required=True, help="trace of torch.profiler")
    parser.add_argument("--megabytes", type=int, default=45, help="size of a rank's trace (default: %(default)s)")
    parser.add_argument("--tracelens", type=Path, help="TraceLens's command for the collectives of many ranks")
    options = results.parsed(parser, megabytes=2)
    results.write("importing", groups.run(imports, options, backend="fake"), options)


def imports(options: argparse.Namespace) -> list[Row]:
    """Return the rows."""
    with tempfile.TemporaryDirectory() as folder:
        return measured_in_turn(Path(folder), options)


def measured_in_turn(folder: Path, options: argparse.Namespace) -> list[Row]:
    """Return the rows of all sides, measured in turn."""
    traces = folder / "traces"
    traces.mkdir()
    for rank in range(RANKS):
        (traces / f"rank{rank}_trace.json").write_bytes(repeated(options.trace, rank, options.megabytes * 10**6))
    one = traces / "rank0_trace.json"
    case = f"trace of {one.stat().st_size / 1e6:.0f} MB"
    cases = f"{RANKS} of them"
    sides = {
        ("orjson alone", case): [sys.executable, "-c", PARSE, str(one)],
        ("commtrace import", case): commands.commtrace("import", one, "--out", folder / "log", "--force"),
        ("commtrace report", cases): commands.commtrace("report", traces),
    }
    if options.tracelens is not None:
        command = [str(options.tracelens), "--trace_dir", str(traces), "--world_size", str(RANKS)]
        command += ["--output_xlsx_path", str(folder / "out.xlsx")]
        sides["TraceLens", cases] = command
        sides["TraceLens, --use_multiprocessing", cases] = [*command, "--use_multiprocessing"]
    taken: Mapping[tuple[str, str], list[commands.Taken]] = {side: [] for side in sides}
    for _ in range(options.pairs):
        for side, argv in sides.items():
            taken[side].append(commands.measured(argv))
    made = []
    for (name, case), runs in taken.items():
        made.append(groups.shown(Row(case, name, "s", statistics.median(run.seconds for run in runs))))
        processor = statistics.median(run.processor for run in runs)
        made.append(groups.shown(Row(f"{case}, CPU time", name, "s", processor)))
        made.append(groups.shown(Row(f"{case}, memory", name, "MiB", max(run.mebibytes for run in runs))))
    return made


def repeated(path: Path, rank: int, size: int) -> bytes:
    """Return the trace of a rank, whose events are repeated one after the other until it has about `size` bytes."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        trace: dict[str, Any] = orjson.loads(file.read())
    events = [event for event in trace["traceEvents"] if "ts" in event]
    once = orjson.dumps(events)
    begin = min(event["ts"] for event in events)
    end = max(event["ts"] + event.get("dur", 0) for event in events if event.get("ph") == "X")
    info = {**trace.get("distributedInfo", {}), "rank": rank, "world_size": RANKS}
    times = max(1, round(size / len(once)))
    made = [shifted(event, number, number * (end - begin + 1)) for number in range(times) for event in events]
    others = [event for event in trace["traceEvents"] if "ts" not in event]
    return orjson.dumps({**trace, "distributedInfo": info, "traceEvents": [*others, *made]})


def shifted(event: Mapping[str, Any], number: int, time: float) -> dict[str, Any]:
    """Return an event of a repetition, `time` us later and with identifiers of its own."""
    arguments = {
        name: value + number * _APART if name in _IDENTIFIERS and isinstance(value, int) else value
        for name, value in event.get("args", {}).items()
    }
    made = {**event, "ts": event["ts"] + time, **({"args": arguments} if "args" in event else {})}
    return {**made, "id": event["id"] + number * _APART} if isinstance(event.get("id"), int) else made


if __name__ == "__main__":
    main()
