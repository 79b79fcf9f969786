"""The table of programs on the page about frameworks is that of the recorded results."""

from __future__ import annotations

import framework_table


def test_the_page_has_the_recorded_results() -> None:
    page = framework_table.PAGE.read_text()
    assert framework_table.with_table(page) == page
