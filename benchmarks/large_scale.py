"""Time and memory of commands that read logs of 20 and 100 million events, measured once as in `scale.py`.

It takes half an hour, and 16 GB for one log at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import results
from scale import Case, rows

EVENTS = 100_000_000


def cases(events: int) -> Iterator[Case]:
    """Yield logs of a fifth of `events`, and of all of them."""
    yield Case("1,000 ranks, DDP", "ddp", 1000, events // 5, together=True)
    yield Case("10,000 ranks, DDP", "ddp", 10_000, events, together=True)
    yield Case("2 ranks, ZeRO-3", "zero3", 2, events)


def main() -> None:
    """Run the benchmark and write its results."""
    parser = results.parser(__doc__)
    parser.add_argument("--events", type=int, default=EVENTS, help="events in the largest logs (%(default)s)")
    options = results.parsed(parser, events=100_000)
    results.write("large_scale", [*rows(cases(options.events), options.only, times=1)], options)


if __name__ == "__main__":
    main()
