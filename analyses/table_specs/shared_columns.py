"""Columns that several tables share."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from commtrace.formatting import format_power_of_two, is_known

from .spec import bytes_column, column, count, share, text_of, word_column


def _bin_bound(value: Any) -> str:
    return format_power_of_two(int(value).bit_length() - 1) if value else "0 B"


def _call_site(value: Any) -> str:
    return text_of(value) if value != "" else "not recorded"


ranks_column = partial(word_column, ranks=True)
"""Return a column of lists of ranks."""

OP: Final = word_column("op", "operation", "Operation, as the event table names it.")
ROLE: Final = word_column("role", "dimension",
    'Parallel dimension of the group: "data", "tensor", "pipeline" ...; "unknown" if not known.')  # fmt: skip
PHASE: Final = word_column("phase", "phase",
    'Phase of the step: "init", "forward", "backward", "optimizer", "evaluation" or "other".')  # fmt: skip
SITE: Final = column("", _call_site, "site", "call site",
    "Source line that made the calls, outside the wrappers of libraries; \"\" if it was not recorded.", kind="text",
    shortenable=True)  # fmt: skip
RANK: Final = column("", lambda rank: str(rank) if is_known(rank) and rank >= 0 else "-", "rank", "rank",
    "Global rank.")  # fmt: skip
STEP: Final = column("", text_of, "step", "step",
    "Training step; -1 is start-up, before the first step; -2 is evaluations.")  # fmt: skip
CALLS: Final = count("calls", "calls", "Recorded calls, summed over the recorded ranks.")
PAYLOAD: Final = bytes_column("payload_bytes", "payload",
    "Size of the calls' buffers as nccl-tests counts it, summed over the recorded ranks.")  # fmt: skip
WIRE: Final = bytes_column("wire_bytes", "wire (min)",
    "Fewest bytes that the ranks can send for these calls. Computed from the payload, never measured; missing unless "
    "known for every call.")  # fmt: skip
PAYLOAD_SHARE: Final = share("payload_share", "payload share", "Share of the payload of all calls.")
VOLUME: Final = (CALLS, PAYLOAD, WIRE, PAYLOAD_SHARE)
PER_RANK: Final = (
    count("calls_per_rank", "calls", "Calls per recorded rank."),
    bytes_column("payload_bytes_per_rank", "payload", "Payload per recorded rank."),
    bytes_column("wire_bytes_per_rank", "wire (min)", "Wire bytes, mean over the recorded ranks."),
)  # fmt: skip
FROM: Final = column("bytes", _bin_bound, "from_bytes", "from",
    "Smallest payload of the bin, a power of two; 0: calls without payload.")  # fmt: skip
BELOW: Final = column("bytes", _bin_bound, "below_bytes", "below", "Upper bound of the bin, exclusive.")
SUM: Final = bytes_column("sum_bytes", "sum", "Sum of the calls' payloads.")
RUN: Final = word_column("run", "run", "Name of the run: the last parts of its path.", shortenable=True)
