"""Network interfaces of this process, and those on which a communication library listens for other ranks."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, Final

from .system_files import list_folder, read_number, read_text

_FOLDER: Final = "/sys/class/net"
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR
_LISTEN: Final = "0A"  # TCP_LISTEN
_NO_ADDRESS: Final = ("0.0.0.0", "::")
_MAX_INTERFACES: Final = 64
_MAX_FILES: Final = 4096


def read_interfaces(folder: str = _FOLDER) -> list[dict[str, Any]]:
    """Return a row per interface: name, state, speed in Mbit/s if it is known, and MTU in bytes.

    Interfaces of other containers, which come and go, are left out: those without hardware below them and without an
    address, and bridges.
    """
    rows: list[dict[str, Any]] = []
    for name in list_folder(folder):
        path = os.path.join(folder, name)
        if len(rows) < _MAX_INTERFACES and _is_own(path, name):
            numbers = {key: read_number(path, key) for key in ("speed", "mtu")}
            known = {key: number for key, number in numbers.items() if number}  # without a link, the speed is 0 or -1
            rows.append({"name": name, "state": _state(path, name), **known})
    return rows


def _is_own(path: str, name: str) -> bool:
    if os.path.exists(os.path.join(path, "bridge")):
        return False
    below = [entry for entry in list_folder(path) if entry in ("device", "bonding") or entry.startswith("lower_")]
    return bool(below) or name == "lo" or bool(_address(name))


def _state(path: str, name: str) -> str:
    """Return "up" or "down". Interfaces that do not report a state, such as the loopback interface, have only flags."""
    state = read_text(path, "operstate")
    if state != "unknown":
        return state
    flags = read_text(path, "flags")
    with suppress(ValueError):
        return "up" if int(flags, 16) & 1 else "down"
    return state


def _address(name: str) -> str:
    """Return the IPv4 address of an interface; "" if it has none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("256s", os.fsencode(name)[:15])
        return socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _GET_ADDRESS, request)[20:24])
    return ""


def interfaces_listened_on() -> list[str]:
    """Return the interfaces that have an address on which this process waits for connections.

    gloo and NCCL's sockets listen on the address of the interface that they use; a store listens on all addresses. The
    kernel's tables are read: Python's socket objects could change a socket's flags.
    """
    sockets = {*_socket_inodes()}
    listening = (address for table in ("tcp", "tcp6") for inode, address in _listening(table) if inode in sockets)
    addresses = {address for address in listening if address not in _NO_ADDRESS}
    if not addresses:
        return []
    names = dict(_addresses())
    return sorted({names[address] for address in addresses if address in names})


def _socket_inodes() -> Iterator[str]:
    for number in islice(list_folder("/proc/self/fd"), _MAX_FILES):
        with suppress(OSError):
            kind, _, inode = os.readlink(f"/proc/self/fd/{number}").partition(":")
            if kind == "socket":
                yield inode.strip("[]")


def _listening(table: str) -> Iterator[tuple[str, str]]:
    """Yield inode and address of the listening sockets of the host. They come first in the table."""
    with suppress(OSError), open(f"/proc/self/net/{table}") as lines:
        next(lines, "")
        for line in lines:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state != _LISTEN:
                return
            words = [local[at : at + 8] for at in range(0, len(local.partition(":")[0]), 8)]
            address = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
            yield inode, _text_of(address)


def _text_of(address: bytes) -> str:
    family = socket.AF_INET if len(address) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, address).removeprefix("::ffff:")


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield address and name of each interface."""
    yield "127.0.0.1", "lo"
    for _, name in socket.if_nameindex():
        if address := _address(name):
            yield address, name
    for line in read_text("/proc/self/net/if_inet6").splitlines():
        digits, _, _, _, _, name = line.split()
        yield _text_of(bytes.fromhex(digits)), name
