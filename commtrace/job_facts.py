"""Facts that a log may lack: fields of the classes in `job_row`, built in a training process or read from a log.

    @dataclass(kw_only=True, eq=False, repr=False)
    class TiedRow(Facts):
        parameter: str = fact("Name of the parameter.")

    TiedRow(parameter="head.weight").to_json()  # {"parameter": "head.weight"}
    TiedRow.read({}).parameter                  # UnknownFactError: the job in the log has no parameter

Values are checked when they are read from a log that may be damaged. Hooks import this module, so it needs the
standard library only.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Final, TypeVar

FactsT = TypeVar("FactsT", bound="Facts")
Value = TypeVar("Value")


class UnknownFactError(Exception):
    """The log lacks a fact, or has a value of another type. The message is a reason, without a full stop."""


class Fact:
    """A field of `Facts`: what reads its value from a row, and describes it."""

    def __init__(self, meaning: str, absent: object) -> None:
        self.meaning = meaning
        self.absent = absent
        """Value of a row without this field; MISSING: unknown."""
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        """Take the name of the field."""
        self.name = name

    def __get__(self, facts: Facts | None, owner: type[Facts]) -> Any:
        """Return the value that the row has, checked. It is then an attribute, which hides this descriptor."""
        if facts is None:
            return self
        if self.name not in facts._row:
            if self.absent is MISSING:
                raise UnknownFactError(f"the job in the log has no {facts._path}{self.name}")
            return self.absent
        value = facts._row[self.name]
        try:
            checked = _checked(_types(owner)[self.name], value, f"{facts._path}{self.name}")
        except (ValueError, OverflowError):
            reason = f"the job in the log cannot be read ({facts._path}{self.name}: {value!s:.60})"
            raise UnknownFactError(reason) from None
        vars(facts)[self.name] = checked
        return checked


MISSING: Final[Any] = Fact("", None)
"""Value of a fact that is not known, which a row leaves out."""


def fact(meaning: str, *, absent: object = MISSING) -> Any:
    """Return a field of `Facts`.

    Args:
        meaning: What the value says, with its unit, as a sentence.
        absent: Value of a row that lacks the field; default: reading it raises UnknownFactError.
    """
    return Fact(meaning, absent)


class Facts:
    """Base of the classes of rows. Reading an attribute raises UnknownFactError if the row lacks it."""

    _row: Mapping[str, Any] = {}
    _path = ""

    def __post_init__(self) -> None:
        """Leave out the fields that were not given."""
        for name in [name for name, value in vars(self).items() if isinstance(value, Fact)]:
            del vars(self)[name]

    @classmethod
    def read(cls: type[FactsT], row: Mapping[str, Any], path: str = "") -> FactsT:
        """Return the facts of a row that was read from JSON; `path` precedes the names of fields in messages."""
        facts = cls.__new__(cls)
        facts._row, facts._path = row, path
        return facts

    def has(self, field: object) -> bool:
        """Return whether the row has a field, given as an attribute of the class, such as `JobRow.units`."""
        return isinstance(field, Fact) and (field.name in vars(self) or field.name in self._row)

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON has it, with the fields that its class does not know."""
        given = {name: _as_json(value) for name, value in vars(self).items() if not name.startswith("_")}
        return {**self._row, **given}


def fields_of(facts: type[Facts]) -> Mapping[str, Fact]:
    """Return the fields of a class by name, in the order of definition."""
    return {name: field for name, field in vars(facts).items() if isinstance(field, Fact)}


def known(read: Callable[[], Value]) -> Value | None:
    """Return what a function reads from a row, None if the log lacks it."""
    try:
        return read()
    except UnknownFactError:
        return None


_known_types: dict[type[Facts], Mapping[str, Any]] = {}


def _types(facts: type[Facts]) -> Mapping[str, Any]:
    """Return the types of a class's fields by name."""
    if facts not in _known_types:
        _known_types[facts] = typing.get_type_hints(facts)
    return _known_types[facts]


def _checked(kind: Any, value: Any, path: str) -> Any:
    """Return a JSON value in a field's type. Raise ValueError for a value of another type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is UnionType:
        return _first_of(arguments, value, path)
    if origin is list and isinstance(value, list):
        return [_checked(arguments[0], item, f"{path}.{number}") for number, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return value
    if origin is None and isinstance(kind, type):
        if issubclass(kind, Facts) and isinstance(value, Mapping):
            return kind.read(value, f"{path}.")
        if kind in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
            if kind(value) == value:
                return kind(value)
        elif kind in (bool, str, NoneType) and isinstance(value, kind):
            return value
    raise ValueError(value)


def _first_of(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    """Return a value in the first of several types that it has."""
    for kind in kinds:
        try:
            return _checked(kind, value, path)
        except ValueError:
            continue
    raise ValueError(value)


def _as_json(value: Any) -> Any:
    if isinstance(value, Facts):
        return value.to_json()
    return [_as_json(item) for item in value] if isinstance(value, list) else value
