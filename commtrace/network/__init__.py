"""Communication times on a network: measured (`commtrace bench`) or described, fitted, and predicted.

commtrace bench --nproc 2              measure this machine, print the tables, and write network.json
commtrace bench --show network.json    print the tables and the fits again

bench_operations  the measured operations, with nccl-tests' sizes
bench_plan        what to measure
bench_ranks       the processes of a measurement; mpiexec starts those of MPI, process_exit ends them cleanly
measuring         the measurement of one operation and size; the interface of bench_torch and bench_mpi
bench_results     the results and their JSON file
benchmark_tables  results of nccl-tests and the OSU micro-benchmarks; nccl_tests_json reads its JSON files
bench_text        the results as nccl-tests and the OSU micro-benchmarks print them
fit               latency and bandwidth of each operation, and so the time of any size, with held-out errors
algorithms        latency and bandwidth as functions of the number of ranks and hosts; which links a group uses
call_probe        two traced ranks that run every operation, for `commtrace doctor`
networks          a measured or described network, which predicts the time of a call; callers count its group's hosts
"""

from __future__ import annotations

from commtrace.errors import CommtraceError

__all__ = ["NetworkError"]


class NetworkError(CommtraceError):
    """A network cannot be measured, or its file cannot be used; the message says what to change."""
