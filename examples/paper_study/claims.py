"""Statements of the paper and their verdicts, as a table.

A claim is computed from tables of measurements. Its measures are numbers with units; the function that yields the claim
documents how the verdict follows from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import pandas as pd

from commtrace.formatting import format_bytes, format_count, format_duration, format_share

CONFIRMED: Final = "confirmed"
REFINED: Final = "refined"
"""True, but for another reason, or only in some of the cases."""
CONTRADICTED: Final = "contradicted"
INCONCLUSIVE: Final = "inconclusive"
"""The measurements cannot decide; `Claim.reason` says why."""

_FORMATS: Final[Mapping[str, Callable[[Any], str]]] = {
    "share": format_share,
    "ratio": lambda value: f"{value:.3f}",
    "factor": lambda value: f"{value:.2f}",
    "bytes": format_bytes,
    "ns": format_duration,
    "count": format_count,
}
_RANGE: Final = ("least", "most")


@dataclass(frozen=True)
class Measure:
    """Values of one quantity, by model, scheme or layout."""

    quantity: str
    unit: str
    """A key of the formats above; "ratio" is for exact numbers, "factor" for measured times."""
    values: Mapping[str, float]
    """With the keys `least` and `most`, a range."""

    @property
    def text(self) -> str:
        """The quantity and its values, for example "share of all_reduce: 50.0 % (19M, 125M)"."""
        names: dict[str, list[str]] = {}
        for name, value in self.values.items():
            names.setdefault(_FORMATS[self.unit](value), []).append(name)
        if tuple(self.values) == _RANGE:
            return f"{self.quantity}: {' to '.join(names)}"
        if not self.values:
            return f"{self.quantity}: none"
        if len(names) == 1 < len(self.values):
            return f"{self.quantity}: {', '.join(names)} (all)"
        values = [f"{value} ({', '.join(of)})" for value, of in names.items()]
        return f"{self.quantity}: {', '.join(values)}"


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, its verdict and the measurements that it follows from."""

    key: str
    place: str
    """Place in the paper, for example "Figure 7"."""
    statement: str
    verdict: str
    measures: Sequence[Measure]
    command: str
    """Command that repeats the measurement."""
    reason: str = ""
    """Why the verdict is INCONCLUSIVE."""

    @property
    def measured(self) -> str:
        """All measures as text, after the reason if there is one."""
        return "; ".join([*([self.reason] if self.reason else []), *(measure.text for measure in self.measures)])


def value_range(quantity: str, unit: str, values: Iterable[float]) -> Measure:
    """Return the measure of the range of values."""
    ordered = sorted(values)
    return Measure(quantity, unit, dict(zip(_RANGE, (ordered[0], ordered[-1]), strict=True)))


def claim_table(claims: Iterable[Claim]) -> pd.DataFrame:
    """Return one row per claim: `key`, `claim`, `place`, `measured`, `verdict`, `command`."""
    columns = ["key", "claim", "place", "measured", "verdict", "command"]
    rows = [(item.key, item.statement, item.place, item.measured, item.verdict, item.command) for item in claims]
    return pd.DataFrame(rows, columns=columns)


def claims_as_json(claims: Iterable[Claim]) -> str:
    """Return the claims with exact numbers, as a JSON document."""
    content = {"format": "commtrace-study-claims", "version": 1, "claims": [asdict(item) for item in claims]}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"
