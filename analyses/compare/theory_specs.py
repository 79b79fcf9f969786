"""Descriptions of the tables of the comparison with theory."""

from __future__ import annotations

from typing import Final

from commtrace.analyses.table_specs import shared_columns as shared
from commtrace.analyses.table_specs.spec import TableSpec, bytes_column, column, count, share, text_column, word_column
from commtrace.formatting import format_count, is_known

_WATERFALL: Final = (
    text_column("label", "cause", "Closed form, cause of a difference from it, or the recorded bytes.",
        shortenable=True),
    column("bytes", format_count, "bytes", "bytes", "Wire bytes of this rank's step; for a cause, the difference."),
    word_column("kind", "kind",
        '"closed form", "cause", "unexplained" or "measured"; the last is the sum of the others.'),
)  # fmt: skip

THEORY: Final = TableSpec("theory",
    "Agreement with theory", "A row per process. Bytes are payload over the compared steps.", (
    shared.RANK,
    word_column("scheme", "scheme", "Scheme whose rules predict the job; missing if it is not predicted."),
    text_column("not_predicted", "", "Why the process is not compared; missing if it is."),
    count("cells", "cells", "Compared cells: operations of a dimension in a step; missing if not compared."),
    text_column("other_versions", "", "Libraries whose version differs from that of the rules."),
    bytes_column("expected_bytes", "expected", "Payload that theory expects."),
    bytes_column("measured_bytes", "recorded", "Payload in the log."),
    bytes_column("matched_bytes", "matched", "Payload of calls that are as expected."),
    bytes_column("named_bytes", "known cause", "Payload of extra and missing calls whose cause is known."),
    bytes_column("unexplained_bytes", "unexplained",
        "Payload of extra and missing calls without a known cause."),
    share("matched_share", "matched share", "matched_bytes / measured_bytes."),
), merge_by="rank")  # fmt: skip
EXPECTED_CALLS: Final = TableSpec("expected", "Expected calls", "A row per rank, step, dimension and operation.", (
    shared.RANK, shared.STEP, shared.ROLE, shared.OP,
    count("calls", "calls", "Calls that theory expects."),
    count("calls_max", "calls (max)",
        "Most calls in any order of modules and gradients; missing if their number is certain."),
    bytes_column("payload_bytes", "payload", "Their payload; an upper bound if it depends on the data."),
    bytes_column("payload_bytes_min", "payload (min)", "Lower bound of their payload; missing if it is certain."),
), merge_by="rank")  # fmt: skip
RECONCILIATION: Final = TableSpec("reconciliation", "Expected and recorded calls",
    "Rows per rank, step, dimension, operation and cause, and by call site where the program itself may be the "
    "cause. Calls are compared by size; from step 64 on by "
    "number and bytes.", (
    shared.RANK, shared.STEP, shared.ROLE, shared.OP,
    count("expected_calls", "expected calls", "Calls that theory expects."),
    count("measured_calls", "recorded calls", "Calls in the log."),
    bytes_column("expected_bytes", "expected", "Payload that theory expects."),
    bytes_column("measured_bytes", "recorded", "Payload in the log."),
    column("bytes", lambda value: f"{value:+,.0f}" if is_known(value) else "-", "difference_bytes",
        "difference, bytes", "measured_bytes - expected_bytes."),
    text_column("cause", "cause", '"expected" if equal, else the cause of the difference, or "unexplained".'),
    text_column("sites", "call sites", "Call sites of the recorded calls, separated by semicolons."),
), {"page": "role op cause expected_calls measured_calls difference_bytes sites"}, merge_by="rank")  # fmt: skip
WATERFALL: Final = TableSpec("waterfall", "From the closed form to the recorded wire bytes",
    "Rows in the order of the sum, for the last complete, regular step of the lowest compared rank.", (
    *_WATERFALL,
), {"page": "label bytes"})  # fmt: skip
WATERFALL_BY_ROLE: Final = TableSpec("waterfall_by_role",
    "From the closed form to the recorded wire bytes, by parallel dimension",
    "Rows in the order of the sum, dimension by dimension. No rows if the closed form has one dimension; "
    "dimensions without a closed form begin at 0.", (
    shared.ROLE, *_WATERFALL,
), {"page": "role label bytes"})  # fmt: skip
