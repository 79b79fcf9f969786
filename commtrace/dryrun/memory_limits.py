"""Whether the system promises memory that it may not have, as a dry run needs."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path


def memory_obstacle() -> str:
    """Why this machine cannot do a dry run, and what to change; "" where nothing is in the way."""
    with contextlib.suppress(OSError):
        if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            return (
                "vm.overcommit_memory is 2: the system promises no memory that it may not have, and a dry run asks for "
                "all that the job would use, without touching it; set it to 0 or 1 (sysctl vm.overcommit_memory=0)"
            )
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        return (
            f"the address space is limited to {limit >> 20:,} MiB (ulimit -v), and a dry run has addresses for all "
            "that the job would use; lift the limit (ulimit -v unlimited)"
        )
    return ""
