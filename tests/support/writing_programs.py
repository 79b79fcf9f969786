"""Programs that change files in every way that training programs do, and the hash of a directory that they change."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
from pathlib import Path
from typing import Final

PYTHON: Final = {
    "create": "open('new', 'w').write('new')",
    "overwrite": "open('file', 'w').write('changed')",
    "append": "open('file', 'a').write('more')",
    "truncate": "import os; os.truncate('file', 1)",
    "rename": "import os; os.rename('file', 'renamed')",
    "replace": "import os; open('part', 'w').write('x'); os.replace('part', 'file')",
    "rename a directory": "import os; os.rename('old', 'older'); assert os.listdir('older') == ['weights']",
    "delete": "import os; os.remove('file')",
    "delete a directory": "import shutil; shutil.rmtree('old')",
    "make a directory again": "import shutil, os; shutil.rmtree('old'); os.mkdir('old'); open('old/x', 'w').write('x')",
    "link": "import os; os.symlink('file', 'symbolic'); os.link('file', 'hard'); open('hard', 'a').write('x')",
    "change the mode": "import os; os.chmod('file', 0o600); os.utime('file', (1, 1))",
    "sqlite": "import sqlite3; c = sqlite3.connect('runs.db'); c.execute('insert into runs values (2)'); c.commit()",
    "memory map": "import mmap; f = open('file', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0] = 33; m.flush()",
    "shared memory": "open('/dev/shm/commtrace-test-file', 'w').write('x')",
}
"""Python code by what it changes."""

SHELL: Final = {
    "child process": "sh -c 'echo more >> file; mv old older'",
    "editor": "sed -i s/original/changed/ file",
    "copy": "cp file old/copy",
    "remove": "rm -r old",
    "truncate in C": "truncate -s 1 file",
    "block copy": "dd if=/dev/zero of=file bs=1 count=4 conv=notrunc 2>&1",
}
"""Shell commands by what they change; other languages than Python."""


def make_tree(folder: Path) -> None:
    """Make the files that the programs change."""
    (folder / "old").mkdir(parents=True)
    (folder / "file").write_text("original")
    (folder / "data").write_bytes(b"\1" * 5000)
    (folder / "old" / "weights").write_bytes(b"\1" * 5000)
    with sqlite3.connect(folder / "runs.db") as connection:
        connection.execute("create table runs (number integer)")
    connection.close()


def tree_hash(folder: Path) -> str:
    """Return a hash of all files below a directory: names, modes, owners, times and contents."""
    digest = hashlib.sha256()
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        digest.update(f"{path.relative_to(folder)} {status.st_mode} {status.st_uid} {status.st_mtime_ns}\n".encode())
        if stat.S_ISREG(status.st_mode):
            digest.update(f"{status.st_size} {status.st_nlink}\n".encode() + path.read_bytes())
        elif stat.S_ISLNK(status.st_mode):
            digest.update(os.fsencode(os.readlink(path)))
    return digest.hexdigest()
