"""The table of programs in docs/how-to/frameworks.md, which `python tests/support/framework_table.py` writes.

Its source is what `tests/external/test_frameworks.py` recorded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from checkout_purposes import PROGRAMS
from version_results import replace_table

_ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = "tests/support/recorded/framework_programs.json"
PAGE: Final = _ROOT / "docs/how-to/frameworks.md"
_HEAD: Final = ("program", "ranks", "steps", "dimensions", "check", "dry run", "equal to untraced", "miss")


def with_table(page: str) -> str:
    """Return the page with the table of the recorded results: programs with a miss first."""
    results: dict[str, dict[str, Any]] = json.loads((_ROOT / SOURCE).read_text())
    commands = sorted(results, key=lambda command: (not PROGRAMS[command].miss, PROGRAMS[command].name))
    return replace_table(page, SOURCE, [_HEAD, *(_line(command, results[command]) for command in commands)])


def _line(command: str, result: Mapping[str, Any]) -> tuple[str, ...]:
    program = PROGRAMS[command]
    numbers = (program.ranks, result["steps"])
    statuses = (result["rules"], result["dry_run"] if result["unchanged"] else "files changed")
    cells = (", ".join(result["dimensions"]), *statuses, "yes" if result["equal"] else "no", program.miss or "-")
    return program.name, *map(str, (*numbers, *cells))


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
