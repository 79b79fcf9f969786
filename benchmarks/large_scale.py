"""What commands take that read logs of 20 and of 100 million events, as `scale.py` measures it, once.

It takes half an hour, and 16 GB for each log in turn.
"""

from __future__ import annotations

from collections.abc import Iterator

import results
from scale import Case, rows

EVENTS = 100_000_000


def cases(events: int) -> Iterator[Case]:
    """Logs of a fifth of so many events, and of all."""
    yield Case("1,000 ranks, DDP", "ddp", 1000, events // 5, together=True)
    yield Case("10,000 ranks, DDP", "ddp", 10_000, events, together=True)
    yield Case("2 ranks, ZeRO-3", "zero3", 2, events)


def main() -> None:
    """Measure."""
    parser = results.parser(__doc__)
    parser.add_argument("--events", type=int, default=EVENTS, help="of the largest logs (%(default)s)")
    options = results.parsed(parser, events=100_000)
    results.write("large_scale", [*rows(cases(options.events), options.only, times=1)], options)


if __name__ == "__main__":
    main()
