"""What was measured of each rank and step, call by call alike: the side that is held against theory."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from commtrace.analyses.engine import RecordBlock, group_rows, merge_sums, sum_groups

DETAILED_STEPS: Final = 64
"""Steps whose message sizes are kept apart, so that a log of many steps stays a small table; later ones have -1."""

KEYS: Final = ("process", "step", "role", "op", "phase", "site", "size", "ranks")


def partial(block: RecordBlock) -> pd.DataFrame:
    """Calls that are alike: KEYS, `calls`, `payload_bytes`, `wire_parts` (wire bytes times `ranks`) and `wire_unknown`.

    `ranks` is the size of the call's group. Wire bytes are whole multiples of an n-th byte: counted in those, sums are
    exact.
    """
    cells, labels = block.distinct, block.labels
    size = np.where(cells["step"] < DETAILED_STEPS, cells["payload"], -1)
    ranks = labels.group_sizes(cells["group"])
    first, groups = group_rows([*(cells[name] for name in ("step", "group", "kind", "phase", "site")), size])
    total = len(first)
    wire, unknown = (cells.volumes[name] for name in ("wire_bytes", "wire_unknown"))
    parts = np.rint(np.where(unknown == 0, wire * ranks, 0)).astype(np.int64)
    words = {
        "role": labels.text("role", labels.ids("role", cells)[first]),
        "op": labels.text("op", cells["kind"][first]),
        "phase": labels.text("phase", cells["phase"][first]),
        "site": labels.text("site", cells["site"][first]),
    }
    return pd.DataFrame(
        {
            "process": np.full(total, labels.number, np.int64),
            "step": cells["step"][first],
            **words,
            "size": size[first],
            "ranks": ranks[first],
            "calls": sum_groups(cells.calls, groups, total),
            "payload_bytes": sum_groups(cells.volumes["payload_bytes"], groups, total),
            "wire_parts": sum_groups(parts, groups, total),
            "wire_unknown": sum_groups(unknown, groups, total),
        }
    )


merge = merge_sums(*KEYS)
