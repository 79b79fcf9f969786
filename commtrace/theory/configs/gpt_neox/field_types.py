"""Types of GPT-NeoX's settings, with the error messages for wrong values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, WrapValidator
from pydantic import ValidatorFunctionWrapHandler as Handler

from commtrace.errors import ConfigError

from .yaml_files import Setting

NOT_A_BLOCK: Final = "it must be a block of keys and values"
"""Error message for a setting that is not a block."""


class SettingError(ValueError):
    """Error in a setting that is not supported, conflicts with others, or is in a block without fields.

    Args:
        key: The wrong key; keys within blocks are joined by dots.
        message: What is wrong with its value, or what to do.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def raise_first_failed(*checks: tuple[object, str, str]) -> None:
    """Raise SettingError for the first check that failed.

    Args:
        checks: Of each check, whether it failed, the key, and the error message.
    """
    for has_failed, key, message in checks:
        if has_failed:
            raise SettingError(key, message)


def with_message(message: str, *, is_number: bool = False) -> WrapValidator:
    """Return a validator that replaces pydantic's message about a wrong value.

    Args:
        message: The message.
        is_number: Whether the value is a number. It may be text ("1e-8"), but not a boolean.
    """

    def validate(value: Any, handler: Handler) -> Any:
        try:
            if is_number and isinstance(value, bool):
                raise ValueError(message)
            return handler(float(value) if is_number and isinstance(value, str) else value)
        except ValueError as error:  # pydantic's ValidationError is a ValueError
            raise ValueError(message) from error

    return WrapValidator(validate)


number_with_message: Final = partial(with_message, is_number=True)


def choice(allowed: Mapping[str, str]) -> BeforeValidator:
    """Return a validator that replaces a name, in upper or lower case, with its value in `allowed`."""

    def validate(value: Any) -> str:
        name = str(value).lower()
        if name not in allowed:
            raise ValueError(f"choose from {', '.join(allowed)}")
        return allowed[name]

    return BeforeValidator(validate)


Boolean = Annotated[bool, Field(strict=True), with_message("it must be true or false")]
Count = Annotated[int, Field(ge=1), number_with_message("it must be a whole number of at least 1")]
OptionalCount = Annotated[int | None, Field(ge=1), number_with_message("it must be a whole number of at least 1")]
CountOrZero = Annotated[int, Field(ge=0), number_with_message("it must be a whole number of at least 0")]
ParallelSize = Annotated[CountOrZero, AfterValidator(lambda size: max(size, 1))]
"""Ranks of a parallel dimension. GPT-NeoX treats both 0 and 1 as not used."""
NonNegativeNumber = Annotated[
    float, Field(ge=0, allow_inf_nan=False), number_with_message("it must be a number of at least 0")
]
Dropout = Annotated[
    float, Field(ge=0, le=0.999, allow_inf_nan=False), number_with_message("it must be a number from 0 to 0.999")
]
REQUIRED: Final[Any] = Field(None, validate_default=True)
"""Default of a required setting: it fails the validation of the field, whose message says what is required."""


def config_error(error: ValidationError, settings: Mapping[str, Setting]) -> ConfigError:
    """Return the first error of a validation, with the file that set the key, the key, the value and what is wrong."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    path = cause.key.split(".") if isinstance(cause, SettingError) else [str(key) for key in first["loc"]]
    message = str(cause)
    if first["type"] == "extra_forbidden":
        unknown = sorted(str(other["loc"][-1]) for other in error.errors() if other["type"] == "extra_forbidden")
        path, message = path[:-1], f"it has unknown keys: {', '.join(unknown)}; leave them out"
    name, setting = ".".join(path), settings.get(path[0])
    value = None if setting is None else setting.value
    for key in path[1:]:
        value = value.get(key) if isinstance(value, dict) else None
    if setting is None:
        return ConfigError(f"{name} is not set in any of the files; {message}")
    return ConfigError(f"{setting.source}: {name} is {value!r}; {message}")
