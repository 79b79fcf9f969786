"""mypy plugin: shows mypy the folders that setup.cfg maps into the package.

`hooks/` and `analyses/` are installed as `commtrace.hooks` and `commtrace.analyses` (package_dir), but mypy finds a
module by the folders of its path alone. Whenever mypy starts, this copies what has changed there to build/mypy, which
is in [mypy] mypy_path, and makes mypy check all of it. The copies are never out of date; they are read-only, because
an error must be fixed in the original.
"""

from __future__ import annotations

import configparser
import shutil
from pathlib import Path

from mypy.nodes import MypyFile
from mypy.options import Options
from mypy.plugin import Plugin, ReportConfigContext

ROOT = Path(__file__).parents[1]
COPIES = ROOT / "build" / "mypy"
CHECKED_WITH = "commtrace.cli"  # a module that no other imports: mypy finds no import cycle through it
LOW_PRIORITY = 20  # as mypy ranks an import within a function


def mapped_folders() -> dict[str, Path]:
    """Return package names and their folders where the two differ."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options"]["package_dir"].split("\n")
    pairs = (map(str.strip, line.split("=")) for line in lines if line)
    return {name: ROOT / folder for name, folder in pairs if name.replace(".", "/") != folder}


def update(folder: Path, copy: Path) -> None:
    """Make `copy` equal to the Python files of `folder`; equal files stay as they are, and in mypy's cache."""
    wanted = {path.relative_to(folder) for path in folder.rglob("*.py")}
    for path in {path.relative_to(copy) for path in copy.rglob("*.py")} - wanted:
        (copy / path).unlink()
    for path in wanted:
        source, target = folder / path, copy / path
        if not target.exists() or source.read_bytes() != target.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            shutil.copy2(source, target)
            target.chmod(0o444)


class MappedPackages(Plugin):
    """Adds the modules of the mapped packages to what mypy checks."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.mapped_modules: list[str] = []
        for name, folder in mapped_folders().items():
            copy = COPIES.joinpath(*name.split("."))
            update(folder, copy)
            for path in sorted(folder.rglob("*.py")):
                parts = path.relative_to(folder).with_suffix("").parts
                self.mapped_modules.append(".".join([name, *(part for part in parts if part != "__init__")]))

    def get_additional_deps(self, file: MypyFile) -> list[tuple[int, str, int]]:
        """Return the modules to check in addition to those that `file` imports, as (priority, module, line)."""
        if file.fullname != CHECKED_WITH:
            return []
        return [(LOW_PRIORITY, module, -1) for module in self.mapped_modules]

    def report_config_data(self, ctx: ReportConfigContext) -> object:
        """Return what decides whether mypy may use its cache of a module: here the list of additional modules."""
        return self.mapped_modules if ctx.id == CHECKED_WITH else None


def plugin(version: str) -> type[Plugin]:
    """Return the plugin's class, as mypy asks for it."""
    return MappedPackages
