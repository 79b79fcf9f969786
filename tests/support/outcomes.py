"""Outcomes of the tests in another library's suite."""

from __future__ import annotations

import unittest
from collections.abc import Iterator


def run(suite: unittest.TestSuite) -> dict[str, str]:
    """Run a suite and return each test's outcome by its name: passed, failures, errors or skipped."""
    by_test = dict.fromkeys(_names(suite), "passed")
    result = unittest.TestResult()
    suite.run(result)
    for outcome in ("failures", "errors", "skipped"):
        by_test.update((test.id(), outcome) for test, _ in getattr(result, outcome))
    return by_test


def _names(suite: unittest.TestSuite) -> Iterator[str]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _names(test)
        else:
            yield test.id()
