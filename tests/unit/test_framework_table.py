"""The table of programs on the page about frameworks is that of the recorded results, which are as expected."""

from __future__ import annotations

import json

import framework_table
import pytest
from checkout_purposes import PROGRAMS

RESULTS = json.loads((framework_table.PAGE.parents[2] / framework_table.SOURCE).read_text())


def test_the_page_has_the_recorded_results() -> None:
    page = framework_table.PAGE.read_text()
    assert framework_table.with_table(page) == page


@pytest.mark.parametrize("command", RESULTS)
def test_recorded_results_are_as_stated(command: str) -> None:
    program, result = PROGRAMS[command], RESULTS[command]
    assert result["dimensions"] == program.dimensions.split()
    assert [result[fact] for fact in ("steps", "rules", "dry_run")] == [program.steps, program.rules, program.dry_run]
    assert [result[fact] for fact in ("equal", "unchanged", "unexplained_bytes")] == [True, True, 0]
    assert result["rules"] in (0, 3)
