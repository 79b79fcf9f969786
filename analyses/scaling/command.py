"""`commtrace scaling`."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from commtrace.analyses.report.command import NARROWEST

if TYPE_CHECKING:
    from rich.console import RenderableType

    from commtrace.analyses.fold import NamedTables

VERSION: Final = 1


class Command:
    """Compare runs of one program on more and more ranks, and say what stops the scaling.

    For each run: the time of a training step, speedup and efficiency against the run with the fewest ranks, tokens a
    second, where the time of a step goes (computation, communication, waiting for ranks that are late), and what a rank
    sends, beside what theory expects of the job. Then Amdahl's law, and a model of latency and bandwidth, with their
    errors, and what they say of more ranks. Steps are those that the program marks, or that commtrace finds.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument(
            "directories",
            metavar="DIR",
            type=Path,
            nargs="+",
            help="what COMMTRACE named, one for each run; two or more",
        )
        parser.add_argument(
            "--tokens",
            metavar="N",
            type=_positive,
            action="append",
            help="tokens of a step of the whole job, where the log does not say; once, or for each run in turn",
        )
        form = parser.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help="all tables, with exact numbers, as one JSON document")
        form.add_argument(
            "--html", metavar="FILE", type=Path, help="write a page with figures to FILE; it needs no network"
        )
        parser.add_argument("--force", action="store_true", help="replace FILE if it exists")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the comparison, or write the page."""
        from commtrace.analyses.comparison import names_of
        from commtrace.reading.run import open_run

        from .tables import scaling

        runs = {name: open_run(path) for name, path in names_of(arguments.directories).items()}
        tables = scaling(runs, arguments.tokens)
        if arguments.html is not None:
            from commtrace.analyses.report.html.page import page_of_scaling
            from commtrace.reading.output import whole_file

            from .words import sentences

            page = page_of_scaling(runs, tables, sentences(tables))
            with whole_file(arguments.html, force=arguments.force) as part:
                part.write_text(page, encoding="utf-8")
            print(f"{arguments.html}: {len(runs)} runs, to be opened in a browser")
        elif arguments.json:
            print(document(tables))
        else:
            _print(tables)
        return 0


def document(tables: NamedTables) -> str:
    """The tables as JSON, as `commtrace report --json` writes them, and the sentences."""
    from commtrace.analyses.report.document import plain

    from .words import sentences

    rows = {name: [plain(row) for row in table.to_dict("records")] for name, table in tables.items()}
    told = {"format": "commtrace-scaling", "version": VERSION, "tables": rows, "sentences": sentences(tables)}
    return json.dumps(told, indent=1, allow_nan=False)


def _print(tables: NamedTables) -> None:
    from rich.console import Console

    width = max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)
    console = Console(width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)
    for part in render(tables, width):
        console.print(part)


def render(tables: NamedTables, width: int) -> Iterator[RenderableType]:
    """The comparison as text of at most `width` columns."""
    from commtrace.analyses.fold import rows_of
    from commtrace.analyses.report.layout import Column, fit, paragraph, word
    from commtrace.analyses.report.units import count, known, share, size, time

    from .words import sentences

    def number(title: str, *, optional: bool = False) -> Column:
        return Column(title, optional=optional)

    def times(value: object) -> str:
        return f"{value:.2f}x" if known(value) else "-"

    table = tables["scaling"]
    yield "Speed"
    yield fit(
        [
            word("run", gives=True), number("ranks"), number("hosts", optional=True), number("steps"), number("a step"),
            number("speedup"), number("efficiency"), number("tokens/s"),
        ],
        [
            [
                row.run, count(row.ranks), count(row.hosts), count(row.steps), time(row.step_ns), times(row.speedup),
                share(row.efficiency), count(round(row.tokens_per_s)) if known(row.tokens_per_s) else "-",
            ]
            for row in rows_of(table)
        ],
        width, "...",
    )  # fmt: skip
    yield ""
    yield "Where the time of a step goes, means over the ranks"
    yield fit(
        [
            word("run", gives=True), number("ranks"), number("computing"), number("in communication"),
            number("of it, others late"), number("under way", optional=True), number("comm/compute"),
        ],
        [
            [
                row.run, count(row.ranks), time(row.compute_ns), time(row.blocked_ns), time(row.late_ns),
                time(row.in_flight_ns),
                f"{row.communication_per_compute:.2f}" if known(row.communication_per_compute) else "-",
            ]
            for row in rows_of(table)
        ],
        width, "...",
    )  # fmt: skip
    yield ""
    yield "What a rank sends in a step"
    yield fit(
        [
            word("run", gives=True), number("ranks"), number("calls"), number("payload"), number("wire, at least"),
            number("expected"), number("closed form"),
        ],
        [
            [
                row.run, count(row.ranks), count(round(row.calls, 1)), size(row.payload_bytes), size(row.wire_bytes),
                size(row.expected_wire_bytes), size(row.closed_form_bytes),
            ]
            for row in rows_of(table)
        ],
        width, "...",
    )  # fmt: skip
    projection = tables["scaling_projection"]
    if len(projection):
        yield ""
        yield "The model: computing, latency, bandwidth, waiting"
        yield fit(
            [
                number("ranks"), number("a step"), number("measured"), number("efficiency"), number("computing"),
                number("latency"), number("bandwidth"), number("waiting"),
            ],
            [
                [
                    count(row.ranks), time(row.step_ns), time(row.measured_ns) if known(row.measured_ns) else "not run",
                    share(row.efficiency), time(row.compute_ns), time(row.latency_ns), time(row.bandwidth_ns),
                    time(row.late_ns),
                ]
                for row in rows_of(projection)
            ],
            width, "...",
        )  # fmt: skip
    yield ""
    for sentence in sentences(tables):
        yield paragraph(sentence, width, first="- ")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


__all__: Sequence[str] = ["Command", "document", "render"]
