"""One-line summary of the training job."""

from __future__ import annotations

import math

from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.table_reader import Row


def summarize_job(run: RecordedRun) -> str:
    """Return, for example, "DeepSpeedEngine, ZeRO stage 1, fp32, 4,870,144 parameters".

    If no job was captured, return "simulated" for a dry run, else "".
    """
    job = run.job
    if job is None:
        return "simulated" if run.simulated else ""
    texts = [str(job[key]) for key in ("engine", "source") if job.get(key)][:1]
    if job.get("zero_stage") is not None:
        texts.append(f"ZeRO stage {job['zero_stage']}")
    if job.get("precision"):
        texts.append(str(job["precision"]))
    first_jobs = [next(iter(process.tables.jobs.values()), None) for process in run.processes]
    counts = {count for job in first_jobs if (count := parameter_count(job)) is not None}
    if len(counts) == 1:
        texts.append(f"{counts.pop():,} parameters")
    elif counts:
        texts.append(f"{min(counts):,} to {max(counts):,} parameters per rank")
    models = max(len(process.tables.jobs) for process in run.processes)
    suffix = f" (the first of {models} models)" if models > 1 else ""
    return ", ".join(texts) + suffix + (", simulated" if run.simulated else "")


def parameter_count(job: Row | None) -> int | None:
    """Return the number of elements of all parameters of a job row; None if the row does not list them."""
    rows = (job or {}).get("parameters")
    try:
        return sum(math.prod(int(length) for length in row["shape"]) for row in rows) if rows else None
    except (KeyError, TypeError, ValueError):
        return None
