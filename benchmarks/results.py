"""The file of results, a section per benchmark, from which the README's tables are made."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from measuring import Row

from commtrace.launchers import usable_cores

FILE = Path(__file__).with_name("results.json")
QUICK_PAIRS = 2


def parser(
    description: str | None, *, pairs: int | None = None, settle: float | None = None
) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", default="", help="measure only what has this in its name")
    if pairs is not None:
        made.add_argument("--pairs", type=int, default=pairs, help=f"rounds of each comparison, 2 or more ({pairs})")
    if settle is not None:
        made.add_argument(
            "--settle", type=float, default=settle, help=f"seconds from switching on to a block ({settle})"
        )
    made.add_argument("--quick", action="store_true", help="only show that it works: the numbers are worth nothing")
    made.add_argument("--results", type=Path, default=FILE, help="file to write to (%(default)s)")
    return made


def parsed(made: argparse.ArgumentParser, **quick: object) -> argparse.Namespace:
    """The options of the command line, these ones instead where it says --quick."""
    options = made.parse_args()
    if os.environ.get("COMMTRACE", "0") not in ("", "0"):
        made.error("COMMTRACE is set, so nothing here would be bare; unset it")
    if (options.quick or options.only) and options.results == FILE:
        made.error(f"--quick and --only: not into {FILE.name}, which is for the whole of it; give --results")
    if options.quick:
        for name, value in quick.items():
            setattr(options, name, value)
        if "pairs" in options:
            options.pairs = QUICK_PAIRS
        if "settle" in options:
            options.settle = 0.0
    if "pairs" in options and options.pairs < 2:
        made.error("--pairs: 2 or more")
    return options


def write(benchmark: str, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Put this benchmark's section into the file, and leave the others as they are."""
    sections = read(options.results) if options.results.exists() else {}
    sections[benchmark] = {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "rows": [{name: rounded(value) for name, value in asdict(row).items() if value is not None} for row in rows],
    }
    part = options.results.with_suffix(".part")
    part.write_text(json.dumps(dict(sorted(sections.items())), indent=2) + "\n")
    part.replace(options.results)


def read(path: Path) -> dict[str, Any]:
    """The sections by benchmark."""
    sections: dict[str, Any] = json.loads(path.read_text())
    return sections


def rows(section: dict[str, Any]) -> list[Row]:
    """Of a section. Raises KeyError for a row with a field that there is not."""
    known = {field.name for field in fields(Row)}
    for row in section["rows"]:
        if unknown := set(row) - known:
            raise KeyError(f"{', '.join(unknown)}: no such field of a row")
    return [Row(**row) for row in section["rows"]]


def rounded(value: Any) -> Any:
    """To six digits: the rest is noise."""
    if isinstance(value, (tuple, list)):
        return [rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def machine() -> dict[str, object]:
    """Where this was measured."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "deepspeed", "commtrace")},
    }


def cpu_model() -> str:
    """As the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def version(distribution: str) -> str | None:
    """Of what is installed here; None where it is not."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def show(row: Row) -> None:
    """A line on the terminal as soon as something is measured."""
    line = f"{row.case}: {row.name}: {row.side:.4g} {row.unit}"
    if row.bare is not None:
        line += f", bare {row.bare:.4g}, difference {row.difference:+.4g}, bare again {row.control_difference:+.4g}"
    if row.ratio is not None:
        line += f", ratio {row.ratio:.4f}, control {row.control:.4f}"
    print(line, flush=True)
