"""Small tables to draw figures from."""

from __future__ import annotations

import pandas as pd

MIB = 1 << 20


EVIL = "<script>alert(1)</script><a href='javascript:alert(2)'>x</a>&amp;\u202e%{x}"


def waterfall_table() -> pd.DataFrame:
    """Return a waterfall: 18 MiB expected, 9 more for one cause, 2 less for another, 1 unexplained."""
    return pd.DataFrame(
        [
            ("2P(d-1)/d", 18 * MIB, "closed form"),
            ("gradients are all_reduced", 9 * MIB, "cause"),
            ("parameters stay gathered", -2 * MIB, "cause"),
            ("unexplained", MIB, "unexplained"),
            ("measured", 26 * MIB, "measured"),
        ],
        columns=["label", "bytes", "kind"],
    )


def two_roles_table() -> pd.DataFrame:
    """Return the waterfall twice, as for two parallel dimensions."""
    return pd.concat([waterfall_table().assign(role=role) for role in ("data", "pipeline")], ignore_index=True)


def reconciliation_table() -> pd.DataFrame:
    """Return the cells of two ranks, start-up and two steps, with an all_reduce in place of a reduce_scatter."""
    cells = [
        (rank, step, "data", op, 1, 1, expected, measured, measured - expected, cause, "train.py:1 main")
        for rank in (0, 1)
        for step in (-1, 3, 4)
        for op, expected, measured, cause in (
            ("all_reduce", 0, 6 * MIB, "all_reduced"),
            ("all_gather", 6 * MIB, 6 * MIB, ""),
            ("reduce_scatter", 6 * MIB, 0, "all_reduced"),
        )
    ]
    columns = (
        "rank step role op expected_calls measured_calls expected_bytes measured_bytes difference_bytes cause sites"
    )
    return pd.DataFrame(cells, columns=columns.split())
