"""Columns that several tables have."""

from __future__ import annotations

from typing import Any, Final

from commtrace.formatting import format_count, format_power_of_two, is_known

from .spec import column, count, prose, share, size, text_of, word


def _bin_bound(value: Any) -> str:
    return format_power_of_two(int(value).bit_length() - 1) if value else "0 B"


def _call_site(value: Any) -> str:
    return text_of(value) if value != "" else "not recorded"


OP: Final = word("op", "operation", "Operation, as the event table names it.")
ROLE: Final = word(
    "role", "dimension", 'Parallel dimension of the group: "data", "tensor", "pipeline" ...; "unknown" if not known.'
)
PHASE: Final = word("phase", "phase", 'Phase of the step: "init", "forward", "backward", "optimizer" or "other".')
SITE: Final = column(
    "", _call_site, "site", "call site", "Line of code that made the calls, outside of libraries' wrappers; "
    '"" if it was not recorded.', kind="text", shortenable=True,
)  # fmt: skip
RANK: Final = column(
    "", lambda rank: str(rank) if is_known(rank) and rank >= 0 else "-", "rank", "rank", "Global rank."
)
STEP: Final = column("", text_of, "step", "step", "Training step; -1 is start-up, everything before the first step.")
CALLS: Final = count("calls", "calls", "Recorded calls, summed over the ranks seen.")
PAYLOAD: Final = size(
    "payload_bytes", "payload", "Size of the calls' buffers as nccl-tests counts it, summed over the ranks seen."
)
WIRE: Final = size(
    "wire_bytes",
    "wire (min)",
    "Least bytes that the ranks must send for these calls with the best algorithm. Computed from the payload, never "
    "measured; missing if it is not known for every call.",
)
PAYLOAD_SHARE: Final = share("payload_share", "payload share", "Share of the payload of all calls.")
VOLUME: Final = (CALLS, PAYLOAD, WIRE, PAYLOAD_SHARE)
PER_RANK: Final = (
    count("calls_per_rank", "calls", "Calls per rank seen."),
    size("payload_bytes_per_rank", "payload", "Payload per rank seen."),
    size("wire_bytes_per_rank", "wire (min)", "Least bytes that a rank must send, mean over the ranks seen."),
)
FROM: Final = column(
    "bytes", _bin_bound, "from_bytes", "from", "Smallest payload of the bin, a power of two; 0: calls without payload."
)
BELOW: Final = column("bytes", _bin_bound, "below_bytes", "below", "Payload that all calls of the bin are below.")
SUM: Final = size("sum_bytes", "sum", "Sum of the calls' payloads.")
RUN: Final = word("run", "run", "Name of the run: the last parts of its path.", shortenable=True)
COUNTERS: Final = (
    count("calls", "calls", "Calls that the hooks counted; missing unless every process wrote its counters."),
    count("dropped", "", "Calls without a record because the ring buffer was full."),
    count("removed", "", "Records removed to keep the log below its size limit."),
    count("lost", "", "Records that could not be written."),
    count("hook_errors", "", "Calls on which a hook failed."),
)
NOT_FOUND: Final = count(
    "not_found", "", "Further records that processes wrote, as their counters say, and the log lacks."
)
FIRST_ERROR: Final = prose("first_error", "", "Message of the first hook error; missing if there was none.")
WATERFALL: Final = (
    prose("label", "cause", "Closed form, cause of a difference from it, or what was measured.", shortenable=True),
    column("bytes", format_count, "bytes", "bytes", "Wire bytes of this rank's step: a difference, if a cause."),
    word("kind", "kind", '"closed form", "cause", "unexplained" or "measured"; the last is the sum of the others.'),
)
