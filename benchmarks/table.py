"""Write the tables of the cost of tracing from the file of results.

The README has the most important comparisons, docs/explanation/benchmarks.md has all.

python benchmarks/table.py
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import results
from measuring import A_CALL, PIECES, PROCESSOR, Row

ROOT = Path(__file__).parents[1]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "explanation" / "benchmarks.md"
HEADLINES = {"call_cost": ("all_reduce, fake group", "all_reduce after computation, fake group")}
"""Benchmarks of the README, and their cases there."""
BEGIN, END = "<!-- benchmarks -->\n", "<!-- /benchmarks -->\n"


def main() -> None:
    """Replace the tables between the markers of both pages."""
    sections = results.read(results.FILE)
    README.write_text(replaced(README.read_text(), headlines(sections)))
    PAGE.write_text(replaced(PAGE.read_text(), rendered(sections)))


def replaced(text: str, tables: str) -> str:
    """Return the text with these tables between its markers. Raise ValueError if it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"missing {BEGIN.strip()} and {END.strip()}, each on its own line")
    return before + begin + tables + end + after


def rendered(sections: dict[str, Any]) -> str:
    """Return all tables in Markdown."""
    parts = [
        paragraph(f"{title} (`{sections[name]['command']}`):") + "\n\n" + table(results.rows(sections[name]))
        for name, (title, table) in SECTIONS.items()
        if name in sections
    ]
    return "\n" + "\n\n".join([*parts, *machines(sections)]) + "\n\n"


def paragraph(text: str) -> str:
    """Return the text wrapped to the line length of the pages."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def headlines(sections: dict[str, Any]) -> str:
    """Return the README's tables."""
    return rendered(
        {
            name: {**sections[name], "rows": [row for row in sections[name]["rows"] if row["case"] in cases]}
            for name, cases in HEADLINES.items()
            if name in sections
        }
    )


def machines(sections: dict[str, Any]) -> list[str]:
    """Return a line for each machine, with the dates."""
    days: dict[str, set[str]] = {}
    for section in sections.values():
        days.setdefault(machine(section), set()).add(section["date"])
    return [f"Measured on {name}, on {', '.join(sorted(dates))}." for name, dates in days.items()]


def machine(section: dict[str, Any]) -> str:
    """Return the machine and versions of a section as text."""
    facts = section["machine"]
    versions = [f"{name} {facts[name]}" for name in ("python", "torch", "deepspeed") if facts.get(name)]
    return f"{facts['cores']} cores ({facts['cpu']}), {', '.join(versions)}"


def by_case(rows: Sequence[Row]) -> str:
    """Return a table with a line for each side, and a column for each case and its unit."""
    units, names = {row.case: row.unit for row in rows}, list(dict.fromkeys(row.name for row in rows))
    cells = {(row.case, row.name): comparison(row) for row in rows}
    header = ["", *(f"{case} ({unit})" for case, unit in units.items())]
    return markdown(header, [[name, *(cells.get((case, name), "") for case in units)] for name in names])


