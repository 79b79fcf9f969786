"""The file of results: one section per benchmark, from which the README's tables are made."""

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

from commtrace.process_setup.processor_limits import usable_cores

FILE = Path(__file__).with_name("results.json")
QUICK_PAIRS = 2


def parser(
    description: str | None, *, pairs: int | None = None, settle: float | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", default="", help="measure only what contains this text in its name")
    if pairs is not None:
        made.add_argument("--pairs", type=int, default=pairs, help=f"rounds of each comparison, 2 or more ({pairs})")
    if settle is not None:
        made.add_argument(
            "--settle", type=float, default=settle, help=f"seconds between switching on and a block ({settle})"
        )
    made.add_argument("--quick", action="store_true", help="only test that it runs; the numbers are meaningless")
    made.add_argument("--results", type=Path, default=FILE, help="file to write to (%(default)s)")
    return made


def parsed(made: argparse.ArgumentParser, **quick: object) -> argparse.Namespace:
    """Return the options of the command line; with --quick, the values of `quick` replace theirs."""
    options = made.parse_args()
    if os.environ.get("COMMTRACE", "0") not in ("", "0"):
        made.error("COMMTRACE is set, so the bare side would be traced; unset it")
    if (options.quick or options.only) and options.results == FILE:
        made.error(f"{FILE.name} is only for complete measurements; with --quick or --only, give --results")
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
    """Write this benchmark's section to the file, and keep the other sections."""
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
    """Return the sections by benchmark."""
    sections: dict[str, Any] = json.loads(path.read_text())
    return sections


def rows(section: dict[str, Any]) -> list[Row]:
    """Return the rows of a section. Raise KeyError if one has an unknown field."""
    known = {field.name for field in fields(Row)}
    for row in section["rows"]:
        if unknown := set(row) - known:
            raise KeyError(f"unknown fields of a row: {', '.join(unknown)}")
    return [Row(**row) for row in section["rows"]]


def rounded(value: Any) -> Any:
    """Return a number rounded to six digits, because further ones are noise; also in lists."""
    if isinstance(value, (tuple, list)):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def machine() -> dict[str, object]:
    """Return the machine and the versions of a measurement."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        **gpu(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "deepspeed", "commtrace")},
    }


def cpu_model() -> str:
    """Return the CPU's name from /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def gpu() -> dict[str, str]:
    """Return the first GPU and its NCCL, if the benchmark has used one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(0), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def show(row: Row) -> None:
    """Print a row as soon as it is measured."""
    line = f"{row.case}: {row.name}: {row.side:.4g} {row.unit}"
    if row.bare is not None:
        line += f", bare {row.bare:.4g}, difference {row.difference:+.4g}, bare again {row.control_difference:+.4g}"
    if row.ratio is not None:
        line += f", ratio {row.ratio:.4f}, control {row.control:.4f}"
    print(line, flush=True)
