"""Small reports of mpiP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_RULE = "-" * 75


def mpip_report(calls: Sequence[tuple[str, int, int, int, tuple[Any, Any, Any] | None]]) -> str:
    """Return a report of two ranks.

    Args:
        calls: Function, call site (1 or 2), rank, number of calls, and maximum, minimum and sum of sent bytes.
    """
    head = "@ mpiP\n@ Command : ./program\n@ Version                  : 3.5.0\n"
    tasks = "".join(f"@ MPI Task Assignment      : {rank} node{rank}\n" for rank in range(2))
    sites = (
        " ID Lev File/Address        Line Parent_Funct             MPI_Call\n"
        "  1   0 sweep-mpi.c           24 main                     Allreduce\n"
        "  1   1 sweep-mpi.c           99 start                    \n"
        "  2   0 0x405c08                 [unknown]                Isend\n"
    )
    time_rows = ["Name              Site Rank  Count      Max     Mean      Min   App%   MPI%"]
    sent_rows = ["Name              Site Rank   Count       Max      Mean       Min       Sum"]
    for name, site, rank, count, sizes in calls:
        for shown in (str(rank), "*"):
            time_rows.append(f"{name:17} {site:4} {shown:>4} {count:6}    0.077    0.013    0.004   0.02   0.03")
            if sizes is not None:
                most, least, total = sizes
                sent_rows.append(f"{name:17} {site:4} {shown:>4} {count:7} {most:>9} {most:>9} {least:>9} {total:>9}")
    sections = {
        "MPI Time (seconds)": "Task    AppTime    MPITime     MPI%\n   0       11.1        6.1    55.10\n",
        "Callsites: 2": sites,
        "Aggregate Time (top twenty, descending, milliseconds)": "Call  Site  Time  COV\nBarrier 1 3e+04 0.6\n",
        f"Callsite Time statistics (all, milliseconds): {len(time_rows)}": "\n".join(time_rows) + "\n",
        f"Callsite Message Sent statistics (all, sent bytes) {_RULE[:20]}": "\n".join(sent_rows) + "\n",
    }
    text = "".join(f"{_RULE}\n@--- {title} {_RULE[:30]}\n{_RULE}\n{content}" for title, content in sections.items())
    return f"{head}{tasks}\n{text}{_RULE}\n@--- End of Report ---\n{_RULE}\n"
