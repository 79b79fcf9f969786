"""Results of the version matrix, and their table in docs/versions.md, which `python version_results.py` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = _ROOT / "tests/versions/results.json"
WHEELS: Final = _ROOT / "tests/versions/wheels.json"
"""What wheels/check_wheel.py wrote."""
NEWEST: Final = _ROOT / "tests/versions/newest.json"
"""What tests/versions/newest.py wrote."""
PAGE: Final = _ROOT / "docs/versions.md"
PACKAGES: Final = ("torch", "deepspeed", "python", "numpy", "pandas", "mpi4py")
_TABLES: Final = ("results", "wheels", "newest")
_END: Final = "<!-- end -->"
_VERDICTS: Final = {0: "as expected", 1: "differs", 3: "not compared"}


def key(versions: Mapping[str, str]) -> tuple[str, ...]:
    """Return what identifies a row: its versions without local parts, and only the minor version of Python."""
    known = {**versions, "python": ".".join(versions["python"].split(".")[:2])}
    return tuple(known.get(package, "-").partition("+")[0] for package in PACKAGES)


def read() -> list[dict[str, Any]]:
    """Return the recorded results."""
    results: list[dict[str, Any]] = json.loads(RESULTS.read_text())
    return results


def record(result: dict[str, Any]) -> None:
    """Store a result in place of an older one with the same versions, and write the table."""
    kept = [other for other in read() if key(other["versions"]) != key(result["versions"])]
    ordered = sorted([*kept, result], key=lambda row: [int(part) for part in key(row["versions"])[0].split(".")])
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text()))


def with_table(page: str) -> str:
    """Return the page with the tables of the results."""
    for name, lines in zip(_TABLES, (_matrix(), _wheels(), _newest()), strict=True):
        page = replace_table(page, f"tests/versions/{name}.json", lines)
    return page


def replace_table(page: str, source: str, lines: Sequence[Sequence[str]]) -> str:
    """Return a page with new lines, of which the first is the head, in its table that is made from a file."""
    begin = f"<!-- made from {source} -->"
    before, rest = page.split(begin)
    table = "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], ["---"] * len(lines[0]), *lines[1:]])
    return f"{before}{begin}\n\n{table}\n\n{_END}{rest.partition(_END)[2]}"


def _matrix() -> list[list[str]]:
    zero = (f"ZeRO-{n}" for n in range(4))
    head = [*PACKAGES, "date", "calls, Python", "calls, native", "DDP", "FSDP2", *zero, "MPI"]
    return [head, *map(_line, read())]


def _wheels() -> list[list[str]]:
    lines = [["torch", "python", "machine", "C library", "date", "calls, native", "MPI, both"]]
    for result in json.loads(WHEELS.read_text()):
        versions = result["versions"]
        libc, cells = result["libc"], _cells(result["cells"])
        lines.append(
            [versions["torch"], versions["python"], result["machine"], libc, result["date"], cells, _mpi(result["mpi"])]
        )
    return lines


def _newest() -> list[list[str]]:
    result = json.loads(NEWEST.read_text())
    lines = [[*result["versions"], "date", *result["suites"]]]
    suites = [
        f"{suite['passed']}/{suite['passed'] + len(suite['failed'])}{''.join(f'; {name}' for name in suite['failed'])}"
        for suite in result["suites"].values()
    ]
    return [*lines, [*result["versions"].values(), result["date"], *suites]]


def _line(result: dict[str, Any]) -> list[str]:
    cells = [_cells(result["cells"][recorder]) for recorder in ("python", "native")]
    engines = ("ddp", "fsdp2", "0", "1", "2", "3")
    trainings = [_training(result["trainings"].get(engine)) for engine in engines]
    return [*key(result["versions"]), result["date"], *cells, *trainings, _mpi(result.get("mpi"))]


def _mpi(tests: dict[str, int] | None) -> str:
    return "not run" if tests is None else f"{tests['passed']}/{sum(tests.values())}"


def _cells(cells: dict[str, Any]) -> str:
    return "error" if "error" in cells else f"{cells['right']}/{cells['of']}"


def _training(training: dict[str, Any] | None) -> str:
    if training is None or "unsupported" in training:
        return "not run" if training is None else "fails untraced"
    verdicts = ", ".join(sorted({_VERDICTS[status] for status, _ in training["check"].values()}))
    runs = training.get("untraced_results", 1)
    if runs > 1:
        equal = f"equal to one of {runs}" if training["equal"] else "losses vary between"
        return f"{verdicts}; {equal} untraced"
    return verdicts if training["equal"] else f"LOSSES DIFFER; {verdicts}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
