"""Settings in which runs of different sizes differ, apart from their size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from commtrace.analyses.process_settings import (
    CORES,
    LIMITS,
    ProcessSettings,
    core_count,
    is_by_rank,
    names_of,
    settings_by_rank,
    without_consequences,
)
from commtrace.formatting import format_plural
from commtrace.reading.recorded_run import RecordedRun


class _RunSettings(NamedTuple):
    ranks: Mapping[int, ProcessSettings]
    ranks_per_host: int


def setup_differences(runs: Mapping[str, RecordedRun]) -> Iterator[tuple[str, str, str]]:
    """Yield setting, run, and value of each setting that differs between runs.

    Values are compared as sets over the ranks; of cores and limits, their amount. A job with more ranks may have more
    of them: those that are equal for each rank, or for each host, do not differ.
    """
    all_settings = {name: _read(run) for name, run in runs.items()}
    names = names_of(settings for run in all_settings.values() for settings in run.ranks.values())
    differing = [name for name in names if not is_by_rank(name) and _differs(name, all_settings.values())]
    for name in without_consequences(differing):
        for run, settings in all_settings.items():
            yield name, run, "; ".join(_shown(name, settings))


def _read(run: RecordedRun) -> _RunSettings:
    ranks = Counter(process.host for process in run.processes)
    return _RunSettings(settings_by_rank(run), max(ranks.values(), default=1))


def _differs(name: str, runs: Collection[_RunSettings]) -> bool:
    values = [_compared(name, run) for run in runs]
    if len({*values, frozenset()}) <= 2 or frozenset() in values:  # equal, or not known of every run
        return False
    if name not in (CORES, *LIMITS):
        return True
    amounts = [{float(text) for text in texts if text.replace(".", "", 1).isdecimal()} for texts in values]
    per_rank = {frozenset(amount / run.ranks_per_host for amount in amounts[at]) for at, run in enumerate(runs)}
    return not all(amounts) or len(per_rank) > 1


def _compared(name: str, run: _RunSettings) -> frozenset[str]:
    """Return what is compared of all ranks; nothing if it is not known of one of them."""
    values = {settings.compared(name) for settings in run.ranks.values()}
    if name == CORES:
        values = {value and str(core_count(value)) for value in values}
    return frozenset() if None in values else frozenset(value for value in values if value is not None)


def _shown(name: str, run: _RunSettings) -> list[str]:
    if name == CORES:
        counts = {core_count(settings.compared(name) or "") or 0 for settings in run.ranks.values()}
        return [format_plural(count, "core") for count in sorted(counts)]
    return sorted({settings.shown(name) for settings in run.ranks.values()})
