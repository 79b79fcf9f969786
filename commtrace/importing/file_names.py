"""What the names of other tools' files say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_RANK: Final = re.compile(r"rank[-_]?(\d{1,6})", re.IGNORECASE)


def rank_in_name(path: Path) -> int | None:
    """Return the rank in the name of a file, such as "trace_rank3.json"; None if it has none."""
    match = _RANK.search(path.name)
    return None if match is None else int(match[1])
