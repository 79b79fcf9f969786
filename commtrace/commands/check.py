"""`commtrace check`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from .option_types import add_run_directory, exact_fraction
from .theory import add_options, options_of

if TYPE_CHECKING:
    from commtrace.analyses.fold_engine import Analysis
    from commtrace.run import Run

DIFFERS: Final = 1
NOT_COMPARED: Final = 3
"""Exit statuses besides 0; 2 is argparse's."""


class Command:
    """Compare a run with theory, for continuous integration.

    Theory predicts from the job alone (its parameters, parallel degrees and settings) which calls every rank makes at
    start-up and in each step. Exit status:

      0  all ranks made the expected calls; with --tolerance, the payloads of all cells are within it
      1  something differs; each differing cell (one step of a rank, one operation of one parallel dimension) is printed
         with its call sites and the most likely cause. Also: the log cannot be read
      2  wrong arguments
      3  nothing differs, but some rank could not be compared: theory has no rules for its job, or its log is missing

    The job description comes from the log: it is captured when DDP or DeepSpeed is set up, when an FSDP2 model first
    runs, or when the optimizer of a model with parallelize_module alone first steps. With --config it comes from
    configuration files, as in `commtrace theory`, which needs the extra `theory` (PyYAML, pydantic).
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        add_run_directory(parser)
        parser.add_argument(
            "--tolerance",
            metavar="X",
            type=exact_fraction,
            default="0",
            help="fraction by which the payload of a cell may differ, 0.01 for example; numbers and payloads of "
            "calls are then not compared (default: %(default)s)",
        )
        parser.add_argument(
            "--config", metavar="FILE", action="append", help="configuration to predict the calls from; may be repeated"
        )
        add_options(parser.add_argument_group("with --config"), parser.add_argument_group("with --config, the model"))

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the verdict."""
        from commtrace.analyses.check.verdict import judge
        from commtrace.analyses.check.verdict_text import lines
        from commtrace.analyses.fold_engine import fold
        from commtrace.run import open_run

        run = open_run(arguments.directory)
        for note in run.notes:
            print(f"commtrace: {note}", file=sys.stderr)
        tables = fold(run, [_analysis(run, arguments)])
        for other in tables["theory"]["other_versions"].dropna().unique():
            print(f"commtrace: rules were written from other versions: {other}", file=sys.stderr)
        # Of a dry run, ranks that were not run are not missing.
        world_size = None if run.simulated else run.world_size
        verdict = judge(tables, run.ranks, world_size, arguments.tolerance)
        print("\n".join(lines(verdict)))
        if run.simulated:
            print(f"simulated: {len(run.ranks):,} of {run.world_size:,} ranks were run, and nothing was sent")
        if len(verdict.differences):
            return DIFFERS
        return 0 if verdict.agrees else NOT_COMPARED


def _analysis(run: Run, arguments: argparse.Namespace) -> Analysis:
    from commtrace.analyses import reconciliation
    from commtrace.theory.forecast import PlanError, forecast

    if arguments.config is None:
        return reconciliation.ANALYSIS
    if run.world_size is None:
        raise PlanError(f"{run.log.path}: the log does not say how many ranks the run has; leave --config out")
    plan = forecast(arguments.config, run.world_size, options_of(arguments)).plan
    return reconciliation.analysis_of(*(plan.stages or (plan.row,)))
