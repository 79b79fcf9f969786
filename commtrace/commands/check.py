"""`commtrace check`."""

from __future__ import annotations

import argparse
import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .theory import add_options, options_of

if TYPE_CHECKING:
    from commtrace.analyses.engine import Analysis
    from commtrace.run import Run

DIFFERS: Final = 1
NOT_COMPARED: Final = 3
"""Exit statuses beside 0; 2 is argparse's."""


class Command:
    """Compare a run with theory, for continuous integration: status 0 when they are equal.

    Theory tells from the job alone (its parameters, parallel degrees and settings) which calls every rank makes at
    start-up and in each step. The status is 0 when all ranks of the run made exactly those; 1 when something differs,
    and then every cell (a rank's step, one operation of one parallel dimension) that does is written with its lines of
    code and the likeliest cause; 3 when nothing differs, but some rank could not be compared: theory has no rules for
    its job, or its log is missing. A log that cannot be read is status 1 as well.

    The job is the one that the log has, captured when DeepSpeed or DDP was set up; with --config it is told from the
    configuration instead, as `commtrace theory` does, so that what ran is held against what was meant to run.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument(
            "directory", metavar="DIR", type=Path, help="what COMMTRACE named, or the folder of one run in it"
        )
        parser.add_argument(
            "--tolerance",
            metavar="X",
            type=tolerance,
            default=Fraction(0),
            help="share by which a cell's payload may differ, 0.01 say; calls and sizes are not compared then (0)",
        )
        parser.add_argument(
            "--config", metavar="FILE", action="append", help="configuration that the job follows from; may be repeated"
        )
        add_options(parser.add_argument_group("with --config"), parser.add_argument_group("with --config, the model"))

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the verdict."""
        from commtrace.analyses.check.verdict import judge
        from commtrace.analyses.check.verdict_text import lines
        from commtrace.analyses.engine import fold
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


def tolerance(text: str) -> Fraction:
    """A share as its decimal digits say it, exactly."""
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if share < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0, such as 0.01")
    return share
