"""Predict the step time of a recorded run after a change, or of dry runs.

The last steps are replayed: computation, calls, and what each call waits for,
on all ranks. Options of changes compose, in the order in which they are given:

    commtrace whatif logs/run1 --all
    commtrace whatif logs/run1 --scale-network 2x --without-straggler worst
    commtrace whatif logs/run1 --network new.json,old.json
    commtrace whatif logs/run1 --bucket 50MB
    commtrace whatif logs/run1 --overlap
    commtrace whatif logs/run1 --network net.json,net.json --world-size 64
    commtrace whatif logs/run1 --required-bandwidth --html bandwidth.html
    commtrace whatif logs/dryrun --required-bandwidth --rate 400TFLOPS

Dry runs of several layouts are compared on a network; their ranks compute at
one rate, stated or measured:

    commtrace whatif logs/zero1 logs/tp8 --network ndr-infiniband --rate 400TFLOPS
    commtrace whatif logs/ddp logs/fsdp --network net.json --calibrate logs/run1

Each prediction of a change has a 90 % interval, that of a layout has bounds:
nothing hidden, and all hidden that dependencies allow. Both say what limits the
step. Exit status: 0, or 2 if the steps cannot be replayed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from commtrace.errors import CommtraceError

from .exit_status import AS_EXPECTED
from .option_types import add_formats, add_shared, duration_seconds, flops_per_second
from .report import print_text, write_page

if TYPE_CHECKING:
    import pandas as pd

    from commtrace.run import Run

_VALUES: Final = {
    "--network": ("NET[,NET]", "operations take what a network predicts (a file of commtrace bench, the output of "
        "nccl-tests or OMB, a description, or a built-in one); with two, relative to the second one, on which the run "
        "was recorded"),
    "--scale-network": ("[WHAT:]FACTOR", "transfers are so many times as fast, such as 2x; of one dimension, operation "
        "or purpose: data:2x"),
    "--free": ("WHAT", "transfers of a dimension, operation or purpose take no time"),
    "--overlap": ("[WHAT]", "gradients and parameters, or those of a dimension, operation or purpose, run in the "
        "background as long as dependencies allow: the shortest step that overlap allows"),
    "--compute": ("FACTOR", "computation takes so many times as long, such as 0.5x"),
    "--without-straggler": ("RANK", "a rank computes no longer than the median of the others; worst: the one with "
        "which the step becomes shortest"),
    "--bucket": ("SIZE", "buckets of this size, such as 50MB (of 2**20 bytes): of gradients with DDP (bucket_cap_mb), "
        "ZeRO-1 and ZeRO-2 (reduce_bucket_size); units of FSDP2 that are combined"),
    "--world-size": ("N", "a data-parallel job runs on so many ranks, each of which computes as long (weak scaling)"),
    "--dtype": ("TYPE", "gradients and parameters that are sent as float32 are sent as bf16 or fp16"),
}  # fmt: skip
_FLAGS: Final = {
    "--balance": "all ranks compute for as long as their mean",
    "--no-wait": "no operation waits for late ranks",
}


class _Change(argparse.Action):
    """Appends a change to the list of changes, which keeps the order of the options."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        name = str(option).removeprefix("--")
        namespace.changes = [*namespace.changes, f"{name}={values}" if isinstance(values, str) else name]


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("directories", metavar="DIR", type=Path, nargs="+",
        help="log directory, as in COMMTRACE, or one run's directory in it; several: dry runs")  # fmt: skip
    changes = parser.add_argument_group("changes")
    for option, (metavar, text) in _VALUES.items():
        optional = metavar.strip("[]") if metavar.startswith("[") and metavar.endswith("]") else ""
        changes.add_argument(option, metavar=optional or metavar, nargs="?" if optional else None, action=_Change,
            dest="changes", default=[], help=text)  # fmt: skip
    for option, text in _FLAGS.items():
        changes.add_argument(option, nargs=0, action=_Change, dest="changes", default=[], help=text)
    parser.add_argument(
        "--all", action="store_true", help="also add each change of the catalogue, the largest gain first"
    )
    parser.add_argument("--equal", metavar="DIR", type=Path, action="append", default=[],
        help="another run of the same program and settings: intervals then cover the variation between runs; may be "
        "repeated")  # fmt: skip
    parser.add_argument("--required-bandwidth", action="store_true",
        help="how much faster transfers must be to be hidden, by dimension")  # fmt: skip
    computation = parser.add_argument_group("computation of dry runs").add_mutually_exclusive_group()
    computation.add_argument(
        "--computation",
        metavar="TIME",
        type=duration_seconds,
        help="computation of a step of the first dry run, such as 250ms; others: in proportion to their operations",
    )
    computation.add_argument(
        "--rate",
        metavar="FLOPS",
        type=flops_per_second,
        help="floating-point operations of a rank by second that it reaches, such as 400TFLOPS",
    )
    computation.add_argument("--calibrate", metavar="RUN", type=Path,
        help="a recorded run of the layout of one of the dry runs, whose rate is measured")  # fmt: skip
    parser.add_argument("--latency", metavar="TIME", type=duration_seconds, default=0.0,
        help="latency of a message beside --required-bandwidth of a dry run, such as 5us (default: 0)")  # fmt: skip
    add_formats(parser)
    add_shared(parser, "--width")


