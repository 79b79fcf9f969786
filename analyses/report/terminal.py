"""The report as text. Renders tables that exist, computes nothing, and prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich.console import RenderableType
from rich.text import Text

from commtrace.formatting import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_duration,
    format_plural,
    format_power_of_two,
    format_share,
)
from commtrace.reading.run import RecordedRun
from commtrace.text_tables import TextColumn, left_column, paragraph, text_table

from . import network, preface, theory

FEW_RANKS = 16
FEW_SIZES = 10

Cells = Callable[[Any], str]
Columns = dict[str, tuple[TextColumn, Cells]]


def render(
    run: RecordedRun, tables: Mapping[str, pd.DataFrame], width: int, *, sites: int = 10, letters: bool = True
) -> Iterator[RenderableType]:
    """The parts of the report, top to bottom, no line longer than `width`.

    `sites`: lines of code to show, 0: all. `letters`: more than ASCII may be used.
    """
    page = Page(tables, width, sites, "…" if letters else "...", "█" if letters else "#")
    yield from preface.render(run, tables, width)
    if not len(tables["volume_by_operation"]):
        return
    timed = (_no_times,) if run.simulated else (_times, _bandwidth)
    for section in (_operations, *_whole(tables), _roles, _phases, _steps, _theory, _sites, _sizes, *timed, _ranks):
        yield Text()
        yield from section(page)
    if "network" in tables:
        yield Text()
        yield heading(network.title(tables))
        yield from network.render(page)


@dataclass(frozen=True)
class Page:
    """What is rendered, and how."""

    tables: Mapping[str, pd.DataFrame]
    width: int
    sites: int
    dots: str
    bar: str

    def table(self, columns: Columns, frame: pd.DataFrame) -> RenderableType:
        """A frame's columns, each with its head and how its values are written."""
        rows = [
            [cells(value) for value, (_, cells) in zip(row, columns.values(), strict=True)]
            for row in frame[[*columns]].itertuples(index=False, name=None)
        ]
        return text_table([column for column, _ in columns.values()], rows, self.width, self.dots)


def heading(text: str) -> Text:
    """A section's title."""
    return Text(text, style="bold cyan")


_VOLUME: Columns = {
    "calls": (TextColumn("calls"), format_count),
    "payload_bytes": (TextColumn("payload"), format_bytes),
    "wire_bytes": (TextColumn("wire, at least"), format_bytes),
    "payload_share": (TextColumn("payload share"), format_share),
}


def _operations(page: Page) -> Iterator[RenderableType]:
    yield heading("By operation, sums over the ranks seen")
    yield page.table({"op": (left_column("operation"), str), **_VOLUME}, page.tables["volume_by_operation"])


def _whole(tables: Mapping[str, pd.DataFrame]) -> Iterator[Callable[[Page], Iterator[RenderableType]]]:
    """The section on the whole job, where there is one."""
    if len(tables["whole_job"]):
        yield _whole_job


def _whole_job(page: Page) -> Iterator[RenderableType]:
    yield heading("The whole job, simulated: each rank that was run counted for those that it stands for")
    columns: Columns = {"part": (left_column("part"), str), "op": (left_column("operation"), str), **_VOLUME}
    del columns["payload_share"]
    yield page.table(columns, page.tables["whole_job"])


def _no_times(page: Page) -> Iterator[RenderableType]:
    yield heading("Times")
    yield paragraph("There are none: this is a dry run, and nothing was sent.", page.width)


def _roles(page: Page) -> Iterator[RenderableType]:
    yield heading("By parallel dimension")
    frame = page.tables["volume_by_role_and_operation"]
    yield page.table({"role": (left_column("dimension"), str), "op": (left_column("operation"), str), **_VOLUME}, frame)


def _phases(page: Page) -> Iterator[RenderableType]:
    yield heading("By phase of the step")
    yield page.table({"phase": (left_column("phase"), str), **_VOLUME}, page.tables["volume_by_phase"])


def _steps(page: Page) -> Iterator[RenderableType]:
    steps, steady = page.tables["volume_by_step"], page.tables["steady_step"]
    start = steps.loc[steps["step"] < 0]
    if not len(steady):
        yield heading("By step")
        yield paragraph("No training step was seen: everything counts as start-up.", page.width)
        return
    yield heading(f"A training step, mean per rank seen: {_alike(steady)}")
    columns: Columns = {
        "op": (left_column("operation"), str),
        "calls_per_rank": (TextColumn("calls"), format_count),
        "payload_bytes_per_rank": (TextColumn("payload"), format_bytes),
        "wire_bytes_per_rank": (TextColumn("wire, at least"), format_bytes),
        "differing_steps": (TextColumn("differing steps", optional=True), format_count),
    }
    yield page.table(columns, steady)
    calls = format_plural(int(start["calls"].sum()), "call")
    payload = format_bytes(start["payload_bytes"].sum())
    yield paragraph(
        f"Start-up, before the first step: {calls}, payload {payload}, over all ranks.",
        page.width,
    )


def _alike(steady: pd.DataFrame) -> str:
    steps, differing = int(steady["steps"].iloc[0]), int(steady["differing_steps"].max())
    if steps == 1:
        return "there is one"
    return f"all {steps:,} are equal" if not differing else f"median of {steps:,}, {differing:,} differ"


def _theory(page: Page) -> Iterator[RenderableType]:
    yield heading("Measured against theory")
    yield from theory.render(page)


