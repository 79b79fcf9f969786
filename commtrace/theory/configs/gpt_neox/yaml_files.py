"""GPT-NeoX's YAML files as settings that remember which file they came from.

GPT-NeoX files are YAML 1.1 with three habits of their own: keys are written with dashes or underscores, a training is
described by several files, and numbers are written as ``1e-8``, which YAML 1.1 takes for a string.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from commtrace.errors import ConfigError

COMMAND_LINE = "command line"
SHIPPED = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Setting:
    """One value and the place that set it (a file's path, or the command line)."""

    value: Any
    source: str


class _NeoxLoader(yaml.SafeLoader):
    """YAML 1.1 that also reads ``1e-8`` and ``5e8`` as numbers, as YAML 1.2 and every GPT-NeoX user do."""


_NeoxLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def find_file(name: str) -> Path:
    """The file of that path or, when there is none, the shipped one of that name (``demo`` or ``demo.yml``)."""
    given = Path(name)
    if given.is_file():
        return given
    shipped = SHIPPED / (name if name.endswith(".yml") else f"{name}.yml")
    if given.name == name and shipped.is_file():
        return shipped
    names = ", ".join(sorted(path.name for path in SHIPPED.glob("*.yml")))
    raise ConfigError(f"{name}: no such file; give the path of a GPT-NeoX YAML file, or one of {names}")


def read_file(path: Path) -> dict[str, Setting]:
    """The settings of one file, with dashes in the names made underscores."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_NeoxLoader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a GPT-NeoX file is a mapping of keys to values; this one holds {content!r:.60}")
    settings: dict[str, Setting] = {}
    for written, value in content.items():
        key = str(written).replace("-", "_")
        if key in settings and settings[key].value != value:
            raise ConfigError(
                f"{path}: {key} is given twice, as {settings[key].value!r} and {value!r} (dashes and underscores are "
                "the same); keep one"
            )
        settings[key] = Setting(value, str(path))
    return settings


def merge(layers: Iterable[Mapping[str, Setting]]) -> dict[str, Setting]:
    """Later settings win; blocks such as ``zero_optimization`` are merged key by key."""
    merged: dict[str, Setting] = {}
    for layer in layers:
        for key, setting in layer.items():
            before = merged.get(key)
            if before is not None and isinstance(before.value, dict) and isinstance(setting.value, dict):
                merged[key] = Setting({**before.value, **setting.value}, f"{before.source} + {setting.source}")
            else:
                merged[key] = setting
    return merged


class Reader:
    """Takes typed values out of settings, and remembers which keys were asked for.

    A wrong value raises :class:`ConfigError` with the file, the key, the value and the mend.
    """

    def __init__(self, settings: Mapping[str, Setting], inside: str = "") -> None:
        self._settings = settings
        self._inside = inside
        self._asked: set[str] = set()

    def unknown(self) -> list[str]:
        """The keys of the files that nobody asked for."""
        return sorted(set(self._settings) - self._asked)

    def origins(self) -> dict[str, str]:
        """Where each key was set."""
        return {key: setting.source for key, setting in self._settings.items()}

    def error(self, key: str, mend: str) -> ConfigError:
        """The error that says where ``key`` was set, to what, and what to do."""
        setting = self._settings.get(key)
        name = f"{self._inside}.{key}" if self._inside else key
        if setting is None:
            return ConfigError(f"{name} is not set in any of the files; {mend}")
        return ConfigError(f"{setting.source}: {name}: {setting.value!r}; {mend}")

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as the file has it; ``null`` counts as not set."""
        self._asked.add(key)
        setting = self._settings.get(key)
        return default if setting is None or setting.value is None else setting.value

    def number(self, key: str, default: float | None = None, low: float = 0.0, high: float = math.inf) -> float:
        """A number in ``low`` to ``high``; required when there is no default."""
        mend = f"give a number from {low:g} to {high:g}" if high < math.inf else f"give a number, {low:g} or more"
        found = self._float(key, default, mend)
        if not low <= found <= high:
            raise self.error(key, mend)
        return found

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        """A whole number, ``low`` or more (``5e8`` counts as one); required when there is no default."""
        mend = f"give a whole number, {low} or more"
        found = self._float(key, default, mend)
        if found != int(found) or found < low:
            raise self.error(key, mend)
        return int(found)

    def _float(self, key: str, default: float | None, mend: str) -> float:
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise self.error(key, mend)
        try:
            found = float(value)
        except ValueError as error:
            raise self.error(key, mend) from error
        if not math.isfinite(found):
            raise self.error(key, mend)
        return found

    def flag(self, key: str, default: bool) -> bool:
        """``true`` or ``false``."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "give true or false")
        return value

    def choice(self, key: str, default: str, allowed: Mapping[str, str]) -> str:
        """One of the keys of ``allowed`` (upper and lower case are the same); what it stands for is returned."""
        value = str(self.raw(key, default)).lower()
        if value not in allowed:
            raise self.error(key, f"this trainer knows {', '.join(allowed)}")
        return allowed[value]

    def numbers(self, key: str, default: Sequence[float], count: int) -> tuple[float, ...]:
        """``count`` numbers, as a list or as text with commas."""
        value = self.raw(key, list(default))
        parts = value.split(",") if isinstance(value, str) else value
        mend = f"give {count} numbers, such as {', '.join(f'{x:g}' for x in default)}"
        try:
            found = tuple(float(part) for part in parts)
        except (TypeError, ValueError) as error:
            raise self.error(key, mend) from error
        if len(found) != count or min(found) < 0:
            raise self.error(key, mend)
        return found

    def block(self, key: str) -> dict[str, Any]:
        """A mapping; empty when not set."""
        value = self.raw(key, {})
        if not isinstance(value, dict):
            raise self.error(key, 'give a block of keys and values, such as {"stage": 1}')
        return dict(value)

    def inside(self, key: str) -> Reader:
        """A reader for the settings of a block."""
        source = self._settings[key].source if key in self._settings else ""
        name = f"{self._inside}.{key}" if self._inside else key
        return Reader({str(inner): Setting(value, source) for inner, value in self.block(key).items()}, name)
