"""Fields and messages encoded with numpy equal those that the protobuf library writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commtrace.analyses.protobuf_columns import (
    chosen,
    constant,
    fixed64,
    joined,
    message,
    stacked,
    varint,
    where,
)

pb2 = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")

EDGES = [edge for bits in range(0, 63, 7) for edge in ((1 << bits) - 1, 1 << bits, (1 << bits) + 1)]
VALUES = np.array([*EDGES, (1 << 63) - 1])


@pytest.mark.parametrize("largest", [0, 1, 127, 128, 1 << 20, (1 << 63) - 1])
def test_fields_are_encoded_as_by_the_library(largest: int) -> None:
    values = VALUES[largest >= VALUES]
    event = pb2.TrackEvent
    columns = [
        varint(event.TRACK_UUID_FIELD_NUMBER, values),
        fixed64(event.DOUBLE_COUNTER_VALUE_FIELD_NUMBER, values / 3),
    ]
    expected = [pb2.TrackEvent(track_uuid=value, double_counter_value=value / 3) for value in values.tolist()]
    assert joined(columns) == b"".join(expected_event.SerializeToString() for expected_event in expected)


def test_messages_are_encoded_as_by_the_library() -> None:
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 1 << rng.integers(1, 63, 1000))
    present, ends = rng.integers(0, 2, (2, 1000)).astype(bool)
    names = ["", "a", "all_reduce", "x" * 300]
    name_index = rng.integers(0, len(names), 1000)
    event, packet = pb2.TrackEvent, pb2.TracePacket
    texts = stacked([event(name=name).SerializeToString() for name in names])
    annotation = [constant(b"\x08\x05"), varint(pb2.DebugAnnotation.INT_VALUE_FIELD_NUMBER, numbers)]
    flow = np.where(ends, event.TERMINATING_FLOW_IDS_FIELD_NUMBER, event.FLOW_IDS_FIELD_NUMBER)
    fields = [
        chosen(texts, name_index),
        *where(present, message(event.DEBUG_ANNOTATIONS_FIELD_NUMBER, annotation)),
        fixed64(flow, numbers),
    ]
    event_column = message(packet.TRACK_EVENT_FIELD_NUMBER, fields)
    rows = joined(where(name_index > 0, message(pb2.Trace.PACKET_FIELD_NUMBER, event_column)))

    def expected(row: int) -> Any:
        annotations = [{"name_iid": 5, "int_value": int(numbers[row])}] if present[row] else []
        arrow = {("terminating_flow_ids" if ends[row] else "flow_ids"): [int(numbers[row])]}
        return packet(track_event={"name": names[name_index[row]], "debug_annotations": annotations, **arrow})

    trace = pb2.Trace()
    trace.ParseFromString(rows)
    assert [*trace.packet] == [expected(row) for row in np.flatnonzero(name_index > 0).tolist()]
