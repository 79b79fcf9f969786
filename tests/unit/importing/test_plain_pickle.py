"""Pickles of containers, numbers and texts; of anything else, or with numbers that ask for memory, refused unread."""

from __future__ import annotations

import datetime
import pickle
import resource
from typing import Any

import pytest

from commtrace.importing import plain_pickle

DUMP = {
    "entries": [
        {"id": number, "pg": ("0", "default"), "sizes": [[number, 3]], "t": 1 << 60, "x": -1.5, "on": True, "no": None}
        for number in range(300)
    ],
    "long": "x" * 70_000, "huge": 10**40, "ü": [],
}  # fmt: skip


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_read(protocol: int) -> None:
    assert plain_pickle.load(pickle.dumps(DUMP, protocol)) == DUMP


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", [print, datetime.date(2026, 1, 1), {1, 2}, frozenset((1,)), bytearray(b"x")])
def test_other_values_are_refused(value: Any, protocol: int) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"more than containers, .* \([A-Z_0-9]+ at byte \d+"):
        plain_pickle.load(pickle.dumps({"a": value}, protocol))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("the index of an object", b"\x80\x02]r\xff\xff\xff\x7f."),
        ("the index of an object, in text", b"\x80\x02]p2147483647\n."),
        ("the length of a byte array", b"\x80\x05\x96\0\0\0\0\x10\0\0\0."),
        ("the length of a text", b"\x80\x04\x8d\0\0\0\0\x10\0\0\0x."),
        ("the length of a number", b"\x80\x02\x8b\xff\xff\xff\x7fx."),
        ("the length of a negative number", b"\x80\x02\x8b\xff\xff\xff\xffx."),
        ("the length of a frame", b"\x80\x04\x95\0\0\0\0\x10\0\0\0]."),
        ("an index that no object has", b"\x80\x02]j\xff\xff\xff\x7f."),
        ("no end", b"\x80\x02]"),
        ("no value", b"\x80\x02."),
        ("an unknown operator", b"\x80\x02]\xff."),
        ("nothing", b""),
    ],
)
def test_damaged_pickles_take_no_memory(name: str, content: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(pickle.UnpicklingError):
        plain_pickle.load(content)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 100 << 20, name


@pytest.mark.long
def test_more_than_a_million_objects() -> None:
    """Their indexes are looked at one by one."""
    values = [[number] for number in range((1 << 20) + 10)]
    assert plain_pickle.load(pickle.dumps(values, 2)) == values