def own_cost(rows: Sequence[Row]) -> str:
    """Return a table of external and reported costs; a case's mean and 99th percentile are separate rows."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        line = lines.setdefault(f"{row.case}: {row.name.rpartition(': ')[0]}", [])
        if row.bare is not None:
            line.append(f"{number(row.bare)} ({signed(row.control_difference)})")
        line.append(number(row.side))
    header = ["us", "external (baseline repeated)", "reported mean", "reported 99th percentile"]
    return markdown(header, [[name, *line] for name, line in lines.items()])


def single(rows: Sequence[Row]) -> str:
    """Return a table with one number per line."""
    return markdown(["", rows[0].case], [[row.name, f"{number(row.side)} {row.unit}"] for row in rows])


def by_case_alone(rows: Sequence[Row]) -> str:
    """Return a table with a line for each case, and a column for each name."""
    names = list(dict.fromkeys(row.name for row in rows))
    cells = {(row.case, row.name): f"{number(row.side)} {row.unit}" for row in rows}
    cases = list(dict.fromkeys(row.case for row in rows))
    return markdown(["", *names], [[case, *(cells.get((case, name), "") for name in names)] for case in cases])


def scale(rows: Sequence[Row]) -> str:
    """Return a table with a line for each log, and a column for each command: seconds, and memory of all processes."""
    cells: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if not row.name.endswith(", processor"):
            cells.setdefault(row.case, {}).setdefault(row.name.removesuffix(", memory"), []).append(number(row.side))
    commands = list(dict.fromkeys(name for by_name in cells.values() for name in by_name))
    lines = [[case, *(", ".join(by_name.get(name, [])) for name in commands)] for case, by_name in cells.items()]
    return markdown(["s, MiB", *commands], lines)


def step_cost(rows: Sequence[Row]) -> str:
    """Return the tables of steps, of the pieces of them where a recorder runs, and of calls."""
    tables = [steps_table([row for row in rows if not row.case.endswith((PIECES, A_CALL))])]
    for suffix, caption, table in ((PIECES, PIECES_OF_STEPS, pieces_table), (A_CALL, CALLS_IN_STEPS, calls_table)):
        if any(compared_with(suffix, rows)):
            tables += [paragraph(f"{caption}:"), table(rows)]
    return "\n\n".join(tables)


PIECES_OF_STEPS = (
    "What it adds to the pieces of such steps in which code of commtrace runs, and to the step if nothing else becomes "
    "longer: processor time of the thread that trains, medians of each piece"
)
CALLS_IN_STEPS = "Of it, what it adds to a call until that returns, beside what the report of the same run states"


def alone(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Return the values that were not compared, by case and the end of their name."""
    return {(row.case, row.name.rpartition(": ")[2]): row.side for row in rows if row.ratio is None}