def run(arguments: argparse.Namespace) -> int:
    """Print the predictions."""
    first, *others = arguments.directories
    stated = [arguments.computation, arguments.rate, arguments.calibrate]
    if any(value is not None for value in stated) and not arguments.required_bandwidth:
        return _layouts(arguments)
    if others and arguments.required_bandwidth:
        raise CommtraceError("--required-bandwidth is of one run; give them one after the other")
    if others:
        raise CommtraceError(
            "several runs are compared if they are dry runs, and it is known how fast they compute: add --rate, "
            "--computation or --calibrate"
        )
    if any(value is not None for value in stated):
        return _required_bandwidth(first, arguments)
    return _changes(first, arguments)


def _layouts(arguments: argparse.Namespace) -> int:
    from commtrace.analyses.side_by_side import short_names
    from commtrace.analyses.what_if.changed_run import REMARKS
    from commtrace.analyses.what_if.layout_comparison import compare_layouts
    from commtrace.reading.log_notes import print_notes
    from commtrace.run import open_run

    changes = [change.partition("=") for change in arguments.changes]
    if any(name == "world-size" for name, _, _ in changes):
        raise CommtraceError(
            "--world-size: a dry run has the world size that it was made with; make one of each (commtrace dryrun "
            "--world-size N), and give all of them"
        )
    if any(name != "network" for name, _, _ in changes) or arguments.all or arguments.equal:
        raise CommtraceError("dry runs are compared on networks: of the changes, only --network is possible")
    runs = {name: open_run(path) for name, path in short_names(arguments.directories).items()}
    tables = compare_layouts(
        runs,
        [value for _, _, value in changes],
        rate=arguments.rate,
        computation_s=arguments.computation,
        calibrate=None if arguments.calibrate is None else open_run(arguments.calibrate),
    )
    for opened in runs.values():
        print_notes(opened.notes)
    return _show(runs, tables, tables["layouts"].attrs[REMARKS], arguments)


def _required_bandwidth(path: Path, arguments: argparse.Namespace) -> int:
    from commtrace.analyses.what_if.bandwidth_bounds import required_bandwidth
    from commtrace.analyses.what_if.changed_run import REMARKS
    from commtrace.reading.log_notes import print_notes
    from commtrace.run import open_run

    if arguments.changes or arguments.all or arguments.equal:
        raise CommtraceError("--required-bandwidth of a dry run is without changes and other runs")
    opened = open_run(path, recover=True)
    try:
        tables = required_bandwidth(
            opened,
            rate=arguments.rate,
            computation_s=arguments.computation,
            calibrate=None if arguments.calibrate is None else open_run(arguments.calibrate),
            latency_s=arguments.latency,
        )
    finally:
        print_notes(opened.notes)
    if arguments.html is None:
        del tables["exposed_by_bandwidth"]  # of a figure
    return _show({path.name: opened}, tables, tables["bandwidth_bounds"].attrs[REMARKS], arguments)


def _changes(path: Path, arguments: argparse.Namespace) -> int:
    from commtrace.analyses.what_if import predictions
    from commtrace.analyses.what_if.changed_run import replayed_run
    from commtrace.analyses.what_if.changes import changed_run
    from commtrace.analyses.what_if.timelines import step_timelines
    from commtrace.reading.log_notes import print_notes
    from commtrace.run import open_run

    opened = open_run(path, recover=True)
    try:
        replayed = replayed_run(opened)
        equal = [replayed_run(open_run(path)) for path in arguments.equal]
        variation = predictions.variation_of_runs([replayed, *equal])
        catalogue = arguments.all or not (arguments.changes or arguments.required_bandwidth)
        changed = changed_run(replayed, arguments.changes)
        tables = {"what_if": predictions.what_if(changed, catalogue=catalogue, variation=variation)}
        if arguments.required_bandwidth:
            tables["required_bandwidth"] = predictions.required_bandwidth(changed)
        tables["what_if_run"] = predictions.run_facts(replayed, len(equal))
        if arguments.html is not None:  # tables of figures
            if changed.texts:
                tables["step_timelines"] = step_timelines(changed)
            if arguments.required_bandwidth:
                tables["exposed_by_speed"] = predictions.exposed_shares(changed)
    finally:  # damaged records are known only after reading
        print_notes(opened.notes)
    return _show({path.name: opened}, tables, [*predictions.sentences(tables)], arguments)


def _show(
    runs: Mapping[str, Run], tables: Mapping[str, pd.DataFrame], texts: Sequence[str], arguments: argparse.Namespace
) -> int:
    if arguments.html is not None:
        from commtrace.analyses.report.html.page_contents import page_of_what_if

        write_page(arguments, page_of_what_if(runs, tables, texts), f"predictions for {', '.join(runs)}")
    elif arguments.json:
        from commtrace.analyses.report.document import what_if_to_json

        print(what_if_to_json(next(iter(runs.values())), tables, texts))
    else:
        from commtrace.analyses.report.several_runs_text import render_what_if

        print_text(render_what_if(tables, texts, arguments.width), arguments.width)
    return AS_EXPECTED
