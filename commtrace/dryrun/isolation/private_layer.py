"""A private copy-on-write layer over all file systems, in a mount namespace of this process.

The process gets a new root directory in which every file system is covered by an overlay: reads come from the original,
changes go to a folder of the layer. An unprivileged process cannot cover a directory that has mounts below it; such a
directory is made anew, with its entries covered one by one. The mounts vanish with the last process of the namespace,
however it ends. Needs Linux 5.11, or a process that may mount.

    layer/root/           the new root: the directories that were made anew, and what the program creates in them
    layer/0/upper, work   what the program changes in the file system that `layer/mounts.json` names first
    layer/mounts.json     {"covered": [[path, folder], ...], "read_only": [path, ...]}
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from . import system_calls

MOUNTS: Final = "mounts.json"
_SHARED_MEMORY: Final = "/dev/shm"
_PASSED_THROUGH: Final = ("/dev", "/proc", "/sys")
_VIRTUAL: Final = frozenset(
    (
        "bpf", "binfmt_misc", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs", "fusectl",
        "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "sysfs", "tracefs",
    )
)  # fmt: skip


class _Mount(NamedTuple):
    kind: str
    read_only: bool


def enter(layer: str, shm_layer: str, hidden: Sequence[str], shared: Sequence[str], used: Sequence[str]) -> None:
    """Move this process into a private layer.

    Args:
        layer: An empty directory for the layer, on a file system of the host.
        shm_layer: The same on the file system of shared memory, for what is written there.
        hidden: Directories whose contents are hidden from the process.
        shared: Directories, which may be in hidden ones, that are not covered: changes in them are real.
        used: Paths to which the program is likely to write.

    Raises:
        OSError: The kernel does not allow it.
    """
    directory = os.getcwd()
    foreign = {_last_foreign(os.path.realpath(path)) for path in (directory, *used)}
    try:
        system_calls.unshare(system_calls.CLONE_NEWNS)
    except PermissionError:
        _enter_user_namespace()
    else:
        foreign = set()  # a process that may mount may also copy these
    system_calls.mount("", "/", flags=system_calls.MS_REC | system_calls.MS_PRIVATE)
    cover = _Cover(layer, shm_layer)
    cover.add("/")
    cover.add_again(foreign)
    for path in hidden:
        system_calls.mount("tmpfs", cover.root + path, "tmpfs", options="mode=755")
    for path in shared:
        os.makedirs(cover.root + path, exist_ok=True)
        system_calls.bind(path, cover.root + path)
    with open(os.path.join(layer, MOUNTS), "w") as file:
        json.dump({"covered": cover.covered, "read_only": cover.read_only}, file)
    old = cover.root + "/.commtrace-old-root"
    os.mkdir(old)
    system_calls.change_root(cover.root, old)
    os.rmdir("/" + os.path.basename(old))
    os.chdir(directory)


def _enter_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    system_calls.unshare(system_calls.CLONE_NEWUSER | system_calls.CLONE_NEWNS)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _last_foreign(path: str) -> str:
    """Return the last directory on a path that has another owner or group than this process."""
    while path != "/":
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if stat.S_ISDIR(status.st_mode) and (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                break
        path = os.path.dirname(path)
    return path


class _Cover:
    """The new root directory, while it is built."""

    def __init__(self, layer: str, shm_layer: str) -> None:
        self.root = os.path.join(layer, "root")
        self.covered: list[tuple[str, str]] = []
        self.read_only: list[str] = []
        self._layer, self._shm_layer = layer, shm_layer
        self._mounts = _read_mounts()
        with open("/proc/self/uid_map") as file:
            initial = file.read().split() == ["0", "0", "4294967295"]
        # Only the initial user namespace may use the attributes with which a directory is renamed without a copy.
        option = "redirect_dir=on" if initial else "userxattr"
        self._options = (f"{option},volatile", option)  # volatile (since Linux 5.10): nothing is synchronized to disk
        os.mkdir(self.root)
        system_calls.bind(self.root, self.root)

    def add(self, source: str, *, read_only: bool = False) -> None:
        """Make a directory appear in the new root."""
        target = self.root + source
        if source != "/":
            os.mkdir(target)
        mount = self._mounts.get(source)
        read_only = mount.read_only if mount else read_only
        below = any(path.startswith(source.rstrip("/") + "/") and path != source for path in self._mounts)
        if source in _PASSED_THROUGH or (mount and mount.kind in _VIRTUAL):
            system_calls.bind(source, target)
            if source == "/dev" and os.path.isdir(_SHARED_MEMORY):
                self._cover(_SHARED_MEMORY, self._shm_layer)
        elif below:
            self._make_anew(source, target, read_only)
        elif read_only:
            system_calls.bind(source, target)
        else:
            self._cover(source, self._layer)

    def add_again(self, directories: Iterable[str]) -> None:
        """Cover directories once more, within the cover of their file system.

        A change copies all directories above it into the layer. In a user namespace, the kernel does not copy a
        directory of another owner or group, but the topmost directory of an overlay is never copied.
        """
        tops = tuple(f"{path}/" for path, _ in self.covered)
        for path in sorted(directories):
            if path.startswith(tops) and not any(mounted.startswith(f"{path}/") for mounted in self._mounts):
                self._cover(path, self._layer)

    def _cover(self, source: str, layer: str) -> None:
        """Mount an overlay over a directory, or make it read-only if the kernel refuses that for its file system."""
        folder = os.path.join(layer, str(len(self.covered)))
        upper, work = os.path.join(folder, "upper"), os.path.join(folder, "work")
        os.makedirs(work)
        os.mkdir(upper)
        _copy_attributes(source, upper)
        layers = ",".join(
            f"{name}dir={_escaped(path)}" for name, path in (("lower", source), ("upper", upper), ("work", work))
        )
        for options in self._options:
            with contextlib.suppress(OSError):
                system_calls.mount("overlay", self.root + source, "overlay", options=f"{layers},{options}")
                self.covered.append((source, folder))
                return
        system_calls.bind(source, self.root + source, read_only=True)
        self.read_only.append(source)

    def _make_anew(self, source: str, target: str, read_only: bool) -> None:
        """Make a directory of the same entries, each covered; files in it are read-only."""
        for entry in sorted(os.listdir(source)):
            path, copy = os.path.join(source, entry), os.path.join(target, entry)
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                continue  # removed meanwhile
            if stat.S_ISLNK(mode):
                os.symlink(os.readlink(path), copy)
            elif stat.S_ISDIR(mode):
                self.add(path, read_only=read_only)
            else:
                os.close(os.open(copy, os.O_CREAT | os.O_WRONLY))
                with contextlib.suppress(OSError):  # a socket whose owner has ended
                    system_calls.bind(path, copy, read_only=True)
        if source != "/":
            _copy_attributes(source, target)


def _copy_attributes(source: str, target: str) -> None:
    """Give a directory the owner, mode and times of another. If it keeps its owner, the mode says what that may do."""
    status = os.stat(source)
    mode = stat.S_IMODE(status.st_mode)
    with contextlib.suppress(OSError):
        os.chown(target, status.st_uid, status.st_gid)
    if os.stat(target).st_uid != status.st_uid:
        mode = mode | 0o700 if os.access(source, os.W_OK) else (mode | 0o500) & ~0o222
    os.chmod(target, mode)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _escaped(path: str) -> str:
    return "".join(f"\\{character}" if character in "\\,:" else character for character in path)


def _read_mounts() -> dict[str, _Mount]:
    """Return the file systems of this process by mount point; of several at one point, the last, which is visible."""
    mounts = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields, _, kind = line.partition(" - ")
            _, _, _, _, point, options, *_ = fields.split(" ")
            for code in ("040", "011", "012", "134"):
                point = point.replace(f"\\{code}", chr(int(code, 8)))
            mounts[point] = _Mount(kind.split(" ")[0], "ro" in options.split(","))
    return mounts
