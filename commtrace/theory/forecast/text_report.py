"""A forecast as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from commtrace.formatting import format_bytes, format_count, format_duration, format_plural, format_share
from commtrace.network.networks import Network

from .predicted_times import time_rows
from .predicted_volumes import Forecast, json_document, size_bin_rows, volume_rows


def text_lines(found: Forecast) -> Iterator[str]:
    """The forecast, section by section."""
    told = json_document(found)
    model = f"{told['parameters']:,} parameters"
    if found.stages:
        each = ", ".join(f"{elements:,}" for elements in told["stage_parameters"])
        model = f"stages of {each} parameters a rank"
    batches = format_plural(told["gradient_accumulation_steps"], "micro-batch", "micro-batches")
    micro = f"{batches} of {format_plural(told['micro_batch_size'], 'sequence')} a step"
    yield f"{told['scheme']} on {format_plural(told['world_size'], 'rank')}: {model}, {micro}"
    yield from (f"assumed: {word}" for word in told["assumed"])
    yield ""
    yield "From the closed form to every call: wire bytes of a rank's step, once steps are alike"
    yield from _waterfall(told)
    yield ""
    yield "Calls of a rank, and the bytes of one rank and of all"
    every = "the stage's ranks" if found.stages else "all ranks"
    head = ("when", "role", "operation", "calls", "payload", "wire", f"{every}: payload", "wire")
    yield from table(head, [_volume(row) for row in volume_rows(found)], words=3)
    yield ""
    yield "Message sizes of a rank's step, once steps are alike"
    rows = [
        (
            _staged(row, row["role"]),
            row["op"],
            f"{format_bytes(row['from_bytes'])} to {format_bytes(row['below_bytes'])}",
            format_count(row["calls"]),
            format_bytes(row["sum_bytes"]),
        )
        for row in size_bin_rows(found)
    ]
    yield from table(("role", "operation", "size", "calls", "payload"), rows, words=3)


def json_times(found: Forecast, network: Network) -> dict[str, Any]:
    """What a network adds to the document."""
    return {"network": {"name": network.name, "about": [*network.about]}, "times": [*time_rows(found, network)]}


def text_times(found: Forecast, network: Network) -> Iterator[str]:
    """Times on a network, below the rest."""
    rows = [*time_rows(found, network)]
    yield ""
    yield f"Communication time of a rank on the network {network.name}: sums, as if no call overlapped anything"
    yield from (f"  {word}" for word in network.about)
    yield f"  ranks fill nodes of {network.ranks_per_node}, one after the other; tensor parallelism innermost"
    head = ("when", "role", "operation", "calls", "latency", "bandwidth", "time", "how")
    yield from table(head, [_time(row) for row in rows], words=3)
    without = sum(row["calls_without_time"] for row in rows if row["op"] != "all")
    if without:
        yield f"  {format_plural(without, 'call')} without a time: the network's file has nothing of their operation"


def _time(row: dict[str, Any]) -> tuple[str, ...]:
    parts = (row[name] for name in ("latency_us", "bandwidth_us", "time_us"))
    told = (format_duration(None if part is None else part * 1e3) for part in parts)
    return (_staged(row, row["when"]), row["role"], row["op"], format_count(row["calls"]), *told, row["how"] or "")


def _waterfall(told: dict[str, Any]) -> Iterator[str]:
    """One after the other of the stages, if there are any."""
    for stage in dict.fromkeys(row.get("stage", 0) for row in told["waterfall"]):
        rows = [row for row in told["waterfall"] if row.get("stage", 0) == stage]
        whole, total = rows[0]["wire_bytes"], sum(row["wire_bytes"] for row in rows)
        written = [
            (row["label"], ("+" if number and row["wire_bytes"] > 0 else "") + format_bytes(row["wire_bytes"]),
             format_share(row["wire_bytes"] / whole) if whole else "-")
            for number, row in enumerate(rows)
        ]  # fmt: skip
        written.append(("every call", format_bytes(total), format_share(total / whole) if whole else "-"))
        yield from table((f"stage {stage}" if "stage" in rows[0] else "", "wire", "of the formula"), written, words=1)


def _staged(row: dict[str, Any], words: str) -> str:
    return f"stage {row['stage']}: {words}" if "stage" in row else words


def _volume(row: dict[str, Any]) -> tuple[str, ...]:
    calls = format_count(row["calls"])
    if row["calls_max"] is not None and row["calls_max"] != row["calls"]:
        calls += f" (at most {format_count(row['calls_max'])})"
    numbers = ("payload_bytes", "wire_bytes", "all_ranks_payload_bytes", "all_ranks_wire_bytes")
    return (_staged(row, row["when"]), row["role"], row["op"], calls, *(format_bytes(row[name]) for name in numbers))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int) -> Iterator[str]:
    """Columns side by side; the first `words` of them stand left, the others right."""
    widths = [max(len(line[number]) for line in (head, *rows)) for number in range(len(head))]
    for line in (head, *rows):
        cells = [
            cell.ljust(width) if number < words else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()
