"""What was measured of each rank and step, call by call alike: the side that is held against theory."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from .fold import Block, grouped, merge_sums, summed

DETAILED_STEPS: Final = 64
"""Steps whose message sizes are kept apart, so that a log of many steps stays a small table; later ones have -1."""

KEYS: Final = ("process", "step", "role", "op", "phase", "site", "size", "ranks")


def partial(block: Block) -> pd.DataFrame:
    """Calls that are alike: KEYS, `calls`, `payload_bytes`, `wire_parts` (wire bytes times `ranks`) and `wire_unknown`.

    `ranks` is the size of the call's group. Wire bytes are whole multiples of an n-th byte: counted in those, sums are
    exact.
    """
    step, payload = block["step"], block["payload"]
    size = np.where(step < DETAILED_STEPS, payload, -1)
    ranks = block.names.group_sizes(block["group"])
    first, groups = grouped([step, block["group"], block["kind"], block["phase"], block["site"], size])
    total = len(first)
    known = block.volumes["wire_unknown"] == 0
    parts = np.rint(np.where(known, block.volumes["wire_bytes"] * ranks, 0)).astype(np.int64)
    words = {
        "role": block.names.name("role", block["group"][first]),
        "op": block.names.name("op", block["kind"][first]),
        "phase": block.names.name("phase", block["phase"][first]),
        "site": block.names.name("site", block["site"][first]),
    }
    return pd.DataFrame(
        {
            "process": np.full(total, block.names.number, np.int64),
            "step": step[first],
            **words,
            "size": size[first],
            "ranks": ranks[first],
            "calls": np.bincount(groups, minlength=total),
            "payload_bytes": summed(payload, groups, total),
            "wire_parts": summed(parts, groups, total),
            "wire_unknown": summed(block.volumes["wire_unknown"], groups, total),
        }
    )


merge = merge_sums(*KEYS)
