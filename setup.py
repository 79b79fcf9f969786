"""The metadata is in setup.cfg. This adds what is not inside the packages' folders.

That is the start-up files, which belong next to the packages, and for binary wheels, which wheels/build_wheels.py
makes, the compiled libraries: COMMTRACE_LIBRARIES names their folder. Without it a wheel is for any machine, and
`commtrace build` compiles the libraries there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

# Read by Python at every start; imports commtrace only if the variable is set.
PTH = 'import os; os.environ.get("COMMTRACE", "0") in ("", "0") or __import__("commtrace.startup")\n'
# Python 3.15 and later read this file in place of the line above (PEP 829).
START = "commtrace.startup:activate\n"

LIBRARIES = sorted(Path(os.environ["COMMTRACE_LIBRARIES"]).glob("*.so")) if "COMMTRACE_LIBRARIES" in os.environ else []


class BuildWithStartup(build_py):
    """Build step that writes the start-up files to the root of site-packages, also if editable, and adds libraries."""

    def run(self) -> None:
        super().run()
        root = Path(self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib)
        root.mkdir(parents=True, exist_ok=True)
        (root / "commtrace.pth").write_text(PTH)
        (root / "commtrace.start").write_text(START)
        for library, copy in zip(LIBRARIES, self._shipped(), strict=True):
            copy.parent.mkdir(exist_ok=True)
            shutil.copy2(library, copy)

    def _shipped(self) -> list[Path]:
        folder = Path(self.build_lib, "commtrace/hooks/native/shipped")  # `libraries.SHIPPED`
        return [folder / library.name for library in LIBRARIES]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        root = Path(self.build_lib)
        added = root / "commtrace.pth", root / "commtrace.start", *self._shipped()
        return [*super().get_outputs(include_bytecode), *map(str, added)]


class Contents(Distribution):
    """What is installed: for one kind of machine, if there are libraries."""

    def has_ext_modules(self) -> bool:
        return bool(LIBRARIES)


setup(distclass=Contents, cmdclass={"build_py": BuildWithStartup})
