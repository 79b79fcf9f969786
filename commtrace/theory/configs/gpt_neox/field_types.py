"""Types of GPT-NeoX's settings, with the fix that an error message gives for a wrong value."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, WrapValidator
from pydantic import ValidatorFunctionWrapHandler as Handler

from commtrace.errors import ConfigError

from .yaml_files import Setting

BLOCK_FIX: Final = 'give a block of keys and values, such as {"stage": 1}'


class SettingError(ValueError):
    """Error in a setting that conflicts with others, or that is in a block without fields.

    Args:
        key: The wrong key; keys within blocks are joined by dots.
        fix: What the user can do.
    """

    def __init__(self, key: str, fix: str) -> None:
        super().__init__(fix)
        self.key = key


def refuse_settings(*wrong: tuple[object, str, str]) -> None:
    """Raise SettingError with the key and fix of the first condition that is true."""
    for is_wrong, key, fix in wrong:
        if is_wrong:
            raise SettingError(key, fix)


def with_fix(fix: str, *, is_number: bool = False) -> WrapValidator:
    """Replace pydantic's message about a wrong value with the fix. A number may be text ("1e-8"), but not a boolean."""

    def validate(value: Any, handler: Handler) -> Any:
        try:
            if is_number and isinstance(value, bool):
                raise ValueError(fix)
            return handler(float(value) if is_number and isinstance(value, str) else value)
        except ValueError as error:  # as pydantic's errors are
            raise ValueError(fix) from error

    return WrapValidator(validate)


number_with_fix: Final = partial(with_fix, is_number=True)


def choice(allowed: Mapping[str, str]) -> BeforeValidator:
    """Replace a name, in upper or lower case, with its value in `allowed`."""

    def validate(value: Any) -> str:
        name = str(value).lower()
        if name not in allowed:
            raise ValueError(f"choose from {', '.join(allowed)}")
        return allowed[name]

    return BeforeValidator(validate)


Flag = Annotated[bool, Field(strict=True), with_fix("give true or false")]
Count = Annotated[int, Field(ge=1), number_with_fix("give a whole number of at least 1")]
OptionalCount = Annotated[int | None, Field(ge=1), number_with_fix("give a whole number of at least 1")]
CountOrZero = Annotated[int, Field(ge=0), number_with_fix("give a whole number of at least 0")]
ParallelSize = Annotated[CountOrZero, AfterValidator(lambda size: max(size, 1))]
"""Ranks of a parallel dimension; GPT-NeoX takes 0 and 1 for a dimension that is not used."""
Number = Annotated[float, Field(ge=0, allow_inf_nan=False), number_with_fix("give a number of at least 0")]
Dropout = Annotated[float, Field(ge=0, le=0.999, allow_inf_nan=False), number_with_fix("give a number from 0 to 0.999")]
REQUIRED: Final[Any] = Field(None, validate_default=True)
"""Default of a required setting: it fails the field's validation, and the message has the fix."""


def config_error(error: ValidationError, settings: Mapping[str, Setting]) -> ConfigError:
    """Return the first error of a validation, with the file that set the key, the key, the value and the fix."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    path = cause.key.split(".") if isinstance(cause, SettingError) else [str(part) for part in first["loc"]]
    fix = str(cause)
    if first["type"] == "extra_forbidden":
        unknown = sorted(str(other["loc"][-1]) for other in error.errors() if other["type"] == "extra_forbidden")
        path, fix = path[:-1], f"unknown keys: {', '.join(unknown)}; leave them out"
    name, setting = ".".join(path), settings.get(path[0])
    value = None if setting is None else setting.value
    for key in path[1:]:
        value = value.get(key) if isinstance(value, dict) else None
    if setting is None:
        return ConfigError(f"{name} is not set in any of the files; {fix}")
    return ConfigError(f"{setting.source}: {name}: {value!r}; {fix}")
