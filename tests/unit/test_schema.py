"""The layout of a record: as a dtype, as a struct format, and in the documentation."""

from __future__ import annotations

import re
import struct

import numpy as np
from processes import ROOT

from commtrace.schema import EVENT_COLUMNS, RECORD, RECORD_STRUCT, Clock, Flag, Phase, Purpose, State

DOCUMENT = (ROOT / "docs" / "reference" / "log-format.md").read_text()


def test_struct_packs_what_the_dtype_reads() -> None:
    values = tuple(range(1, len(RECORD.names or ()) + 1))
    assert struct.calcsize(RECORD_STRUCT) == RECORD.itemsize
    assert np.frombuffer(struct.pack(RECORD_STRUCT, *values), RECORD)[0].item() == values


def test_state_is_the_last_byte() -> None:
    assert (RECORD.names or ())[-1] == "state"
    assert RECORD.fields is not None
    assert RECORD.fields["state"][1] == RECORD.itemsize - 1


def test_the_document_lists_the_fields_in_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([iu]\d) \|", DOCUMENT, re.MULTILINE)
    assert rows == [(name, RECORD[name].str.lstrip("<|")) for name in RECORD.names or ()]


def test_the_document_names_every_code() -> None:
    text = DOCUMENT.lower()
    for code in (*Phase, *State):
        if code != State.FREE:
            assert f"{code.value} {code.name.lower()}" in text
    for flag in Flag:
        assert f"{flag.value} {str(flag.name).lower()}" in text
    assert [clock.value for clock in Clock] == [0, 1, 2, 3, 4, 5, 6]


def test_the_document_names_every_purpose_and_no_other() -> None:
    table = DOCUMENT.partition("### Purposes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z' ,]+) \|", table, re.MULTILINE)
    assert sorted(name for row in rows for name in row.split(", ")) == sorted(purpose.value for purpose in Purpose)


def test_normal_form_has_no_column_twice() -> None:
    assert len(set(EVENT_COLUMNS)) == len(EVENT_COLUMNS) == 26
