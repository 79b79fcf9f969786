"""Compare the calls of two runs.

Calls are compared by operation, payload (except for pickled objects), dtype,
reduction, group, peer or root, phase and step, and by their order within a
group, but not by times. Ranks and steps with the same difference are merged. If
one run has more steps, each additional step must equal a step of the other run.
Settings, versions and job fields that differ are listed. If a process of a run
failed, the first lines say which one ended first and by what; calls of the step
in which it ended are not compared. Exit status:

  0  equal; calls may come from other call sites, which are listed
  1  a call differs, or a rank is missing
  2  the command failed: a log cannot be read, or the arguments are wrong
  3  nothing differs, but some calls could not be compared: records were lost, a
     hook failed, or a process failed or was killed
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .exit_status import status_of
from .option_types import add_shared


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), type=Path, help="log directory of a run or of a dry run")
    add_shared(parser, "--json", "--own", "--per-rank", "--dask", "--width")


def run(arguments: argparse.Namespace) -> int:
    """Print the differences, and return the exit status."""
    from commtrace.analyses.across_ranks.endings import find_endings
    from commtrace.analyses.across_ranks.endings_section import describe_endings
    from commtrace.analyses.compare.recorded_calls import read_calls
    from commtrace.analyses.compare.two_runs import compare_calls
    from commtrace.analyses.compare.verdict_text import heading, shows_all_ranks, verdict_lines, wrapped
    from commtrace.analyses.report.document import diff_to_json
    from commtrace.reading.executors import open_executor
    from commtrace.reading.log_notes import print_notes
    from commtrace.run import open_run

    with open_executor(arguments.dask) as executor:
        runs = [open_run(path, recover=True, executor=executor) for path in (arguments.a, arguments.b)]
        for run in runs:
            run.require_payloads()
        a, b = (read_calls(run, arguments.own) for run in runs)
    print_notes((note for run in runs for note in run.notes), per_rank=arguments.per_rank)
    verdict = compare_calls(a, b)
    for name, run in zip("AB", () if arguments.json else runs, strict=False):
        for text in describe_endings(find_endings(run)):
            print(*wrapped(f"{name}: {text}", arguments.width), sep="\n")
    if arguments.json:
        print(diff_to_json(verdict, per_rank=arguments.per_rank))
        return status_of(verdict)
    first = heading(verdict, "equal", "different", "not compared")
    all_ranks = shows_all_ranks([*a.ranks, *b.ranks], per_rank=arguments.per_rank)
    place = "the tables of `commtrace diff --json`"
    print(first, *verdict_lines(verdict, ("A", "B"), arguments.width, place, all_ranks=all_ranks), sep="\n")
    return status_of(verdict)
