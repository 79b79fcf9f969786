"""Statements keep their values: they are merged by these, copied to other processes, and stored with packed logs."""

from __future__ import annotations

import json
import pickle

import pytest

from commtrace.statements import (
    Quantity,
    Statement,
    merge_statements,
    merge_texts,
    statement_fields,
    statement_of_fields,
)

CUT = Statement("cut after {:,} of {} ({})", 1_234, Quantity(5_678, "record"), "{braces} 17")
LOSSES = Statement.joined(", ", [Statement("{} lost", 3), Statement("{} damaged", Quantity(1, "record"))])


def test_a_statement_is_its_text() -> None:
    assert CUT == "cut after 1,234 of 5,678 records ({braces} 17)"
    assert (LOSSES, LOSSES.values) == ("3 lost, 1 record damaged", (3, Quantity(1, "record")))
    assert Statement.joined(", ", []) == ""


@pytest.mark.parametrize("statement", [CUT, LOSSES])
def test_a_copy_has_the_values(statement: Statement) -> None:
    stored = statement_of_fields(json.loads(json.dumps(statement_fields(statement))))
    for copy in (pickle.loads(pickle.dumps(statement)), stored):
        assert isinstance(copy, Statement)
        assert (copy, copy.template, copy.values) == (statement, statement.template, statement.values)
    assert statement_of_fields(statement_fields("a text")) == "a text"


def test_only_numbers_that_differ_are_replaced() -> None:
    template = "{} of {} on {}"
    merged = merge_statements([Statement(template, number, Quantity(number, "call"), "node7") for number in (1, 22)])
    assert merged == "N of N calls on node7"
    assert merge_statements([Statement(template, number, Quantity(90, "call"), "x9") for number in (1, 2)]) == (
        "N of 90 calls on x9"
    )


def test_texts_of_many_ranks_are_merged_by_their_values() -> None:
    def statements(count: int) -> dict[str, list[int]]:
        lost: dict[str, list[int]] = {Statement("{} calls lost", number): [number] for number in range(count)}
        return lost | {Statement("{} calls lost on {}", 7, "node8"): [100], "8 calls lost": [200]}

    assert merge_texts(statements(3)) == statements(3)
    assert merge_texts(statements(40)) == {
        "N calls lost": [*range(8), *range(9, 40), 200],  # an equal text is the same key
        "7 calls lost on node8": [100],
    }
