"""One-line summary of the training job."""

from __future__ import annotations

from commtrace.job_facts import known
from commtrace.job_row import JobRow
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.table_reader import Row


def summarize_job(run: RecordedRun) -> str:
    """Return, for example, "DeepSpeedEngine, ZeRO stage 1, fp32, 4,870,144 parameters".

    If no job was captured, return "simulated" for a dry run, else "".
    """
    if run.job is None:
        return "simulated" if run.simulated else ""
    job = JobRow.read(run.job)
    texts = [known(lambda: job.engine) or known(lambda: job.source) or ""]
    stage = known(lambda: job.zero_stage)
    texts.append("" if stage is None else f"ZeRO stage {stage}")
    texts.append(known(lambda: job.precision) or "")
    counts = {count for row in _first_jobs(run) if (count := parameter_count(row)) is not None}
    if len(counts) == 1:
        texts.append(f"{counts.pop():,} parameters")
    elif counts:
        texts.append(f"{min(counts):,} to {max(counts):,} parameters per rank")
    models = max(len(process.tables.jobs) for process in run.processes)
    suffix = f" (the first of {models} models)" if models > 1 else ""
    return ", ".join(filter(None, texts)) + suffix + (", simulated" if run.simulated else "")


def parameter_count(row: Row) -> int | None:
    """Return the number of elements of all parameters of a job; None if its row does not list them."""
    job = JobRow.read(row)
    return known(lambda: job.elements if job.parameters else None)


def _first_jobs(run: RecordedRun) -> list[Row]:
    """Return the different rows of the ranks' first jobs."""
    rows: list[Row] = []
    for process in run.processes:
        row = next(iter(process.tables.jobs.values()), None)
        if row is not None and row not in rows:
            rows.append(row)
    return rows
