"""Collectives that raise: prints what reaches the program."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
rank = dist.get_rank()


def attempt(name: str, call: object) -> None:
    """Print how a call ends."""
    try:
        call()  # type: ignore[operator]
        print(name, "returned")
    except Exception as error:
        print(name, type(error).__name__, str(error).split("\n")[0][:60] if name != "timeout" else "")


dist.all_reduce(torch.ones(4))
# The first is refused within the operator, the second fails while it is waited for.
attempt("shape", lambda: dist.all_gather([torch.ones(3), torch.ones(4)], torch.ones(4)))
attempt("timeout", lambda: dist.all_reduce(torch.ones(4)) if rank == 0 else None)
