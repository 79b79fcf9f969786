"""The volume part of the study: dry runs, and the paper's figures 7 to 15 made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from commtrace.errors import CommtraceError
from examples.paper_study.parts import Experiment, Options, Section

from . import beyond, data_parallel, model_parallel, sequence
from .results import Recorded, read
from .runs import DryRun, plan
from .tables import Results


class Part:
    """Figures 7 to 15, and what the paper has none of."""

    name = "volume"

    def experiments(self, options: Options) -> Sequence[Experiment]:
        """The dry runs, each once."""
        return [run.experiment() for run in plan(options.models, quick=options.quick).all]

    def sections(self, options: Options, found: Mapping[str, Path]) -> Sequence[Section]:
        """Those that anything can be shown of."""
        results = results_of(options, found)
        of = (data_parallel.sections, model_parallel.sections, sequence.sections, beyond.sections)
        return [*chain.from_iterable(make(results) for make in of)]


def results_of(options: Options, found: Mapping[str, Path]) -> Results:
    """What the dry runs that are done recorded, with theory beside it. `found`: folders by the key of an experiment."""
    planned = plan(options.models, quick=options.quick)
    recorded: dict[DryRun, Recorded] = {}
    failed: dict[DryRun, str] = {}
    for run in planned.all:
        if run.key in found:
            try:
                recorded[run] = read(run, found[run.key])
            except CommtraceError as error:
                failed[run] = str(error)
    return Results(options, planned, recorded, failed)
