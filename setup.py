"""The metadata is in setup.cfg. This adds the start-up files, which belong next to the packages, not inside them."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

# Read by Python at every start; imports commtrace only if the variable is set.
PTH = 'import os; os.environ.get("COMMTRACE", "0") in ("", "0") or __import__("commtrace.startup")\n'
# Python 3.15 and later read this file in place of the line above (PEP 829).
START = "commtrace.startup:activate\n"


class BuildWithStartup(build_py):
    """Build step that writes `commtrace.pth` and `commtrace.start` to the root of site-packages, also if editable."""

    def run(self) -> None:
        super().run()
        root = Path(self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib)
        root.mkdir(parents=True, exist_ok=True)
        (root / "commtrace.pth").write_text(PTH)
        (root / "commtrace.start").write_text(START)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        root = Path(self.build_lib)
        return [*super().get_outputs(include_bytecode), str(root / "commtrace.pth"), str(root / "commtrace.start")]


setup(cmdclass={"build_py": BuildWithStartup})
