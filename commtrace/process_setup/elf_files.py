"""Shared libraries as files: version strings, symbols and build identifiers, read without loading or calling them.

Calling a library's own version function would need the loader's lock: a thread of the program may hold it while it
waits for Python's lock.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from typing import BinaryIO, Final, NamedTuple

_HEADER: Final = struct.Struct("<16s2HI3QI6H")
_SECTION: Final = struct.Struct("<2I4Q2I2Q")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_LOADED: Final = 2  # SHF_ALLOC
_MAX_SECTIONS: Final = 1000
_MAX_BYTES: Final = 1 << 24
_SAMPLE_BYTES: Final = 1 << 16
_X86_64, _AARCH64 = 62, 183


class _Section(NamedTuple):
    address: int
    offset: int
    size: int


class ElfFile:
    """A 64-bit little-endian ELF file."""

    def __init__(self, file: BinaryIO) -> None:
        """Read the headers.

        Raises:
            ValueError: The file is not of this kind, or damaged.
            OSError: It cannot be read.
        """
        self._file = file
        try:
            header = _HEADER.unpack(file.read(_HEADER.size))
            if header[0][:6] != b"\x7fELF\x02\x01" or not 0 < header[12] <= _MAX_SECTIONS:
                raise ValueError("not a 64-bit little-endian ELF file with sections")
            self._machine = header[2]
            rows = [*_SECTION.iter_unpack(self._read(header[6], _SECTION.size * header[12]))]
            names = self._read(rows[header[13]][4], rows[header[13]][5])
            self._sections = {
                names[row[0] : names.find(b"\0", row[0])].decode("ascii", "replace"): _Section(row[3], row[4], row[5])
                for row in rows
            }
        except (struct.error, IndexError) as error:
            raise ValueError(str(error)) from error

    def _read(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(min(size, _MAX_BYTES))

    def section(self, name: str, most: int = _MAX_BYTES) -> bytes:
        """Return the first bytes of a section; b"" if there is none."""
        found = self._sections.get(name)
        return b"" if found is None else self._read(found.offset, min(found.size, most))

    def build(self) -> str:
        """Return what identifies the content: the linker's build identifier, else a digest of samples and the size."""
        note = self.section(".note.gnu.build-id")
        if len(note) > 16:
            return note[16:].hex()
        samples = [self.section(name, _SAMPLE_BYTES) for name in (".dynsym", ".text", ".rodata", ".comment")]
        samples.append(b"%d" % os.fstat(self._file.fileno()).st_size)
        return hashlib.blake2b(b"".join(samples), digest_size=16).hexdigest()

    def only_constant(self, pattern: re.Pattern[bytes]) -> str:
        """Return the first group of the matches of a pattern in the constants; "" unless all of them are equal."""
        found = {match[1] for match in pattern.finditer(self.section(".rodata"))}
        return found.pop().decode("ascii", "replace") if len(found) == 1 else ""

    def returned_text(self, function: str) -> str:
        """Return the constant that a function without arguments returns the address of; "" if that is not all it does.

        Args:
            function: Name of an exported function.
        """
        code = self._code_of(function)
        address = None if code is None else _returned_address(self._machine, *code)
        constants = self._sections.get(".rodata")
        if address is None or constants is None or not 0 <= address - constants.address < constants.size:
            return ""
        text, end, _ = self._read(constants.offset + address - constants.address, 64).partition(b"\0")
        return text.decode("ascii", "replace") if end else ""

    def _code_of(self, function: str) -> tuple[int, bytes] | None:
        """Return the address of an exported function and its first bytes; None if there is no such function."""
        names, name = self.section(".dynstr"), function.encode()
        for at, _, _, _, address, size in _SYMBOL.iter_unpack(self.section(".dynsym")):
            if address and names[at : at + len(name) + 1] == name + b"\0":
                text = self._sections[".text"]
                return address, self._read(text.offset + address - text.address, min(size, 32))
        return None


def _returned_address(machine: int, address: int, code: bytes) -> int | None:
    """Return what code returns that only loads an address relative to itself; None for other code."""
    if machine == _X86_64:
        match = re.match(rb"(?:\xf3\x0f\x1e\xfa)?\x48\x8d\x05(.{4})\xc3", code, re.DOTALL)  # lea offset(%rip), %rax
        return address + match.end() - 1 + int.from_bytes(match[1], "little", signed=True) if match else None
    if machine == _AARCH64:
        words: list[int] = [word for (word,) in struct.iter_unpack("<I", code[: len(code) // 4 * 4])]
        skipped = words[:1] == [0xD503245F]  # bti c
        words, address = words[skipped:], address + 4 * skipped
        is_load = len(words) > 2 and words[0] & 0x9F00001F == 0x90000000 and words[1] & 0xFFC003FF == 0x91000000
        if is_load and words[2] == 0xD65F03C0:  # adrp x0, page; add x0, x0, offset; ret
            pages = (words[0] >> 5 & 0x7FFFF) << 2 | words[0] >> 29 & 3
            pages -= (pages >> 20 & 1) << 21
            return (address & ~0xFFF) + (pages << 12) + (words[1] >> 10 & 0xFFF)
    return None
