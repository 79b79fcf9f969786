"""Settings of runs that may be the cause of different calls: job, library versions, environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final

import pandas as pd

from commtrace.analyses.table_specs.spec import TableSpec, text_column
from commtrace.formatting import format_plural
from commtrace.job_facts import known
from commtrace.job_row import JobRow
from commtrace.reading.recorded_run import RecordedRun

SETTING_DIFFERENCES: Final = TableSpec("setting_differences",
    "Settings that differ between two runs", "A row per setting.", (
    text_column("name", "setting", "World size, library version, environment variable, or field of the job."),
    text_column("a", "A", 'Value in the first run; "-" if it has none.'),
    text_column("b", "B", "The same in the second run."),
))  # fmt: skip

_VARIABLES: Final = ("NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "DS_")
_LONGEST: Final = 60


def setting_facts(run: RecordedRun) -> dict[str, str]:
    """Return the settings of a run by name, as its lowest rank recorded them."""
    process: Mapping[str, Any] = run.processes[0].tables.process if run.processes else {}
    job = JobRow.read(run.job or {})
    facts = {"world size": str(run.world_size or "")} | dict(_flatten(process.get("versions") or {}, "version "))
    environment = process.get("environment")
    if isinstance(environment, Mapping):
        facts |= {str(name): str(value) for name, value in environment.items() if str(name).startswith(_VARIABLES)}
    facts |= dict(_flatten(job.to_json(), "job "))
    if elements := known(lambda: job.elements):
        del facts["job parameters"]  # to be the last
        facts["job parameters"] = f"{format_plural(len(job.parameters), 'tensor')} of {elements:,} elements"
    return {name: value for name, value in facts.items() if value}


def compare_settings(a: Mapping[str, str], b: Mapping[str, str]) -> pd.DataFrame:
    """Return the settings that differ: `name`, and its values `a` and `b`, "-" where it is missing."""
    rows = [(name, a.get(name, "-"), b.get(name, "-")) for name in {**a, **b} if a.get(name) != b.get(name)]
    return pd.DataFrame(rows, columns=SETTING_DIFFERENCES.column_names, dtype=object)


def _flatten(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{name}{key}" if name.endswith(" ") else f"{name}.{key}")
        return
    text = str(value)
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 12]}... #{blake2b(text.encode(), digest_size=3).hexdigest()}"
    yield name, text
