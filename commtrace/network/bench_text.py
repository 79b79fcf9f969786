"""Results of `commtrace bench` as text, in the formats of nccl-tests and the OSU micro-benchmarks, and the fits.

The two formats have fixed columns instead of `commtrace.text_tables`, so that scripts that parse the output of those
programs can parse them, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from commtrace.formatting import format_bandwidth, format_bytes, format_plural, wrap_text
from commtrace.operations import OPERATIONS
from commtrace.text_tables import TextColumn, left_column, rendered_lines, text_table
from commtrace.volume import busbw_factor

from .bench_operations import BARRIER, ELEMENT_BYTES, POINT_TO_POINT, WINDOW
from .bench_results import BenchResults
from .fit import Fit
from .measuring import BenchRow

WIDE: Final = 130
"""Minimum width at which tables also have the spread and the fit."""

# (head, unit, width)
_NCCL_COLUMNS: Final = (
    ("size", "(B)", 9), ("count", "(elements)", 9), ("type", "", 5), ("redop", "", 5), ("root", "", 4),
    ("time", "(us)", 9), ("algbw", "(GB/s)", 7), ("busbw", "(GB/s)", 7), ("#wrong", "", 6),
)  # fmt: skip
_WIDE_COLUMNS: Final = (
    ("min", "(us)", 9), ("median", "(us)", 9), ("max", "(us)", 9), ("calls", "", 6), ("rounds", "", 6),
    ("fit", "(us)", 9), ("off", "", 7),
)  # fmt: skip


def results_lines(results: BenchResults, form: str = "auto", width: int = 80) -> Iterator[str]:
    """Yield a header, a table for each operation and group with its fit, and a table of all fits.

    Args:
        results: What was measured.
        form: "nccl", "osu", or "auto": "nccl" for torch's collectives, else "osu".
        width: Characters of the widest line, at least 72.
    """
    for text in _header(results):
        yield from wrap_text(f"# {text}", width, others="#   ")
    for fit in results.fits:
        rows = [row for row in results.rows if (row.op, row.ranks, row.hosts) == (fit.op, fit.ranks, fit.hosts)]
        messages = fit.op in POINT_TO_POINT or fit.op == BARRIER
        is_osu = form == "osu" or (form == "auto" and (messages or results.through == "mpi4py"))
        yield ""
        title = f"# {fit.op}, {fit.ranks} ranks on {format_plural(fit.hosts, 'host')}"
        yield from wrap_text(title, width, others="#   ")
        yield from _osu(rows) if is_osu else _nccl(rows, fit, wide=width >= WIDE)
        yield from wrap_text(f"# fit: {describe_fit(fit)}", width, others="#   ")
    yield ""
    yield from fit_lines(results.fits, width)


def _header(results: BenchResults) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in results.versions.items())
    if not results.is_own:
        yield f"{results.title}{f'; {versions}' if versions else ''}"
        yield "sizes as in nccl-tests; time: mean over the ranks of one round of calls; GB/s and MB/s are powers of ten"
        return
    yield f"commtrace bench: {results.title}, {results.date}"
    yield f"{results.machine['cores']} cores ({results.machine['cpu']}); {versions}"
    if results.environment:
        yield " ".join(f"{name}={value}" for name, value in results.environment.items())
    yield (
        "float32; sizes as in nccl-tests; time: of consecutive calls on the slowest rank, mean of the rounds; GB/s and "
        "MB/s are powers of ten"
    )
    if results.traced:
        yield "commtrace was recording: every time includes its cost"
    wrong = sum(row.wrong or 0 for row in results.rows)
    if wrong:
        yield f"WRONG: {wrong:,} elements had wrong values; see #wrong"


def _nccl(rows: Sequence[BenchRow], fit: Fit, *, wide: bool) -> Iterator[str]:
    columns = (*_NCCL_COLUMNS, *(_WIDE_COLUMNS if wide else ()))

    def line(first: str, cells: Sequence[str]) -> str:
        texts = [cell.rjust(width) for cell, (_, _, width) in zip(cells, columns, strict=False)]
        return (first + " ".join(texts)).rstrip()

    yield line("#", [head for head, _, _ in columns])
    yield line("#", [unit for _, unit, _ in columns])
    factor = busbw_factor(fit.op, fit.ranks) if fit.op not in POINT_TO_POINT else 1.0
    operation = OPERATIONS.get(fit.op)
    redop = "sum" if operation is not None and operation.reduces else "none"
    root = "0" if operation is not None and operation.is_rooted else "-1"
    for row in rows:
        algbw, expected = row.payload_bytes / row.avg_us / 1e3, fit.time_us(row.payload_bytes)
        cells = [
            str(row.payload_bytes), str(row.payload_bytes // ELEMENT_BYTES), "float", redop, root, _us(row.avg_us),
            f"{algbw:.2f}", "-" if factor is None else f"{algbw * factor:.2f}",
            "N/A" if row.wrong is None else str(row.wrong),
            _us(row.min_us), _us(row.median_us), _us(row.max_us), _count(row.calls), str(row.rounds), _us(expected),
            f"{expected / row.median_us - 1:+.1%}",
        ]  # fmt: skip
        yield line(" ", cells)


def _osu(rows: Sequence[BenchRow]) -> Iterator[str]:
    if rows[0].op in POINT_TO_POINT:
        is_window = rows[0].op == WINDOW
        yield f"{'# Size':<10}{'Bandwidth (MB/s)' if is_window else 'Latency (us)':>20}"
        for row in rows:
            yield f"{row.payload_bytes:<10}{row.payload_bytes / row.avg_us if is_window else row.avg_us:>20.2f}"
    else:
        heads = ("Avg Latency(us)", "Min Latency(us)", "Max Latency(us)", "Iterations")
        yield f"{'# Size':<10}" + "".join(f"{head:>17}" for head in heads)
        for row in rows:
            ranks = (row.rank_avg_us, row.rank_min_us, row.rank_max_us)
            times = "".join(f"{'-' if time is None else f'{time:.2f}':>17}" for time in ranks)
            yield f"{row.payload_bytes:<10}{times}{_count(row.calls and row.calls * row.rounds):>17}"


def describe_fit(fit: Fit) -> str:
    """Format a fit: "120 us + bytes / 1.2 GB/s of busbw; held-out error: median 4.1 %, worst 17 % at 64.0 KiB"."""
    pieces = []
    for number, piece in enumerate(fit.pieces):
        beta = piece.beta_us_per_byte
        rate = f" + bytes / {1e-3 / beta:.3g} GB/s of busbw" if beta else ""
        start = f" from {format_bytes(piece.from_bytes)} on" if number else ""
        pieces.append(f"{_us(piece.alpha_us)} us{rate}{start}")
    if fit.held_out_median is None or fit.held_out_worst is None:
        return f"{'; '.join(pieces)}; too few sizes to hold one out"
    errors = f"median {fit.held_out_median:.1%}, worst {fit.held_out_worst:.0%}".replace("%", " %")
    return f"{'; '.join(pieces)}; held-out error: {errors} at {format_bytes(fit.held_out_worst_bytes)}"


def fit_lines(fits: Sequence[Fit], width: int) -> list[str]:
    """Return the table of all fits, one line per fit."""
    heads = ("ranks", "hosts", "latency (us)", "busbw (GB/s)", "pieces", "median error", "worst")
    rows = [
        [
            fit.op, str(fit.ranks), str(fit.hosts), _us(fit.latency_us), format_bandwidth(fit.busbw_gb_per_s),
            str(len(fit.pieces)),
            *("-" if error is None else f"{error:.1%}" for error in (fit.held_out_median, fit.held_out_worst)),
        ]
        for fit in fits
    ]  # fmt: skip
    columns = [left_column("# operation"), *(TextColumn(head) for head in heads)]
    return rendered_lines(text_table(columns, rows, width), width)


def _count(calls: int | None) -> str:
    return "-" if calls is None else str(calls)


def _us(time: float) -> str:
    """Format microseconds with at most two decimals, fewer for longer times."""
    return f"{time:.2f}" if time < 1000 else f"{time:.1f}" if time < 100_000 else f"{time:.0f}"
