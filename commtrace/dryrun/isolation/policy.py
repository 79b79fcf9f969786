"""What the parent of the ranks says of isolation: the command that starts a rank in it, and the choices there are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import commtrace

from .system_calls import landlock_version

_ROOT: Final = str(Path(commtrace.__file__).parents[1])
_BOOT: Final = f"import sys; sys.path.insert(0, {_ROOT!r}); from commtrace.dryrun.isolation.start import main; main()"


class Writes(str, Enum):
    """What happens to files that the program writes, renames or deletes (`--writes`)."""

    PRIVATE = "private"  # a copy-on-write layer for each rank, which is discarded
    REFUSE = "refuse"  # an error
    ALLOW = "allow"  # they are written


@dataclass(frozen=True)
class Isolation:
    """How one rank is isolated, and in which folders."""

    writes: Writes
    folder: Path  # of the rank: its layer, or its temporary files
    shm_folder: Path  # of the rank, in shared memory
    hidden: Sequence[Path]  # folders of the dry run, which the rank does not see
    shared: Sequence[Path]  # folders in them that the rank does see, and writes to

    @property
    def temporary(self) -> Path:
        """The temporary files of a rank whose writes are refused: beside `shared`, the only place it may write to."""
        return self.folder / "temporary"

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that starts `command` in isolation. Its path must be absolute."""
        writable = [*self.shared, self.temporary] if self.writes is Writes.REFUSE else self.shared
        order = {
            "writes": self.writes.value,
            "layer": str(self.folder),
            "shm_layer": str(self.shm_folder),
            "hidden": [str(path) for path in self.hidden],
            "shared": [str(path) for path in writable],
            "used": _paths_in(command),
            "parent": os.getpid(),
        }
        return [sys.executable, "-I", "-S", "-c", _BOOT, json.dumps(order), *command]

    def environment(self) -> dict[str, str]:
        """Return variables of the rank that keep libraries from writing where they may not."""
        if self.writes is Writes.ALLOW:
            return {}
        variables = {"PYTHONDONTWRITEBYTECODE": "1"}
        if self.writes is Writes.REFUSE:
            caches = ("TMPDIR", "MPLCONFIGDIR", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
            variables.update(dict.fromkeys(caches, str(self.temporary)))
        return variables

    def make_folders(self) -> None:
        """Make the folders that the rank needs."""
        for path in (self.folder, self.shm_folder, *self.shared):
            path.mkdir(parents=True, exist_ok=True)
        if self.writes is Writes.REFUSE:
            self.temporary.mkdir()

    def remove_folders(self) -> None:
        """Remove what the rank wrote in isolation."""
        for path in (self.folder, self.shm_folder):
            shutil.rmtree(path, ignore_errors=True)


def _paths_in(command: Sequence[str]) -> list[str]:
    """Return the paths in the arguments of a command, and the directories of the user and of temporary files."""
    values = [argument.rpartition("=")[2] for argument in command[1:]]
    return [tempfile.gettempdir(), os.path.expanduser("~"), *(value for value in values if "/" in value)]


def can_be_private() -> str:
    """Return why a process cannot get a private layer here, or "", from a trial that changes a file in one."""
    with tempfile.TemporaryDirectory(prefix="commtrace-dryrun-") as name, tempfile.TemporaryDirectory() as victim:
        folder, file = Path(name), Path(victim, "file")
        file.write_text("original")
        isolation = Isolation(Writes.PRIVATE, folder / "layer", folder / "shm", [folder], [folder / "shared"])
        isolation.make_folders()
        script = 'echo changed > "$1/file" && mv "$1/file" "$1/moved" && mkdir "$1/new" && cat "$1/moved"'
        try:
            trial = subprocess.run(
                isolation.command(["/bin/sh", "-c", script, "sh", victim]), capture_output=True, text=True, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if trial.stdout != "changed\n":
            return trial.stderr.strip() or f"the trial ended with status {trial.returncode}"
        unchanged = os.listdir(victim) == ["file"] and file.read_text() == "original"
        return "" if unchanged else f"a change in {victim} was not private"


def can_refuse() -> bool:
    """Return whether this kernel can deny a process to write (Landlock, Linux 5.13)."""
    return landlock_version() > 0
