"""`commtrace scaling`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .option_types import add_formats, positive_integer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from commtrace.analyses.engine import NamedTables

VERSION: Final = 1


class Command:
    """Compare runs of one program on more and more ranks, and say what stops the scaling.

    For each run: the time of a training step, speedup and efficiency against the run with the fewest ranks, tokens a
    second, the division of the step time (computation, communication, waiting for late ranks), and what a rank sends,
    compared with theory. Then fits of Amdahl's law and of a latency and bandwidth model, with their errors, and their
    predictions for more ranks. Steps are those that the program marks, or that commtrace detects.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument(
            "directories",
            metavar="DIR",
            type=Path,
            nargs="+",
            help="log directories, one for each run; two or more",
        )
        parser.add_argument(
            "--tokens",
            metavar="N",
            type=positive_integer,
            action="append",
            help="tokens of a step of the whole job, where the log does not have them; once, or once for each run",
        )
        add_formats(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the comparison, or write the page."""
        from commtrace.analyses.comparison import names_of
        from commtrace.analyses.scaling.scaling_tables import scaling
        from commtrace.run import open_run

        runs = {name: open_run(path) for name, path in names_of(arguments.directories).items()}
        tables = scaling(runs, arguments.tokens)
        if arguments.html is not None:
            from commtrace.analyses.report.html.page import page_of_scaling
            from commtrace.analyses.scaling.findings import sentences
            from commtrace.output_files import atomic_write

            page = page_of_scaling(runs, tables, sentences(tables))
            with atomic_write(arguments.html, force=arguments.force) as part:
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
    from commtrace.analyses.scaling.findings import sentences

    rows = {name: [plain(row) for row in table.to_dict("records")] for name, table in tables.items()}
    told = {"format": "commtrace-scaling", "version": VERSION, "tables": rows, "sentences": sentences(tables)}
    return json.dumps(told, indent=1, allow_nan=False)


def _print(tables: NamedTables) -> None:
    from commtrace.text_tables import console, terminal_width

    for part in render(tables, terminal_width()):
        console(terminal_width()).print(part)


def render(tables: NamedTables, width: int) -> Iterator[RenderableType]:
    """The comparison as text of at most `width` columns."""
    from commtrace.analyses.engine import rows_of
    from commtrace.analyses.scaling.findings import sentences
    from commtrace.formatting import format_bytes, format_count, format_duration, format_share, is_known
    from commtrace.text_tables import TextColumn, left_column, paragraph, text_table

    def number(title: str, *, optional: bool = False) -> TextColumn:
        return TextColumn(title, optional=optional)

    def times(value: object) -> str:
        return f"{value:.2f}x" if is_known(value) else "-"

    table = tables["scaling"]
    yield "Speed"
    yield text_table(
        [
            left_column("run", shortenable=True),
            number("ranks"),
            number("hosts", optional=True),
            number("steps"),
            number("a step"),
            number("speedup"),
            number("efficiency"),
            number("tokens/s"),
        ],
        [
            [
                row.run,
                format_count(row.ranks),
                format_count(row.hosts),
                format_count(row.steps),
                format_duration(row.step_ns),
                times(row.speedup),
                format_share(row.efficiency),
                format_count(round(row.tokens_per_s)) if is_known(row.tokens_per_s) else "-",
            ]
            for row in rows_of(table)
        ],
        width,
        "...",
    )
    yield ""
    yield "Where the time of a step goes, means over the ranks"
    yield text_table(
        [
            left_column("run", shortenable=True),
            number("ranks"),
            number("computing"),
            number("in communication"),
            number("of it, others late"),
            number("under way", optional=True),
            number("comm/compute"),
        ],
        [
            [
                row.run,
                format_count(row.ranks),
                format_duration(row.compute_ns),
                format_duration(row.blocked_ns),
                format_duration(row.late_ns),
                format_duration(row.in_flight_ns),
                f"{row.communication_per_compute:.2f}" if is_known(row.communication_per_compute) else "-",
            ]
            for row in rows_of(table)
        ],
        width,
        "...",
    )
    yield ""
    yield "What a rank sends in a step"
    yield text_table(
        [
            left_column("run", shortenable=True),
            number("ranks"),
            number("calls"),
            number("payload"),
            number("wire, at least"),
            number("expected"),
            number("closed form"),
        ],
        [
            [
                row.run,
                format_count(row.ranks),
                format_count(round(row.calls, 1)),
                format_bytes(row.payload_bytes),
                format_bytes(row.wire_bytes),
                format_bytes(row.expected_wire_bytes),
                format_bytes(row.closed_form_bytes),
            ]
            for row in rows_of(table)
        ],
        width,
        "...",
    )
    projection = tables["scaling_projection"]
    if len(projection):
        yield ""
        yield "The model: computing, latency, bandwidth, waiting"
        yield text_table(
            [
                number("ranks"),
                number("a step"),
                number("measured"),
                number("efficiency"),
                number("computing"),
                number("latency"),
                number("bandwidth"),
                number("waiting"),
            ],
            [
                [
                    format_count(row.ranks),
                    format_duration(row.step_ns),
                    format_duration(row.measured_ns) if is_known(row.measured_ns) else "not run",
                    format_share(row.efficiency),
                    format_duration(row.compute_ns),
                    format_duration(row.latency_ns),
                    format_duration(row.bandwidth_ns),
                    format_duration(row.late_ns),
                ]
                for row in rows_of(projection)
            ],
            width,
            "...",
        )
    yield ""
    for sentence in sentences(tables):
        yield paragraph(sentence, width, first="- ")


__all__: Sequence[str] = ["Command", "document", "render"]
