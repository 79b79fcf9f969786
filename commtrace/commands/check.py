"""Compare a run with its expected calls, for continuous integration.

The expected calls come from one of four sources:

  rules            predicted from the job (its parameters, parallel degrees and
                   settings) by rules that reproduce the calls of PyTorch,
                   DeepSpeed and Megatron. Calls of the program itself, or of a
                   framework without rules, are listed; they fail the check only
                   with --strict
  --dryrun -- CMD  a dry run of CMD, the command that the launcher started on each
                   rank, with as many ranks and hosts as in the log. Nothing of
                   it is kept
  --against DIR2   the log of a dry run of the same program or of an earlier run
  --baseline FILE  a text file for version control, which --update-baseline FILE
                   writes

    commtrace check logs/run1 --dryrun -- python train.py --steps 5

or limits on times are checked instead: exposed communication, overlap with
computation, and waiting; or the overlap is compared with that of accepted runs:

    commtrace check traces/ --max-exposed 20% --min-overlap reduce_scatter:60%
    commtrace check logs/new --overlap-as logs/run1 --overlap-as logs/run2

With rules, whose calls have no order, cells are compared. A cell is one
operation of one parallel dimension in one step of one rank.

The first line is the result, unless a process failed or the job hangs: then
the first lines say which process ended first and by what, and where the others
are. Calls of a step in which a process ended are not compared. Exit status:

  0  as expected; with --tolerance, the payloads of all cells are within it
  1  a call differs; it is printed with call sites and, if one is known, the
     most likely cause
     or: a limit is not kept, or overlap is lost
     or: a rank is missing (--against, --baseline)
  2  the command failed: a log or FILE cannot be read, or the arguments are wrong
  3  nothing differs, but some calls could not be compared: records were lost, a
     hook failed, a process was killed, or the log begins after start-up
     or: the log does not have what a limit is about
     or: the job has no rules, or a rank left no log (with rules)
  4  the job hangs, or a rank died while others were waiting for it in a call;
     the first lines identify the call, and the comparison follows
  5  the program failed, and the job does not hang: a process ended by an
     exception, a signal, or a status other than 0; the comparison follows

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
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commtrace.errors import CommtraceError
from commtrace.output_files import atomic_write
from commtrace.reading.log_notes import print_notes

from .dryrun import repeat
from .exit_status import AS_EXPECTED, DIFFERENT, NOT_COMPARED, PROGRAM_FAILED, STUCK, status_of
from .option_types import add_shared, exact_fraction, operation_percentage, percentage
from .theory import add_options, options_of

if TYPE_CHECKING:
    from commtrace.analyses.compare.verdict import Verdict
    from commtrace.analyses.limits import Limit
    from commtrace.run import Run


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_shared(parser, "directory")
    add, add_source = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add_source(
        "--dryrun",
        action="store_true",
        help="compare with a dry run instead of rules; the command of the program follows at the end, after --",
    )
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
    add_limit = parser.add_argument_group("limits on times").add_argument
    add_limit("--max-exposed", metavar="P%", type=percentage,
        help="maximum share of the steps' time in which communication runs and no kernel computes")  # fmt: skip
    add_limit("--min-overlap", metavar="OP:P%", type=operation_percentage, action="append", default=[],
        help="minimum share of an operation's time that computation hides; may be repeated")  # fmt: skip
    add_limit("--max-wait", metavar="P%", type=percentage,
        help="maximum share of the time in calls in which ranks wait for others")  # fmt: skip
    add_limit("--overlap-as", metavar="DIR2", type=Path, action="append", default=[],
        help="log of an accepted run: fail if clearly less computation can hide an operation than there; may be "
        "repeated, with further runs of the same program, whose differences are the noise")  # fmt: skip
    add("--config", metavar="FILE", action="append", help="configuration file to predict calls from; may be repeated")
    add_shared(parser, "--per-rank", "--dask", "--width")
    add_options(parser.add_argument_group("with --config"), parser.add_argument_group("model, with --config"))
    parser.set_defaults(program=[])
    parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip().replace('%', '%%')} [-- CMD ...]"


def run(arguments: argparse.Namespace) -> int:
    """Print the result, and return the exit status."""
    from commtrace.reading.executors import open_executor
    from commtrace.run import open_run

    by_rules = {"--tolerance": arguments.tolerance, "--config": arguments.config, "--strict": arguments.strict}
    sources = ("dryrun", "against", "baseline", "update_baseline")
    source = next((name for name in sources if getattr(arguments, name)), None)
    for option in (name for name, value in by_rules.items() if value and source):
        other = str(source).replace("_", "-")
        raise CommtraceError(f"{option} is only for the comparison with rules; remove it or --{other}")
    if bool(arguments.program) != arguments.dryrun:
        missing = "no program given" if arguments.dryrun else f"{arguments.program[0]}: a program is only for --dryrun"
        raise CommtraceError(f"{missing}; give both: commtrace check {arguments.directory} --dryrun -- python train.py")
    compare = _update_baseline if arguments.update_baseline else _check_calls if source else _check_rules
    if (limits := _limits(arguments)) or arguments.overlap_as:
        if source or any(by_rules.values()):
            raise CommtraceError("limits on times are checked alone; remove them, or the options about calls")
        compare = partial(_check_limits, limits)
    with open_executor(arguments.dask) as executor:
        return _check(open_run(arguments.directory, recover=True, executor=executor), arguments, compare)


def _check(run: Run, arguments: argparse.Namespace, compare: Callable[[Run, argparse.Namespace], int]) -> int:
    """Print how processes ended, the stuck calls, the comparison and the notes, and return the exit status."""
    from commtrace.analyses.across_ranks.endings import find_endings
    from commtrace.analyses.across_ranks.endings_section import describe_endings
    from commtrace.analyses.across_ranks.stalls import find_stalls
    from commtrace.analyses.across_ranks.stuck_calls import find_stuck_calls
    from commtrace.analyses.across_ranks.stuck_calls_section import diagnosis
    from commtrace.analyses.compare.verdict_text import wrapped

    try:
        stuck = [*diagnosis({**find_stuck_calls(run), **find_stalls(run)})]
        for text in (*describe_endings(find_endings(run)), *stuck):
            print(*wrapped(text, arguments.width), sep="\n")
        status = compare(run, arguments)
        is_failed = any(end.is_failure for end in run.ends)
        return STUCK if stuck else PROGRAM_FAILED if is_failed else status
    finally:  # damage in records is known only after they have been read
        print_notes(run.notes, per_rank=arguments.per_rank)


def _limits(arguments: argparse.Namespace) -> list[Limit]:
    from commtrace.analyses.limits import Limit

    values = {name: getattr(arguments, name.replace("-", "_")) for name in ("max-exposed", "max-wait")}
    limits = [Limit(name, fraction) for name, fraction in values.items() if fraction is not None]
    return limits + [Limit("min-overlap", fraction, operation) for operation, fraction in arguments.min_overlap]


def _check_limits(limits: Sequence[Limit], run: Run, arguments: argparse.Namespace) -> int:
    """Print whether the run keeps each limit, and return the exit status."""
    from commtrace.analyses.compare.verdict_text import wrapped
    from commtrace.analyses.limits import check_limits
    from commtrace.analyses.lost_overlap import compare_overlap
    from commtrace.run import open_run

    verdicts = [*check_limits(run.tables(), limits)] if limits else []
    if arguments.overlap_as:
        accepted = {str(path): open_run(path, recover=True, executor=run.executor) for path in arguments.overlap_as}
        verdicts += compare_overlap(run, accepted)
    for verdict in sorted(verdicts, key=lambda verdict: verdict.is_kept is not False):
        print(*wrapped(verdict.text, arguments.width), sep="\n")
    kept = [verdict.is_kept for verdict in verdicts]
    return DIFFERENT if False in kept else NOT_COMPARED if None in kept else AS_EXPECTED


def _check_rules(run: Run, arguments: argparse.Namespace) -> int:
    from commtrace.analyses.compare.rules_verdict import check_by_rules
    from commtrace.theory.rules.registry import name_versions

    run.require_payloads()
    options = {name: getattr(arguments, name) for name in ("tolerance", "strict", "per_rank")}
    verdict, comparison = check_by_rules(run, _jobs(run, arguments), arguments.own, **options)
    for versions in dict.fromkeys(row["other_versions"] for row in comparison.theory if row["other_versions"]):
        print(f"commtrace: {name_versions(str(versions))}", file=sys.stderr)
    status = _print_verdict(verdict, "the rules", "the report's table `reconciliation`", run, arguments)
    if run.simulated:
        print(f"simulated: {len(run.ranks):,} of {run.world_size:,} ranks were run, and nothing was sent")
    if not verdict.compared[0]:
        _print_alternatives(arguments)
    return status


def _print_alternatives(arguments: argparse.Namespace) -> None:
    """Print what else a run without rules can be compared with."""
    from commtrace.analyses.compare.verdict_text import wrapped

    log = arguments.directory
    hints = (
        "to compare with a dry run of the same program instead (give the command that runs on each rank):",
        f"    commtrace check {log} --dryrun -- python train.py ...",
        "to accept this run as the baseline of later ones:",
        f"    commtrace check {log} --update-baseline FILE",
    )
    print(*(line for hint in hints for line in wrapped(hint, arguments.width)), sep="\n")


def _check_calls(run: Run, arguments: argparse.Namespace) -> int:
    from commtrace.analyses.compare.baseline import read_baseline
    from commtrace.analyses.compare.recorded_calls import read_calls
    from commtrace.analyses.compare.two_runs import compare_calls, compare_logs
    from commtrace.run import open_run

    run.require_payloads()
    own = [*arguments.own]
    if arguments.baseline:
        baseline = read_baseline(arguments.baseline, own)
        source = f"the baseline {arguments.baseline}"
        verdict = compare_calls(baseline.run, read_calls(run, [*own, *baseline.own]))
    else:
        with tempfile.TemporaryDirectory(prefix="commtrace-check-") as folder:
            if arguments.dryrun:
                repeat(arguments.program, run, Path(folder))
            against = open_run(arguments.against or folder, recover=True, executor=run.executor)
            verdict = compare_logs(against, run, own, str(arguments.against or "the dry run"))
        print_notes(against.notes, per_rank=arguments.per_rank)
        kind = "dry run" if against.simulated else "run"
        source = f"the {kind} {arguments.against or 'of ' + ' '.join(arguments.program)}"
    return _print_verdict(verdict, source, "the tables of `commtrace diff --json`", run, arguments)


def _print_verdict(verdict: Verdict, source: str, all_differences: str, run: Run, arguments: argparse.Namespace) -> int:
    """Print the verdict on a run, and return the exit status."""
    from commtrace.analyses.compare.verdict_text import heading, shows_all_ranks, verdict_lines

    lines = [
        heading(verdict, f"matches {source}", f"differs from {source}", f"not compared with {source}"),
        *verdict_lines(
            verdict,
            ("expected", "recorded"),
            arguments.width,
            all_differences,
            all_ranks=shows_all_ranks(run.ranks, per_rank=arguments.per_rank),
        ),
    ]
    print(*lines, sep="\n")
    return status_of(verdict)


def _update_baseline(run: Run, arguments: argparse.Namespace) -> int:
    from commtrace.analyses.compare.baseline import read_baseline, to_text
    from commtrace.analyses.compare.recorded_calls import read_calls

    run.require_payloads()
    path: Path = arguments.update_baseline
    own = [*arguments.own, *(read_baseline(path).own if path.exists() else ())]
    text = to_text(read_calls(run, own), own)
    before = path.read_text(encoding="utf-8") if path.exists() else None
    if before != text:
        with atomic_write(path, force=True) as part:
            part.write_text(text, encoding="utf-8")
    print(f"{path}: {'not changed' if before == text else 'written'}")
    return 0


def _jobs(run: Run, arguments: argparse.Namespace) -> Sequence[Mapping[str, Any]]:
    """Return the job row of each stage from configuration files; none without them."""
    from commtrace.theory.forecast import PlanError, forecast

    if arguments.config is None:
        return ()
    if run.world_size is None:
        raise PlanError(f"{run.log.path}: the log does not say how many ranks the run has; remove --config")
    plan = forecast(arguments.config, run.world_size, options_of(arguments)).plan
    return tuple(row.to_json() for row in plan.rows)
