"""Compare a run with its expected calls, for continuous integration.

The expected calls come from one of three sources:

  rules            predicted from the job (its parameters, parallel degrees and
                   settings) by rules that reproduce the calls of PyTorch,
                   DeepSpeed and Megatron. Differences are printed with a likely
                   cause. Calls of the program itself, or of a framework without
                   rules, are listed; they fail the check only with --strict
  --against DIR2   the log of a dry run of the same program or of an earlier run
  --baseline FILE  a text file for version control, which --update-baseline FILE
                   writes

With rules, cells are compared. A cell is one operation of one parallel
dimension in one step of one rank.

The first line is the result, unless the job hangs. Exit status:

  0  as expected; with --tolerance, the payloads of all cells are within it
  1  a call differs; it is printed with call sites and, with rules, the most
     likely cause
     or: a rank is missing (--against, --baseline)
  2  the command failed: a log or FILE cannot be read, or the arguments are wrong
  3  nothing differs, but some calls could not be compared: records were lost, a
     hook failed, or a process was killed
     or: the job has no rules, or a rank left no log (with rules)
  4  the job hangs, or a rank died while others were waiting for it in a call;
     the first lines identify the call, and the comparison follows

With rules, the job comes from the log. The hooks capture it when DDP or
DeepSpeed is set up, or at the first forward pass of an FSDP2 model. A model
with parallelize_module only is captured at the first optimizer step but has no
rules (status 3): use --against or --baseline. With --config, the job comes from
configuration files, as in `commtrace theory`, and the extra `theory` (PyYAML,
pydantic) is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from commtrace.errors import CommtraceError
from commtrace.output_files import atomic_write
from commtrace.reading.log_notes import print_notes

from .exit_status import AS_EXPECTED, DIFFERENT, NOT_COMPARED, STUCK
from .option_types import add_shared, exact_fraction
from .theory import add_options, options_of

if TYPE_CHECKING:
    from commtrace.analyses.fold_engine import Analysis
    from commtrace.run import Run


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_shared(parser, "directory")
    add, add_source = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add_source("--against", metavar="DIR2", type=Path, help="compare with a dry run or an earlier run instead of rules")
    add_source("--baseline", metavar="FILE", type=Path, help="compare with a baseline instead of rules")
    add_source("--update-baseline", metavar="FILE", type=Path,
        help="write the calls of this run to FILE without comparing them; `own` lines in FILE are kept")  # fmt: skip
    add_shared(parser, "--own")
    add("--strict", action="store_true",
        help="with rules: fail on calls of the program itself, except those that match --own")  # fmt: skip
    add("--tolerance", metavar="X", type=exact_fraction, default="0",
        help="with rules: fraction by which the payload of a cell may differ, such as 0.01; above 0, the number of "
        "calls and their payloads are not compared (default: %(default)s)")  # fmt: skip
    add("--config", metavar="FILE", action="append", help="configuration file to predict calls from; may be repeated")
    add_shared(parser, "--per-rank", "--dask", "--width")
    add_options(parser.add_argument_group("with --config"), parser.add_argument_group("model, with --config"))


def run(arguments: argparse.Namespace) -> int:
    """Print the result, and return the exit status."""
    from commtrace.reading.executors import open_executor
    from commtrace.run import open_run

    by_rules = {"--tolerance": arguments.tolerance, "--config": arguments.config, "--strict": arguments.strict}
    source = next((name for name in ("against", "baseline", "update_baseline") if getattr(arguments, name)), None)
    for option in (name for name, value in by_rules.items() if value and source):
        other = str(source).replace("_", "-")
        raise CommtraceError(f"{option} is only for the comparison with rules; remove it or --{other}")
    compare = _update_baseline if arguments.update_baseline else _check_calls if source else _check_rules
    with open_executor(arguments.dask) as executor:
        return _check(open_run(arguments.directory, recover=True, executor=executor), arguments, compare)


def _check(run: Run, arguments: argparse.Namespace, compare: Callable[[Run, argparse.Namespace], int]) -> int:
    """Print the stuck calls, the comparison and the notes, and return the exit status."""
    from commtrace.analyses.across_ranks.stuck_calls import find_stuck_calls
    from commtrace.analyses.compare.comparison_text import wrapped
    from commtrace.analyses.report.findings import diagnosis

    try:
        stuck = [*diagnosis(find_stuck_calls(run))]
        print(*(line for text in stuck for line in wrapped(text, arguments.width)), sep="\n", end="\n" * bool(stuck))
        status = compare(run, arguments)
        return STUCK if stuck else status
    finally:  # damage in records is known only after they have been read
        print_notes(run.notes, per_rank=arguments.per_rank)


def _check_rules(run: Run, arguments: argparse.Namespace) -> int:
    from commtrace.analyses.compare.comparison_text import shortened_lines, wrapped
    from commtrace.analyses.compare.verdict import compute_verdict, declare_own, describe_losses
    from commtrace.analyses.compare.verdict_text import verdict_lines
    from commtrace.analyses.fold_engine import fold

    tables = fold(run, [declare_own(_analysis(run, arguments), arguments.own)])
    for versions in tables["theory"]["other_versions"].dropna().unique():
        print(f"commtrace: rules were written against other versions: {versions}", file=sys.stderr)
    # Ranks that a dry run left out are not missing.
    world_size = None if run.simulated else run.world_size
    problems = ((process.rank, (process.losses, process.summary_problem)) for process in run.processes)
    losses = [(rank, problem) for rank, of_rank in problems for problem in of_rank if problem]
    verdict = compute_verdict(
        tables,
        [*run.ranks, *run.ranks_not_selected],
        world_size,
        arguments.tolerance,
        strict=arguments.strict,
        losses=describe_losses(losses, per_rank=arguments.per_rank),
    )
    lines = verdict_lines(verdict, arguments.width)
    print(*shortened_lines(lines, run.ranks, per_rank=arguments.per_rank), sep="\n")
    if run.simulated:
        print(f"simulated: {len(run.ranks):,} of {run.world_size:,} ranks were run, and nothing was sent")
    if not verdict.ranks:
        log = arguments.directory
        hints = (
            "to compare with a dry run of the same program instead:",
            f"    commtrace dryrun --world-size {run.world_size or 'N'} --ranks all --out DIR2 python train.py ...",
            f"    commtrace check {log} --against DIR2",
            "to accept this run as the baseline of later ones:",
            f"    commtrace check {log} --update-baseline FILE",
        )
        print(*(line for hint in hints for line in wrapped(hint, arguments.width)), sep="\n")
    if len(verdict.differences):
        return DIFFERENT
    return AS_EXPECTED if verdict.agrees else NOT_COMPARED


def _check_calls(run: Run, arguments: argparse.Namespace) -> int:
    from commtrace.analyses.compare.baseline import read_baseline
    from commtrace.analyses.compare.call_differences import compare_calls
    from commtrace.analyses.compare.comparison_text import compared_lines, difference_lines, own_lines, shortened_lines
    from commtrace.analyses.compare.run_calls import read_calls
    from commtrace.run import open_run

    own = [*arguments.own]
    if arguments.baseline:
        baseline = read_baseline(arguments.baseline, own)
        own += baseline.own
        expected, source = baseline.run, f"the baseline {arguments.baseline}"
    else:
        against = open_run(arguments.against, recover=True, executor=run.executor)
        expected = read_calls(against, own)
        print_notes(against.notes, per_rank=arguments.per_rank)
        source = f"the {'dry run' if against.simulated else 'run'} {arguments.against}"
    measured = read_calls(run, own)
    differences = compare_calls(expected, measured)
    status = DIFFERENT if not differences.equal else NOT_COMPARED if differences.not_compared else AS_EXPECTED
    verdicts = {AS_EXPECTED: "matches", DIFFERENT: "differs from", NOT_COMPARED: "partly compared, matches"}
    width = arguments.width
    names = "expected", "recorded"
    lines = (*compared_lines(differences, width), *difference_lines(differences, names, width))
    lines = (*lines, *own_lines(measured.own, width))
    print(f"{verdicts[status]} {source}", *shortened_lines(lines, run.ranks, per_rank=arguments.per_rank), sep="\n")
    return status


def _update_baseline(run: Run, arguments: argparse.Namespace) -> int:
    from commtrace.analyses.compare.baseline import read_baseline, to_text
    from commtrace.analyses.compare.run_calls import read_calls

    path: Path = arguments.update_baseline
    own = [*arguments.own, *(read_baseline(path).own if path.exists() else ())]
    text = to_text(read_calls(run, own), own)
    before = path.read_text(encoding="utf-8") if path.exists() else None
    if before != text:
        with atomic_write(path, force=True) as part:
            part.write_text(text, encoding="utf-8")
    print(f"{path}: {'not changed' if before == text else 'written'}")
    return 0


def _analysis(run: Run, arguments: argparse.Namespace) -> Analysis:
    from commtrace.analyses.compare import reconciliation
    from commtrace.theory.forecast import PlanError, forecast

    if arguments.config is None:
        return reconciliation.DIFFERENCES
    if run.world_size is None:
        raise PlanError(f"{run.log.path}: the log does not say how many ranks the run has; remove --config")
    plan = forecast(arguments.config, run.world_size, options_of(arguments)).plan
    return reconciliation.differences_from(*plan.rows)
