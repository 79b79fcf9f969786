"""Facts that a log may lack: fields of the classes in `job_row`, built in a training process or read from a log.

    class TiedRow(Facts):
        parameter: str = fact("Name of the parameter.")

    TiedRow(parameter="head.weight").to_json()  # {"parameter": "head.weight"}
    TiedRow.read({}).parameter                  # UnknownFactError: the job in the log has no parameter

Values are checked when they are read from a log that may be damaged. Hooks import this module, so it needs the
standard library only.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**options: object) -> Callable[[type], type]:
        """Return a decorator that changes nothing: only type checkers derive constructors from fields."""
        return lambda decorated: decorated


FactsT = TypeVar("FactsT", bound="Facts")
Value = TypeVar("Value")
Reader: TypeAlias = Callable[[Any, str], Any]
"""Returns a JSON value in the type of a field, given the path of the field. Raises ValueError for another type."""


class UnknownFactError(Exception):
    """The log lacks a fact, or has a value of another type. The message is a reason, without a full stop."""


class Fact:
    """A field of `Facts`: what reads its value from a row, and describes it."""

    def __init__(self, meaning: str, absent: object) -> None:
        self.meaning = meaning
        self.absent = absent
        """Value of a row without this field; MISSING: unknown."""
        self.name = ""
        self.reader: Reader | None = None
        """Reader of its type, from the first read of any field of its class on."""

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
        if self.reader is None:
            _prepare_readers(owner)
        assert self.reader is not None
        value, path = facts._row[self.name], f"{facts._path}{self.name}"
        try:
            checked = self.reader(value, path)
        except (ValueError, OverflowError):
            reason = f"the job in the log cannot be read ({path}: {value!s:.60})"
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


@dataclass_transform(eq_default=False, kw_only_default=True)
class Facts:
    """Base of the classes of rows. Reading an attribute raises UnknownFactError if the row lacks it."""

    _row: Mapping[str, Any] = {}
    _path = ""

    def __init__(self, **facts: Any) -> None:
        """Set the fields that are given and not MISSING."""
        unknown = facts.keys() - fields_of(type(self)).keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        vars(self).update((name, value) for name, value in facts.items() if value is not MISSING)

    @classmethod
    def read(cls: type[FactsT], row: Mapping[str, Any], path: str = "") -> FactsT:
        """Return the facts of a row that was read from JSON; `path` precedes the names of fields in messages."""
        facts = cls.__new__(cls)
        facts._row, facts._path = row, path
        return facts

    def has(self, field: object) -> bool:
        """Return whether the row has a field, given as an attribute of the class, such as `JobRow.units`."""
        return isinstance(field, Fact) and (field.name in vars(self) or field.name in self._row)

    def get(self, field: Value, default: Value) -> Value:
        """Return the value of a field, given as an attribute of the class; the default if the row lacks it."""
        return getattr(self, field.name) if isinstance(field, Fact) and self.has(field) else default

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON has it, with the fields that its class does not know."""
        given = {name: _as_json(value) for name, value in vars(self).items() if not name.startswith("_")}
        return {**self._row, **given}


_FIELDS: Final[dict[type[Facts], Mapping[str, Fact]]] = {}


def fields_of(facts: type[Facts]) -> Mapping[str, Fact]:
    """Return the fields of a class by name, in the order of definition."""
    known = _FIELDS.get(facts)  # hooks make rows in each step
    if known is None:
        known = _FIELDS[facts] = {name: field for name, field in vars(facts).items() if isinstance(field, Fact)}
    return known


def known(read: Callable[[], Value]) -> Value | None:
    """Return what a function reads from a row, None if the log lacks it."""
    try:
        return read()
    except UnknownFactError:
        return None


def _prepare_readers(facts: type[Facts]) -> None:
    kinds = typing.get_type_hints(facts)
    for name, field in fields_of(facts).items():
        field.reader = _reader(kinds[name])


def _reader(kind: Any) -> Reader:
    """Return the reader of a type: of JSON's scalars, of lists, of optional values and unions, or of `Facts`."""
    arguments = typing.get_args(kind)
    if isinstance(kind, UnionType):
        return functools.partial(_read_union, tuple(_reader(argument) for argument in arguments))
    if typing.get_origin(kind) is list:
        return functools.partial(_read_list, _reader(arguments[0]))
    if isinstance(kind, type) and issubclass(kind, Facts):
        return functools.partial(_read_facts, kind)
    if kind in (int, float):
        return functools.partial(_read_number, kind)
    return functools.partial(_read_instance, typing.get_origin(kind) or kind)


def _read_union(readers: Sequence[Reader], value: Any, path: str) -> Any:
    for read in readers:
        try:
            return read(value, path)
        except ValueError:
            continue
    raise ValueError(value)


def _read_list(read: Reader, value: Any, path: str) -> list[Any]:
    return [read(item, f"{path}.{number}") for number, item in enumerate(_read_instance(list, value, path))]


def _read_facts(kind: type[Facts], value: Any, path: str) -> Facts:
    return kind.read(_read_instance(dict, value, path), f"{path}.")


def _read_number(kind: type[int] | type[float], value: Any, path: str) -> int | float:
    """Return an int or a float, also from the other type if that loses nothing."""
    if type(value) is kind:
        return value
    if type(value) not in (int, float) or kind(value) != value:
        raise ValueError(value)
    return kind(value)


def _read_instance(kind: type, value: Any, path: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(value)
    return value


def _as_json(value: Any) -> Any:
    if isinstance(value, Facts):
        return value.to_json()
    return [_as_json(item) for item in value] if isinstance(value, list) else value
