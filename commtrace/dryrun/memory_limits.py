"""Check of the system's memory limits: a dry run needs address space for more memory than there is."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path


def memory_obstacle() -> str:
    """Return why this machine cannot do a dry run, and what to change; "" if it can."""
    with contextlib.suppress(OSError):
        if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            return (
                "vm.overcommit_memory is 2: the system does not overcommit memory, and a dry run allocates all "
                "that the job would use, without touching it; set it to 0 or 1 (sysctl vm.overcommit_memory=0)"
            )
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        return (
            f"the address space is limited to {limit >> 20:,} MiB (ulimit -v), and a dry run allocates all that the "
            "job would use; raise the limit (ulimit -v unlimited)"
        )
    return ""
