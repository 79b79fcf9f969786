"""What a network can do: measured (`commtrace bench`), fitted, described in a file, and used to predict times.

commtrace bench --nproc 2              measure this machine; prints the tables, keeps them in network.json
commtrace bench --show network.json    the tables and the fit again

operations        what is measured, in nccl-tests' sizes
plan, ranks       how much of it, and by which processes
library           torch.distributed and mpi4py behind one interface (torch_library, mpi_library)
measuring         one operation and size: warm-up, rounds, who is slowest
results           what was measured, kept as JSON
fit               a latency and a bandwidth of it, with the error of sizes that were held out
algorithms        how both change with the number of ranks and hosts
networks          a network that can be asked for a time: a measured one, or a described one
tables            text as nccl-tests and the OSU micro-benchmarks print it
"""

from __future__ import annotations

from commtrace.errors import CommtraceError

__all__ = ["NetworkError"]


class NetworkError(CommtraceError):
    """A network cannot be measured, or a file of one cannot be used; the message says what to change."""
