"""Statements: texts about a run that keep their values, so that those of many ranks can be merged.

    cut = Statement("cut after {:,} of {:,} records", 100, 4096)
    cut                                        "cut after 100 of 4,096 records"
    cut.values                                 (100, 4096)

More than 32 statements that differ only in their numbers become one: "cut after N of 4,096 records".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from typing import Any, Final

from commtrace.formatting import MAX_SINGLE, format_plural
from commtrace.rank_ranges import format_ranks, shorten_rank_list


class _VaryingNumber(int):
    """A number that differs between merged statements."""

    def __format__(self, specification: str) -> str:
        return "N"


_VARYING: Final = _VaryingNumber(-1)


@dataclass(frozen=True)
class Quantity:
    """A number with its noun, as a value of a statement: "1 record", "2 records"."""

    number: int
    noun: str
    plural: str = ""

    def __str__(self) -> str:
        return format_plural(self.number, self.noun, self.plural)


class RankList(str):
    """Ranks as a value of a statement, which `shortened` abbreviates."""

    @classmethod
    def of(cls, ranks: Iterable[int]) -> RankList:
        """Return ranks as `format_ranks` writes them."""
        return cls(format_ranks(ranks))


class Statement(str):
    """A text with its values.

    Attributes:
        template: The text with a replacement field of `str.format` for each value.
        values: The values, in the order of their fields.
    """

    template: str
    values: tuple[int | str | Quantity, ...]

    def __new__(cls, template: str, *values: int | str | Quantity) -> Statement:
        """Return the text with its values filled in."""
        statement = super().__new__(cls, template.format(*values))
        statement.template, statement.values = template, values
        return statement

    def __reduce__(self) -> tuple[type[Statement], tuple[int | str | Quantity, ...]]:
        return Statement, (self.template, *self.values)

    @classmethod
    def joined(cls, separator: str, texts: Iterable[str]) -> Statement:
        """Return one statement of several texts, some of which may be statements."""
        parts = [text if isinstance(text, Statement) else cls("{}", text) for text in texts]
        return cls(separator.join(part.template for part in parts), *chain.from_iterable(part.values for part in parts))


def shortened(text: str) -> str:
    """Return the text of a statement in which rank lists of more than 16 ranges are abbreviated."""
    if not isinstance(text, Statement):
        return text
    values = (shorten_rank_list(value) if isinstance(value, RankList) else value for value in text.values)
    return Statement(text.template, *values)


def statement_fields(text: str) -> Any:
    """Return a text or statement as JSON values, for `statement_of_fields`."""
    if not isinstance(text, Statement):
        return text
    return [text.template, *([*astuple(value)] if isinstance(value, Quantity) else value for value in text.values)]


def statement_of_fields(fields: Any) -> str:
    """Return the text or statement of `statement_fields`."""
    if isinstance(fields, str):
        return fields
    template, *values = fields
    return Statement(template, *(Quantity(*value) if isinstance(value, list) else value for value in values))


def statement_kind(text: str) -> tuple[object, ...]:
    """Return what is equal for statements that differ only in numbers; for a plain text, the text."""
    if not isinstance(text, Statement):
        return (text,)
    return text.template, *(_kind_of_value(value) for value in text.values)


def _kind_of_value(value: int | str | Quantity) -> object:
    if isinstance(value, Quantity):
        return value.noun, value.plural
    return value if isinstance(value, str) else None


def merge_statements(texts: Sequence[str]) -> str:
    """Return one text for texts of one kind: "N" replaces the numbers that differ."""
    first = texts[0]
    if not isinstance(first, Statement):
        return first
    columns = zip(*(text.values for text in texts if isinstance(text, Statement)), strict=True)
    return Statement(first.template, *map(_merge_values, columns))


def _merge_values(values: Sequence[int | str | Quantity]) -> int | str | Quantity:
    first = values[0]
    if all(value == first for value in values):
        return first
    return Quantity(_VARYING, first.noun, first.plural) if isinstance(first, Quantity) else _VARYING


def merge_texts(ranks_by_text: Mapping[str, Iterable[int]]) -> dict[str, list[int]]:
    """Merge statements that differ only in numbers, and their ranks, if there are more than 32."""
    kinds: dict[object, list[str]] = {}
    for text in ranks_by_text:
        kinds.setdefault(statement_kind(text) if len(ranks_by_text) > MAX_SINGLE else text, []).append(text)
    return {
        merge_statements(texts): sorted({rank for text in texts for rank in ranks_by_text[text]})
        for texts in kinds.values()
    }
