"""Command line of the study: `python -m examples.paper_study OUT`, in a checkout of commtrace."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Final

from commtrace.commands.option_types import positive_integer
from commtrace.errors import CommtraceError
from commtrace.process_setup.processor_limits import usable_cores

from .experiments import exclusive_lock, find_done, run_missing
from .page import DATA, PAGE, Study, write
from .parts import Experiment, Options, StudyPart

PROGRAM: Final = "python -m examples.paper_study"
# Module and class of each part, in the order of the page. Imported when the part is run.
PARTS: Final[dict[str, tuple[str, str]]] = {
    "volume": ("examples.paper_study.volume.volume_part", "VolumePart"),
    "time": ("examples.paper_study.timing.time_part", "TimePart"),
}
MODELS: Final = ("19M", "125M", "1-3B", "13B")
QUICK_MODELS: Final = ("19M", "125M")
DESCRIPTION: Final = f"""\
Repeat the experiments of a paper on communication in transformer training, and compare each with theory.

The paper is "Demystifying the Communication Characteristics for Distributed Transformer Models" (Anthony et al.,
2024). Its figures about volume are made from dry runs: the training of GPT-NeoX's 19M, 125M, 1.3B and 13B models as
ranks of jobs of up to 1,024 ranks, on this machine (commtrace dryrun). Its figures about time are measured with small
models on real ranks of this machine, one experiment after the other, each several times.

    {PROGRAM} logs/study                           everything
    {PROGRAM} logs/study --quick                   few points of small models, in minutes
    {PROGRAM} logs/study --network slingshot-11    predict times for one network

OUT gets study.html, the tables (data/*.csv and data/*.json, and *.parquet if pyarrow is installed), and an ordinary
log of each experiment (volume/*, time/*/log), which commtrace report and commtrace check read. An interrupted study
continues where it stopped; finished experiments are not run again. The exit status is 1 if an experiment failed.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; `argv` defaults to the process's arguments. Returns the exit status."""
    try:
        return _run(_parser().parse_args(argv))
    except CommtraceError as error:
        print(f"paper_study: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", metavar="OUT", type=Path, help="directory of the results")
    add("--part", choices=[*PARTS], action="append", help="run only this part; may be repeated (default: all)")
    add("--models", metavar="LIST", help=f"names or GPT-NeoX files, comma-separated (default: {','.join(MODELS)})")
    add("--quick", action="store_true", help=f"few points, and only the models {', '.join(QUICK_MODELS)}")
    add("--jobs", metavar="N", type=positive_integer, help="concurrent dry runs (default: usable cores, at most 4)")
    add(
        "--network",
        metavar="NET",
        help="predict communication times for this network: a file of commtrace bench, a network description, or the "
        "name of a shipped one (default: all shipped networks)",
    )
    add("--nproc", metavar="N", type=positive_integer, default=2, help="local ranks of the time part (default: 2)")
    add("--no-run", action="store_true", help="run nothing; make the page from existing results")
    add(
        "--document",
        metavar="DIR",
        type=Path,
        help="also replace the generated tables of DIR/study.md and DIR/study-time.md, and the pictures in DIR/study "
        "(needs playwright and a Chromium browser)",
    )
    return parser


def _run(arguments: argparse.Namespace) -> int:
    options = _options(arguments)
    names = arguments.part or [*PARTS]
    parts: dict[str, StudyPart] = {
        name: getattr(import_module(module), part)() for name, (module, part) in PARTS.items() if name in names
    }
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(out):
        experiments = {name: [*part.experiments(options)] for name, part in parts.items()}
        failures: dict[str, str] = {}
        if not arguments.no_run:
            jobs = arguments.jobs or min(4, usable_cores())
            with _exit_on_sigterm(), _progress(out, experiments) as report_end:
                for name in experiments:
                    failures |= run_missing(experiments[name], out / name, jobs, report_end)
        done = {name: find_done(experiments[name], out / name) for name in experiments}
        sections = {name: part.sections(options, done[name]) for name, part in parts.items()}
        study = Study(options, experiments, done, sections, failures)
        write(out, study)
        if arguments.document is not None:
            _document(arguments.document, study)
    total, finished = sum(map(len, experiments.values())), sum(map(len, done.values()))
    print(f"{out / PAGE}: {finished:,} of {total:,} experiments, to be opened in a browser; tables in {out / DATA}")
    return 1 if finished < total else 0


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM, which batch systems send, into SystemExit, so that started programs are stopped, too."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _options(arguments: argparse.Namespace) -> Options:
    if arguments.models is None:
        models: tuple[str, ...] = QUICK_MODELS if arguments.quick else MODELS
    else:
        names = [name.strip() for name in arguments.models.split(",")]
        models = tuple("1-3B" if name == "1.3B" else name for name in names if name)
    if not models:
        raise CommtraceError("--models: no model is given; give for example --models 19M,125M")
    return Options(models, arguments.quick, arguments.network, arguments.nproc)


def _document(folder: Path, study: Study) -> None:
    from . import document, pictures

    files = document.update(folder, study)
    pictures.draw(study.all_sections, folder / document.PICTURES)
    print(f"{', '.join(map(str, files))}: tables replaced; pictures in {folder / document.PICTURES}")


@contextmanager
def _progress(
    out: Path, experiments: Mapping[str, Sequence[Experiment]]
) -> Iterator[Callable[[Experiment, str | None], None]]:
    """Show a progress bar weighted by expected seconds; print each failure with the end of its output.

    Yields the function to call at the end of each experiment, with the reason if it failed.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    done = {key for name, planned in experiments.items() for key in find_done(planned, out / name)}
    missing = [experiment for planned in experiments.values() for experiment in planned if experiment.key not in done]
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn(),
        TextColumn("left:"), TimeRemainingColumn(elapsed_when_finished=True),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not missing) as progress:
        total = sum(experiment.seconds for experiment in missing) or 1
        bar = progress.add_task("study", total=total, count=f"0/{len(missing)}")
        ended = 0

        def report_end(experiment: Experiment, failure: str | None) -> None:
            nonlocal ended
            ended += 1
            progress.update(bar, advance=experiment.seconds, count=f"{ended}/{len(missing)}")
            if failure is not None:
                console.print(f"failed: {experiment.title}: {failure}")
            elif not console.is_terminal:
                console.print(f"{ended}/{len(missing)} {experiment.title}")

        yield report_end


if __name__ == "__main__":
    sys.exit(main())