def compared_with(suffix: str, rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    """Yield the rows that were compared and whose case has this end, with the case without it."""
    for row in rows:
        if row.ratio is not None and row.case.endswith(suffix):
            yield row.case.removesuffix(suffix), row


def steps_table(rows: Sequence[Row]) -> str:
    """Return a table with a line for each training: what recording adds, each with its interval and the control's."""
    values = alone(rows)
    lines: dict[str, list[str]] = {}
    for row in rows:
        case = row.case.removesuffix(PROCESSOR)
        if row.ratio is not None:
            line = lines.setdefault(case, [case, f"{number(row.bare or 0)} ms"])
            line += [change(row.ratio, row.ratio_interval), change(row.control or 0, row.control_interval)]
    for case, line in lines.items():
        calls, reported, writing = (values[case, name] for name in ("calls", "as reported", "writing"))
        line += [f"{calls:.3g}", f"{number(reported)} us", f"{writing:.2f} %"]
    header = ["", "step", "recorded", "control", "processor time", "control", "calls", "a call, as reported", "writing"]
    return markdown(header, list(lines.values()))


def pieces_table(rows: Sequence[Row]) -> str:
    """Return a table with a line for each training: what recording adds to the pieces of a step where it runs."""
    values = alone(rows)
    lines = []
    for case, row in compared_with(PIECES, rows):
        step = values[row.case, "the step"]
        stated = values[row.case, "calls"] * values[f"{case}{A_CALL}", "as reported"] / 1e3
        (added, low, high), control = added_by(row), row.control_difference or 0
        share = f"{100 * added / step:+.2f} % ({100 * low / step:+.2f} to {100 * high / step:+.2f})"
        cells = [f"{number(row.bare or 0)} ms", f"{added:+.2f} ms ({low:+.2f} to {high:+.2f})", f"{control:+.2f} ms"]
        lines.append([case, *cells, f"{number(step)} ms", share, f"{100 * stated / added:.0f} %"])
    header = ["", "pieces", "recording adds", "control", "step", "of the step", "in calls, as reported"]
    return markdown(header, lines)


def added_by(row: Row) -> tuple[float, float, float]:
    """Return the difference of a row and its interval."""
    if row.bare is None or row.difference is None or row.ratio_interval is None:
        raise ValueError(f"{row.case}: no interval was measured")
    low, high = ((bound - 1) * row.bare for bound in row.ratio_interval)
    return row.difference, low, high


def calls_table(rows: Sequence[Row]) -> str:
    """Return a table with a line for each training: what recording adds to a call, and what the report states of it."""
    values = alone(rows)
    lines = []
    for case, row in compared_with(A_CALL, rows):
        stated, (added, low, high) = values[row.case, "as reported"], added_by(row)
        cells = [f"{number(added)} ({number(low)} to {number(high)})", number(row.control_difference or 0)]
        share = f"{100 * stated / added:.0f} %"
        lines.append([case, number(row.bare or 0), *cells, number(stated), share])
    header = ["", "a call, us", "recording adds, us", "control, us", "as reported, us", "of what it adds"]
    return markdown(header, lines)


def change(ratio: float, interval: tuple[float, float] | None) -> str:
    """Return a ratio as a change in percent, with its interval."""
    if interval is None:
        raise ValueError("no interval was measured")
    low, high = (f"{100 * (bound - 1):+.2f}" for bound in interval)
    return f"{100 * (ratio - 1):+.2f} % ({low} to {high})"


def log_size(rows: Sequence[Row]) -> str:
    """Return the tables of bytes per call and of the sizes of tables."""
    of_calls = [row for row in rows if row.case == rows[0].case]
    return f"{single(of_calls)}\n\n{by_case_alone(rows[len(of_calls) :])}"


def bench_loop(rows: Sequence[Row]) -> str:
    """Return the tables of times per call and of the errors of the fit."""
    compared = [row for row in rows if row.bare is not None]
    lines = [[row.case, number(row.bare or 0), number(row.side), spread(row), f"{row.control:.3f}"] for row in compared]
    times = markdown(
        ["", "hand-written loop, us", "commtrace bench, us", "bench / loop (quartiles)", "loop repeated / loop"], lines
    )
    return f"{times}\n\n{by_case_alone([row for row in rows if row.bare is None])}"


def comparison(row: Row) -> str:
    """Return the bare time and what is added, then the ratio and the control."""
    if row.bare is None or row.ratio is None or row.control is None:
        raise ValueError(f"{row.case}, {row.name}: nothing was compared")
    return f"{number(row.bare)} {signed(row.difference)}, {row.ratio:.3f} ({row.control:.3f})"


def spread(row: Row) -> str:
    """Return a ratio with its quartiles."""
    if row.ratio is None or row.ratio_quartiles is None:
        raise ValueError(f"{row.case}, {row.name}: nothing was compared")
    low, high = row.ratio_quartiles
    return f"{row.ratio:.3f} ({low:.2f}, {high:.2f})"


def signed(value: float | None) -> str:
    """Return a number as a term of a sum."""
    if value is None:
        raise ValueError("no difference was measured")
    return f"{'+' if value >= 0 else '-'} {number(abs(value))}"


def number(value: float) -> str:
    """Return a number with three digits, or with all digits of its integer part."""
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f}"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines])


SECTIONS: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "step_cost": (
        "What the native recorder adds to a training step, with 95 % intervals, beside other unrecorded steps as "
        "control; and the share of a core of the thread that writes the log",
        step_cost,
    ),
    "step_instructions": (
        "Thousands of instructions of the thread that trains in a step, baseline + overhead, ratio (control)",
        by_case,
    ),
    "mpi_cost": ("Time of an mpi4py call, baseline + overhead, ratio (control)", by_case),
    "call_cost": ("Time of a call, baseline + overhead, ratio (control)", by_case),
    "call_parts": ("Parts of a call in the Python recorder", single),
    "own_cost": ("The cost of a call, measured externally and as reported", own_cost),
    "startup": ("A Python process that never communicates", by_case),
    "log_size": ("Size on disk", log_size),
    "report": ("Time and memory of a report", by_case_alone),
    "across_ranks": ("Time and memory of analyses across 64 ranks on as many hosts", by_case_alone),
    "scale": ("Wall time and peak memory of commands on logs of many ranks or steps", scale),
    "large_scale": ("The same on logs of up to 100 million calls", scale),
    "live_view": ("`commtrace top` beside a job, and its start on a long log", by_case_alone),
    "bench_loop": ("`commtrace bench` and a hand-written loop, and its fit at held-out payloads", bench_loop),
}


if __name__ == "__main__":
    main()
