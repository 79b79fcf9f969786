"""A forecast as the text of `commtrace theory`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from commtrace.formatting import format_bytes, format_count, format_duration, format_plural, format_share
from commtrace.network.networks import Network
from commtrace.text_tables import TextColumn, left_column, rendered_lines, text_table

from .predicted_times import time_rows
from .predicted_volumes import Forecast, json_document, size_bin_rows, volume_rows

_WIDTH: Final = 400
"""Maximum characters in a line: tables have their natural width, whatever the terminal's."""


def text_lines(job: Forecast) -> Iterator[str]:
    """Yield the lines of a forecast, section by section."""
    document = json_document(job)
    model = f"{document['parameters']:,} parameters"
    if job.has_stages:
        stage_parameters = ", ".join(f"{elements:,}" for elements in document["stage_parameters"])
        model = f"stages of {stage_parameters} parameters a rank"
    batches = format_plural(document["gradient_accumulation_steps"], "micro-batch", "micro-batches")
    micro = f"{batches} of {format_plural(document['micro_batch_size'], 'sequence')} a step"
    yield f"{document['scheme']} on {format_plural(document['world_size'], 'rank')}: {model}, {micro}"
    yield from (f"assumed: {assumption}" for assumption in document["assumed"])
    yield ""
    yield "From the closed form to the expected calls: wire bytes of a rank's steady step"
    yield from _waterfall(document)
    yield ""
    yield "Calls of a rank, and the bytes of one rank and of all"
    ranks = "the stage's ranks" if job.has_stages else "all ranks"
    heads = ("when", "role", "operation", "calls", "payload", "wire (min)", f"{ranks}: payload", "wire (min)")
    yield from _table(heads, [_volume_cells(row) for row in volume_rows(job)], num_left=3)
    yield ""
    yield "Message sizes of a rank's steady step"
    rows = [
        (
            _with_stage(row, row["role"]),
            row["op"],
            f"{format_bytes(row['from_bytes'])} to {format_bytes(row['below_bytes'])}",
            format_count(row["calls"]),
            format_bytes(row["sum_bytes"]),
        )
        for row in size_bin_rows(job)
    ]
    yield from _table(("role", "operation", "payload", "calls", "payload"), rows, num_left=3)


def json_times(job: Forecast, network: Network) -> dict[str, Any]:
    """Return the keys that a network adds to the JSON document."""
    return {"network": {"name": network.name, "about": [*network.about]}, "times": [*time_rows(job, network)]}


def text_times(job: Forecast, network: Network) -> Iterator[str]:
    """Yield the lines on times on a network."""
    rows = [*time_rows(job, network)]
    yield ""
    yield f"Communication time of a rank on the network {network.name}: sums, as if no call overlapped anything"
    yield from (f"  {line}" for line in network.about)
    yield f"  ranks fill nodes of {network.ranks_per_node}, one after the other; tensor parallelism innermost"
    heads = ("when", "role", "operation", "calls", "latency", "bandwidth", "time", "how")
    yield from _table(heads, [_time_cells(row) for row in rows], num_left=3)
    without_time = sum(row["calls_without_time"] for row in rows if row["op"] != "all")
    if without_time:
        calls = format_plural(without_time, "call")
        yield f"  {calls} without a time: the network's file has no numbers for their operation"


def _time_cells(row: dict[str, Any]) -> tuple[str, ...]:
    microseconds = (row[name] for name in ("latency_us", "bandwidth_us", "time_us"))
    times = (format_duration(None if time is None else time * 1e3) for time in microseconds)
    return (_with_stage(row, row["when"]), row["role"], row["op"], format_count(row["calls"]), *times, row["how"] or "")


def _waterfall(document: dict[str, Any]) -> Iterator[str]:
    stages: dict[int | None, list[dict[str, Any]]] = {}
    for row in document["waterfall"]:
        stages.setdefault(row.get("stage"), []).append(row)
    for stage, rows in stages.items():
        closed_form, total = rows[0]["wire_bytes"], sum(row["wire_bytes"] for row in rows)
        cells: list[tuple[str, str, str]] = []
        for row in (*rows, {"label": "expected calls", "wire_bytes": total}):
            sign = "+" if cells and row["wire_bytes"] > 0 and row["label"] != "expected calls" else ""
            share = format_share(row["wire_bytes"] / closed_form) if closed_form else "-"
            cells.append((row["label"], sign + format_bytes(row["wire_bytes"]), share))
        head = "" if stage is None else f"stage {stage}"
        yield from _table((head, "wire (min)", "of closed form"), cells, num_left=1)


def _with_stage(row: dict[str, Any], text: str) -> str:
    return f"stage {row['stage']}: {text}" if "stage" in row else text


def _volume_cells(row: dict[str, Any]) -> tuple[str, ...]:
    calls = format_count(row["calls"])
    if row["calls_max"] is not None and row["calls_max"] != row["calls"]:
        calls += f" (at most {format_count(row['calls_max'])})"
    names = ("payload_bytes", "wire_bytes", "all_ranks_payload_bytes", "all_ranks_wire_bytes")
    volumes = (format_bytes(row[name]) for name in names)
    return (_with_stage(row, row["when"]), row["role"], row["op"], calls, *volumes)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int) -> Iterator[str]:
    """Yield the lines of a table whose first `num_left` columns are aligned left."""
    columns = [left_column(head) if position < num_left else TextColumn(head) for position, head in enumerate(heads)]
    yield from (f"  {line}".rstrip() for line in rendered_lines(text_table(columns, rows, _WIDTH, ""), _WIDTH))
