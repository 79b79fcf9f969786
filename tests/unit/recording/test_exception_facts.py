"""What is kept of exceptions: places and literal texts, never data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commtrace.recording.exception_facts import describe

SECRET = "hunter2correcthorse"


def facts_of(work: Callable[[], object]) -> dict[str, Any]:
    try:
        work()
    except BaseException as error:
        return describe(error)
    raise AssertionError("no exception")


def formatted() -> None:
    value = [3.25, SECRET]
    raise ValueError(f"bad value {value} in the batch of {SECRET}")


def concatenated() -> None:
    raise RuntimeError("token is " + SECRET)


def passed_on(text: str = SECRET) -> None:
    raise RuntimeError(text)


def a_key() -> None:
    json.loads('{"a": 1}')[SECRET]


def a_number() -> None:
    int(SECRET)


def a_file() -> None:
    Path(f"/nowhere/{SECRET}").read_text()


class OddError(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


def odd() -> None:
    raise OddError


@pytest.mark.parametrize(
    ("work", "kind", "message"),
    [
        (formatted, "ValueError", "bad value ... in the batch of ..."),
        (concatenated, "RuntimeError", "token is ..."),
        (passed_on, "RuntimeError", ""),
        (a_key, "KeyError", ""),
        (a_number, "ValueError", "invalid literal for int ... with base ..."),
        (odd, "OddError", ""),
    ],
)
def test_a_message_has_no_data(work: Callable[[], object], kind: str, message: str) -> None:
    facts = facts_of(work)
    assert facts["type"].rpartition(".")[2] == kind
    assert facts["message"] == message
    assert SECRET not in json.dumps(facts)


def test_no_path_of_a_missing_file_is_kept() -> None:
    facts = facts_of(a_file)
    assert facts["type"] == "FileNotFoundError"
    assert SECRET not in json.dumps(facts)
    # The innermost lines are in Python's own library: the program's line is marked.
    own = facts["lines"][facts["at"]]
    assert (own["file"], own["function"]) == (__file__, "a_file")


@pytest.mark.parametrize("name", ["password", "API_KEY", "secret", "Bearer", "access token", "credentials"])
def test_nothing_after_the_name_of_a_secret_is_kept(name: str) -> None:
    def work() -> None:
        b"x".decode(f"codec with {name} correcthorse")

    assert "correcthorse" not in json.dumps(facts_of(work))


def test_an_exception_from_deep_within_libraries_keeps_the_line_of_the_program() -> None:
    def recursive(depth: int) -> int:
        return json.loads("[") if depth == 0 else recursive(depth - 1)

    facts = facts_of(lambda: recursive(20))
    assert len(facts["lines"]) <= 8
    assert facts["lines"][facts["at"]]["file"] == __file__
