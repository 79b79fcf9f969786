"""Results as text: as nccl-tests prints them, or as the OSU micro-benchmarks do; and what was fitted."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from commtrace.volume import busbw_factor

from .bench_results import BenchResults
from .fit import Fit
from .measuring import BenchRow
from .operations import BARRIER, ELEMENT_BYTES, PING_PONG, POINT_TO_POINT, ROOTED, SUMMED, WINDOW

FORMS: Final = ("auto", "nccl", "osu")
WIDE: Final = 130
"""Columns from which spread and fit stand in the table, too."""

_BYTES: Final = ("B", "KiB", "MiB", "GiB")


def results_lines(results: BenchResults, form: str = "auto", width: int = 80) -> Iterator[str]:
    """Header, a table for each operation and group with its fit below it, and all fits, in lines up to `width`."""
    yield from _header(results, width)
    for fit in results.fits:
        rows = [row for row in results.rows if (row.op, row.ranks, row.hosts) == (fit.op, fit.ranks, fit.hosts)]
        yield ""
        yield from _wrapped(f"# {fit.op}, {_group(fit)}", width)
        yield from (_osu if _is_osu(results, fit.op, form) else _nccl)(rows, fit, wide=width >= WIDE)
        yield from _wrapped(f"# fit: {describe_fit(fit)}", width)
    yield ""
    yield from fit_lines(results.fits)


def _header(results: BenchResults, width: int) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in results.versions.items())
    machine = f"{results.machine['cores']} cores of {results.machine['cpu']}"
    yield from _wrapped(f"# commtrace bench: {results.title}, {results.date}", width)
    yield from _wrapped(f"# {machine}; {versions}", width)
    if results.environment:
        yield from _wrapped(f"# {' '.join(f'{name}={value}' for name, value in results.environment.items())}", width)
    yield from _wrapped(
        "# float32; sizes are nccl-tests'; a time is the slowest rank's, of calls right after each other, mean of "
        "rounds; GB/s and MB/s are powers of ten",
        width,
    )
    if results.traced:
        yield from _wrapped("# commtrace was recording: what that costs is in every time", width)
    wrong = sum(row.wrong for row in results.rows)
    if wrong:
        yield from _wrapped(f"# WRONG: {wrong:,} elements were not what they must be; see #wrong", width)


def _is_osu(results: BenchResults, op: str, form: str) -> bool:
    return form == "osu" or (form == "auto" and (op in POINT_TO_POINT or op == BARRIER or results.through == "mpi4py"))


# --- nccl-tests -----------------------------------------------------------------------------------------------------

_NCCL: Final = (
    ("size", 9), ("count", 9), ("type", 5), ("redop", 5), ("root", 4), ("time", 9), ("algbw", 7), ("busbw", 7),
    ("#wrong", 6),
)  # fmt: skip
_UNITS: Final = ("(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "")
_MORE: Final = (("min", 9), ("median", 9), ("max", 9), ("calls", 6), ("rounds", 6), ("fit", 9), ("off", 7))


def _nccl(rows: Sequence[BenchRow], fit: Fit, *, wide: bool) -> Iterator[str]:
    widths = [width for _, width in (*_NCCL, *(_MORE if wide else ()))]
    yield _line("#", [name for name, _ in (*_NCCL, *(_MORE if wide else ()))], widths)
    yield _line("#", [*_UNITS, *(("(us)", "(us)", "(us)", "", "", "(us)", "") if wide else ())], widths)
    for row in rows:
        algbw, factor = row.payload_bytes / row.avg_us / 1e3, busbw_factor(_canonical(row.op), row.ranks)
        cells = [
            str(row.payload_bytes), str(row.payload_bytes // ELEMENT_BYTES), "float", "sum" if row.op in SUMMED else "none",
            "0" if row.op in ROOTED else "-1", _us(row.avg_us), f"{algbw:.2f}",
            "-" if factor is None else f"{algbw * factor:.2f}", str(row.wrong),
        ]  # fmt: skip
        expected = fit.time_us(row.payload_bytes)
        more = [
            _us(row.min_us), _us(row.median_us), _us(row.max_us), str(row.calls), str(row.rounds), _us(expected),
            f"{expected / row.median_us - 1:+.1%}",
        ]  # fmt: skip
        yield _line(" ", [*cells, *(more if wide else ())], widths)


def _canonical(op: str) -> str:
    return "send" if op in POINT_TO_POINT else op


# --- the OSU micro-benchmarks ---------------------------------------------------------------------------------------


def _osu(rows: Sequence[BenchRow], fit: Fit, *, wide: bool) -> Iterator[str]:
    if rows[0].op == WINDOW:
        yield f"{'# Size':<10}{'Bandwidth (MB/s)':>20}"
        yield from (f"{row.payload_bytes:<10}{row.payload_bytes / row.avg_us:>20.2f}" for row in rows)
    elif rows[0].op == PING_PONG:
        yield f"{'# Size':<10}{'Latency (us)':>20}"
        yield from (f"{row.payload_bytes:<10}{row.avg_us:>20.2f}" for row in rows)
    else:
        heads = ("Avg Latency(us)", "Min Latency(us)", "Max Latency(us)", "Iterations")
        yield f"{'# Size':<10}" + "".join(f"{head:>17}" for head in heads)
        for row in rows:
            times = "".join(f"{time:>17.2f}" for time in (row.rank_avg_us, row.rank_min_us, row.rank_max_us))
            yield f"{row.payload_bytes:<10}{times}{row.calls * row.rounds:>17}"


# --- fits -----------------------------------------------------------------------------------------------------------


def describe_fit(fit: Fit) -> str:
    """Format a fit: "120 us + bytes / 1.20 GB/s; held-out error: median 4.1 %, worst 17 % at 64 KiB"."""
    pieces = []
    for number, piece in enumerate(fit.pieces):
        beta = piece.beta_us_per_byte
        rate = f" + bytes / {1e-3 / beta:.3g} GB/s of busbw" if beta else ""
        pieces.append(f"{_us(piece.alpha_us)} us{rate}" + (f" from {size(piece.from_bytes)} on" if number else ""))
    return f"{'; '.join(pieces)}; {_error(fit)}"


def _error(fit: Fit) -> str:
    if fit.held_out_median is None or fit.held_out_worst is None or fit.held_out_worst_bytes is None:
        return "too few sizes to hold one out"
    worst = f"{fit.held_out_worst:.0%} at {size(fit.held_out_worst_bytes)}"
    return f"held-out error: median {fit.held_out_median:.1%}, worst {worst}".replace("%", " %")


def fit_lines(found: Sequence[Fit]) -> Iterator[str]:
    """All of them, a line each."""
    widths = [16, 6, 6, 11, 9, 7, 10, 9]
    heads = ("# operation", "ranks", "hosts", "latency", "busbw", "pieces", "held out:", "worst")
    yield _left(heads, widths)
    yield _left(("#", "", "", "(us)", "(GB/s)", "", "median", ""), widths)
    for fit in found:
        bandwidth = fit.busbw_gb_per_s
        errors = ["-" if error is None else f"{error:.1%}" for error in (fit.held_out_median, fit.held_out_worst)]
        rate = "-" if bandwidth is None else f"{bandwidth:.3g}"
        numbers = (str(fit.ranks), str(fit.hosts), _us(fit.latency_us), rate, str(len(fit.pieces)))
        yield _left((fit.op, *numbers, *errors), widths)


def _left(cells: Sequence[str], widths: Sequence[int]) -> str:
    numbers = zip(cells[1:], widths[1:], strict=True)
    return (cells[0].ljust(widths[0]) + "".join(cell.rjust(width) for cell, width in numbers)).rstrip()


def _line(first: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    return (first + " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))).rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="#   ", break_on_hyphens=False)


def _group(fit: Fit) -> str:
    return f"{fit.ranks} ranks on {fit.hosts} host{'s' * (fit.hosts != 1)}"


def _us(time: float) -> str:
    """Two digits behind the point of what is short, none of what is long."""
    return f"{time:.2f}" if time < 1000 else f"{time:.1f}" if time < 100_000 else f"{time:.0f}"


def size(payload: int) -> str:
    """In binary units: 65536 -> "64 KiB"."""
    number, unit = float(payload), 0
    while number >= 1024 and unit < len(_BYTES) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:.4g} {_BYTES[unit]}"
