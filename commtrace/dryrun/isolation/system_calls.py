"""System calls of Linux that Python's standard library does not have."""

from __future__ import annotations

import ctypes
import os
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUSER: Final = 0x10000000

MS_RDONLY: Final = 0x1
MS_REMOUNT: Final = 0x20
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000
MS_RELATIME: Final = 0x200000
_KEPT_FLAGS: Final = 0x2 | 0x4 | 0x8 | 0x400 | 0x800  # nosuid, nodev, noexec, noatime, nodiratime
_ST_RELATIME: Final = 0x1000
_MNT_DETACH: Final = 2

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38
_LANDLOCK_CREATE_RULESET: Final = 444  # these numbers are the same on every architecture
_LANDLOCK_ADD_RULE: Final = 445
_LANDLOCK_RESTRICT_SELF: Final = 446
_LANDLOCK_CREATE_RULESET_VERSION: Final = 1
_LANDLOCK_RULE_PATH_BENEATH: Final = 1

_libc: Final = ctypes.CDLL(None, use_errno=True)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"  # the layout of packed structures, which Python 3.14 wants to be named
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def _checked(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def unshare(flags: int) -> None:
    """Give this process namespaces of its own. Raises OSError."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system at `target`. Raises OSError, with the target as its file name."""
    texts = [os.fsencode(text) if text else None for text in (source, target, kind)]
    _checked(_libc.mount(*texts, ctypes.c_ulong(flags), os.fsencode(options) or None), target)


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """Make a directory or file, with the mounts below it, also visible at `target`. Raises OSError."""
    mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        # A user namespace may not drop the flags that a mount had before.
        kept = os.statvfs(target).f_flag
        flags = kept & _KEPT_FLAGS | (MS_RELATIME if kept & _ST_RELATIME else 0)
        mount("", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def change_root(new: str, old: str) -> None:
    """Make the mount `new` the root directory, and detach the previous one; `old` is a directory in `new`."""
    _checked(_libc.pivot_root(os.fsencode(new), os.fsencode(old)), new)
    os.chdir("/")
    _checked(_libc.umount2(os.fsencode(os.path.join("/", os.path.basename(old))), _MNT_DETACH), old)


def end_with_parent(signal: int) -> None:
    """Have the kernel send this process a signal when its parent ends, also after it becomes another program."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal), 0, 0, 0), "prctl")


def landlock_version() -> int:
    """Return the version of Landlock in this kernel, or 0."""
    size = ctypes.c_size_t(0)
    version: int = _libc.syscall(_LANDLOCK_CREATE_RULESET, None, size, _LANDLOCK_CREATE_RULESET_VERSION)
    return max(version, 0)


def landlock(handled: int, allowed: dict[str, int]) -> None:
    """Deny this process and its future children the accesses `handled`, except `allowed` ones below directories.

    Raises:
        OSError: The kernel does not support it, or a directory cannot be opened.
    """
    attributes = ctypes.c_uint64(handled)
    rules = _libc.syscall(
        _LANDLOCK_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)), 0
    )
    _checked(rules, "landlock_create_ruleset")
    for directory, access in allowed.items():
        parent = os.open(directory, os.O_PATH | os.O_CLOEXEC)
        rule = _PathBeneath(access, parent)
        result = _libc.syscall(_LANDLOCK_ADD_RULE, rules, _LANDLOCK_RULE_PATH_BENEATH, ctypes.byref(rule), 0)
        _checked(result, directory)
        os.close(parent)
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0), "prctl")
    _checked(_libc.syscall(_LANDLOCK_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
    os.close(rules)
