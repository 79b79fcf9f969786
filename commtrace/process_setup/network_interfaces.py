"""Network interfaces of this process, and those on which a communication library listens for other ranks."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple

from .system_files import list_folder, read_number, read_text

_FOLDER: Final = "/sys/class/net"
_GET_FLAGS, _GET_ADDRESS, _GET_MTU, _GET_HARDWARE = 0x8913, 0x8915, 0x8921, 0x8927  # SIOCGIF...
_UP: Final = 0x41  # IFF_UP | IFF_RUNNING
_LISTEN: Final = "0A"  # TCP_LISTEN
_NO_ADDRESS: Final = ("0.0.0.0", "::")
_MAX_INTERFACES: Final = 64
_MAX_FILES: Final = 4096


class Link(NamedTuple):
    """An interface of the process's network namespace.

    Attributes:
        is_up: Whether it is switched on, and has a connection.
        mtu: Largest packet in bytes.
        hardware: Hardware address, as /sys has it.
        address: IPv4 address; "" if it has none.
    """

    is_up: bool
    mtu: int
    hardware: str
    address: str


def read_links() -> dict[str, Link]:
    """Return the interfaces by name."""
    links = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                flags, mtu = (struct.unpack("i", _ask(sock, name, what)[:4])[0] for what in (_GET_FLAGS, _GET_MTU))
                hardware = _ask(sock, name, _GET_HARDWARE)[2:8].hex(":")
                is_up = flags & _UP == _UP
                links[name] = Link(is_up, mtu, hardware, _address(sock, name))
    return links


def _ask(sock: socket.socket, name: str, what: int) -> bytes:
    """Return the kernel's answer on an interface (netdevice(7)), without the name before it."""
    return fcntl.ioctl(sock.fileno(), what, struct.pack("40s", os.fsencode(name)[:15]))[16:]


def _address(sock: socket.socket, name: str) -> str:
    with suppress(OSError):
        return socket.inet_ntoa(_ask(sock, name, _GET_ADDRESS)[4:8])
    return ""


def read_interfaces(links: Mapping[str, Link], folder: str = _FOLDER) -> list[dict[str, Any]]:
    """Return a row per interface: name, state, speed in Mbit/s if it is known, and MTU in bytes.

    Interfaces of other containers, which come and go, are left out: those without hardware below them and without an
    address, and bridges. /sys may show the interfaces of another network namespace, which have other addresses.
    """
    rows: list[dict[str, Any]] = []
    for name, link in sorted(links.items())[:_MAX_INTERFACES]:
        path = os.path.join(folder, name)
        entries = [*list_folder(path)] if read_text(path, "address") == link.hardware else []
        is_below = any(entry in ("device", "bonding") or entry.startswith("lower_") for entry in entries)
        if "bridge" not in entries and (is_below or link.address):
            speed = read_number(path, "speed") if entries else None
            known = {"speed": speed} if speed else {}  # without a connection, it is 0 or -1
            rows.append({"name": name, "state": "up" if link.is_up else "down", **known, "mtu": link.mtu})
    return rows


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
    yield from ((link.address, name) for name, link in read_links().items() if link.address)
    for line in read_text("/proc/self/net/if_inet6").splitlines():
        digits, _, _, _, _, name = line.split()
        yield _text_of(bytes.fromhex(digits)), name
