"""GPT-NeoX's YAML files as settings, each with the file that set it.

GPT-NeoX files are YAML 1.1 with three peculiarities: keys are written with dashes or underscores, several files
describe one training, and numbers may be written as ``1e-8``, which is a string in YAML 1.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from commtrace.errors import ConfigError

COMMAND_LINE = "command line"
BUILT_IN = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Setting:
    """A value and what set it (a file's path, or the command line)."""

    value: Any
    source: str


class _NeoxLoader(yaml.SafeLoader):
    """Loader of YAML 1.1 that also reads ``1e-8`` and ``5e8`` as numbers, as in YAML 1.2."""


_NeoxLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def find_file(name: str) -> Path:
    """Return the file at a path, or the built-in one of that name (``demo`` or ``demo.yml``).

    Raises:
        ConfigError: If there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    built_in = BUILT_IN / (name if name.endswith(".yml") else f"{name}.yml")
    if path.name == name and built_in.is_file():
        return built_in
    names = ", ".join(sorted(path.name for path in BUILT_IN.glob("*.yml")))
    raise ConfigError(f"{name}: no such file; give the path of a GPT-NeoX YAML file, or one of {names}")


def read_file(path: Path) -> dict[str, Setting]:
    """Return the settings of one file, with dashes in keys replaced by underscores.

    Raises:
        ConfigError: If the file is not a YAML mapping, or sets a key to two values.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_NeoxLoader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a GPT-NeoX file is a mapping of keys to values; this one holds {content!r:.60}")
    settings: dict[str, Setting] = {}
    for raw_key, value in content.items():
        key = str(raw_key).replace("-", "_")
        if key in settings and settings[key].value != value:
            raise ConfigError(
                f"{path}: {key} is given twice, as {settings[key].value!r} and {value!r} (dashes and underscores are "
                "the same); keep one"
            )
        settings[key] = Setting(value, str(path))
    return settings


def merge(layers: Iterable[Mapping[str, Setting]]) -> dict[str, Setting]:
    """Merge settings: later ones override earlier ones; blocks such as ``zero_optimization`` are merged key by key."""
    merged: dict[str, Setting] = {}
    for layer in layers:
        for key, setting in layer.items():
            before = merged.get(key)
            if before is not None and isinstance(before.value, dict) and isinstance(setting.value, dict):
                merged[key] = Setting({**before.value, **setting.value}, f"{before.source} + {setting.source}")
            else:
                merged[key] = setting
    return merged