def _sites(page: Page) -> Iterator[RenderableType]:
    frame = page.tables["volume_by_site"]
    some = frame.head(page.sites) if page.sites else frame
    more = f", the first {len(some)} of {len(frame):,}" if len(some) < len(frame) else ""
    yield heading(f"By line of code{more}")
    columns: Columns = {
        "site": (left_column("line", shortenable=True), lambda site: site or "not recorded"),
        "op": (left_column("operation"), str),
        **_VOLUME,
    }
    columns["payload_share"] = (TextColumn("share"), format_share)
    columns["wire_bytes"] = (TextColumn("wire, at least", optional=True), format_bytes)
    yield page.table(columns, some)


def _sizes(page: Page) -> Iterator[RenderableType]:
    bins = page.tables["message_size_bins"]
    most = bins["calls"].max() if len(bins) else 1
    yield heading("Message sizes")
    bars = [page.bar * max(1, round(16 * calls / most)) for calls in bins["calls"]]
    spans = [_span(low, below) for low, below in zip(bins["from_bytes"], bins["below_bytes"], strict=True)]
    frame = bins.assign(span=spans, bar=bars)
    columns: Columns = {
        "op": (left_column("operation"), str),
        "span": (left_column("payload of a call"), str),
        "calls": (TextColumn("calls"), format_count),
    }
    yield page.table({**columns, "sum_bytes": (TextColumn("sum"), format_bytes), "bar": (left_column(""), str)}, frame)
    sizes = page.tables["message_sizes"].sort_values("sum_bytes", ascending=False, kind="stable")
    yield Text()
    yield heading(
        "Exact sizes" + (f", the first {FEW_SIZES} of {len(sizes):,} by sum" if len(sizes) > FEW_SIZES else "")
    )
    exact: Columns = {
        "op": (left_column("operation"), str),
        "payload_bytes": (TextColumn("bytes of a call"), format_count),
        "calls": (TextColumn("calls"), format_count),
    }
    yield page.table({**exact, "sum_bytes": (TextColumn("sum"), format_bytes)}, sizes.head(FEW_SIZES))


def _span(low: int, below: int) -> str:
    if below <= 2:
        return "0 B" if below == 1 else "1 B"
    return f"{format_power_of_two(low.bit_length() - 1)} to <{format_power_of_two(below.bit_length() - 1)}"


_MEASURES = {
    "in_call": "Time inside the call, as the host saw it",
    "waiting": "Time waiting for the end, where the program waited and the host saw the end",
    "to_completion": "Time from the call to its end, where the end was seen",
}


def _times(page: Page) -> Iterator[RenderableType]:
    frame = page.tables["host_time"]
    for number, (measure, title) in enumerate(_MEASURES.items()):
        if number:
            yield Text()
        yield heading(title)
        part = frame.loc[(frame["measure"] == measure)]
        if not part["calls_known"].sum():
            yield paragraph("Known for no call.", page.width)
            continue
        columns: Columns = {
            "op": (left_column("operation"), str),
            "calls_known": (TextColumn("known"), format_count),
            "calls_unknown": (TextColumn("not known"), format_count),
            **{f"{name}_ns": (TextColumn(name), format_duration) for name in ("p50", "p99", "max", "sum")},
        }
        yield page.table(columns, part)


def _bandwidth(page: Page) -> Iterator[RenderableType]:
    frame = page.tables["bandwidth"]
    yield heading("Bandwidth, GB/s (1e9 bytes), over calls whose end was seen")
    if not len(frame):
        yield paragraph("Known for no call.", page.width)
        return
    columns: Columns = {
        "op": (left_column("operation"), str),
        "end_seen_by": (left_column("end seen by"), str),
        "calls": (TextColumn("calls"), format_count),
        "payload_bytes": (TextColumn("payload"), format_bytes),
        "time_ns": (TextColumn("time"), format_duration),
        "algbw_gb_per_s": (TextColumn("algbw"), format_bandwidth),
        "busbw_gb_per_s": (TextColumn("busbw"), format_bandwidth),
    }
    yield page.table(columns, frame)
    if frame["end_seen_by"].isin(["wait", "poll"]).any():
        yield paragraph("A wait or a poll sees an end late: those bandwidths are lower bounds.", page.width)


def _ranks(page: Page) -> Iterator[RenderableType]:
    frame = page.tables["ranks"]
    yield heading("Balance of the ranks")
    if len(frame) > 1 and all(frame[column].nunique() == 1 for column in ("calls", "payload_bytes")):
        calls, payload = (
            format_plural(int(frame["calls"].iloc[0]), "call"),
            format_bytes(frame["payload_bytes"].iloc[0]),
        )
        yield paragraph(
            f"The {len(frame):,} ranks seen are alike: {calls} and a payload of {payload} each.", page.width
        )
        return
    columns: Columns = {
        "rank": (TextColumn("rank"), lambda rank: str(rank) if rank >= 0 else "-"),
        "calls": (TextColumn("calls"), format_count),
        "payload_bytes": (TextColumn("payload"), format_bytes),
        "wire_bytes": (TextColumn("wire, at least"), format_bytes),
        "training_payload_bytes": (TextColumn("in training steps"), format_bytes),
        "payload_of_median": (TextColumn("x median"), lambda value: "-" if pd.isna(value) else f"{value:.2f}"),
    }
    yield page.table(columns, _extremes(frame))
    if len(frame) > FEW_RANKS:
        half = FEW_RANKS // 2
        yield paragraph(
            f"The {half} ranks with the least payload and the {half} with the most, of {len(frame):,}.", page.width
        )


def _extremes(frame: pd.DataFrame) -> pd.DataFrame:
    if len(frame) <= FEW_RANKS:
        return frame
    ordered = frame.sort_values("payload_bytes", kind="stable")
    return pd.concat([ordered.head(FEW_RANKS // 2), ordered.tail(FEW_RANKS // 2)])
