"""`commtrace study`."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from commtrace.errors import CommtraceError

if TYPE_CHECKING:
    from .page import Study
    from .parts import Experiment, Options, Part

# Name: module that has the class Part, in the order of the page. Names, so that nothing is imported.
PARTS: Final[dict[str, str]] = {
    "volume": "examples.paper_study.volume.part",
    "time": "examples.paper_study.timing.part",
}
MODELS: Final = ("19M", "125M", "1-3B", "13B")
QUICK_MODELS: Final = ("19M", "125M")


class Command:
    """Repeat the experiments of the paper on communication in transformer training, with theory beside them.

    The paper is "Demystifying the Communication Characteristics for Distributed Transformer Models" (Anthony et al.,
    2024). Its figures about volume are made from dry runs: the real training of GPT-NeoX's 19M, 125M, 1.3B and 13B, as
    the ranks of jobs of up to 1,024 ranks, on this machine (`commtrace dryrun`). Those about time are measured: small
    shapes on real ranks of this machine, one after the other, each several times.

        commtrace study logs/study                     all of it
        commtrace study logs/study --quick             few points of small models, in minutes
        commtrace study logs/study --network slingshot-11

    DIR gets study.html, the tables (data/*.csv, and *.parquet where pyarrow is installed), and of each experiment an
    ordinary log (volume/*, time/*/log), so that `commtrace report` and `commtrace check` work on each. An interrupted
    study goes on where it stopped; what is done is not run again. The status is 1 where an experiment failed.
    """

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments."""
        add = parser.add_argument
        add("directory", metavar="DIR", type=Path, help="where results are kept")
        add("--part", choices=[*PARTS], action="append", help="only this part; may be repeated (all)")
        add("--models", metavar="LIST", help=f"names or GPT-NeoX files, separated by commas ({','.join(MODELS)})")
        add("--quick", action="store_true", help=f"few points, and of models only {', '.join(QUICK_MODELS)}")
        add("--jobs", metavar="N", type=_positive, help="experiments at once (as many as there are cores, 4 at most)")
        add(
            "--network",
            metavar="NET",
            help="predict communication times on this network: a file of commtrace bench or a description, or the name "
            "of a shipped one (all that are shipped)",
        )
        add("--ranks", metavar="N", type=_positive, default=2, help="real ranks that the time part trains with (2)")
        add("--no-run", action="store_true", help="run nothing; make the page from what is there")
        add(
            "--document",
            metavar="DIR",
            type=Path,
            help="also write DIR/study.md, with the figures as pictures in DIR/study (needs playwright)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Run what is not done yet, and write the page."""
        from .experiments import exclusive_lock, found, run_missing
        from .page import DATA, PAGE, Study, write

        options = _options(arguments)
        names = arguments.part or [*PARTS]
        parts = {name: _part(name) for name in PARTS if name in names}
        directory: Path = arguments.directory
        directory.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(directory):
            wanted = {name: [*part.experiments(options)] for name, part in parts.items()}
            failures: dict[str, str] = {}
            if not arguments.no_run:
                jobs = arguments.jobs or min(4, _cores())
                with _terminable(), _progress(directory, wanted) as ended:
                    for name, experiments in wanted.items():
                        failures |= run_missing(experiments, directory / name, jobs, ended)
            done = {name: found(experiments, directory / name) for name, experiments in wanted.items()}
            sections = {name: part.sections(options, done[name]) for name, part in parts.items()}
            study = Study(options, wanted, done, sections, failures)
            write(directory, study)
            if arguments.document is not None:
                _document(arguments.document, study)
        print(f"{directory / PAGE}: {_say(wanted, done)}, to be opened in a browser; tables in {directory / DATA}")
        return 1 if any(len(done[name]) < len(wanted[name]) for name in wanted) else 0


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM, as batch systems send it, ends what was started as well."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _part(name: str) -> Part:
    part: Part = import_module(PARTS[name]).Part()
    return part


def _options(arguments: argparse.Namespace) -> Options:
    from .parts import Options

    if arguments.models is None:
        models: tuple[str, ...] = QUICK_MODELS if arguments.quick else MODELS
    else:
        models = tuple(_alias(name.strip()) for name in arguments.models.split(",") if name.strip())
    if not models:
        raise CommtraceError("--models: no model is named; give 19M,125M say")
    return Options(models, arguments.quick, arguments.network, arguments.ranks)


def _alias(name: str) -> str:
    """The paper's name of a model -> that of its file."""
    return "1-3B" if name == "1.3B" else name


def _document(folder: Path, study: Study) -> None:
    from . import document, pictures

    drawn = pictures.draw(study.every, folder / document.PICTURES)
    print(f"{document.write(folder, study)}: with {len(drawn)} pictures")


def _say(wanted: Mapping[str, Sequence[Experiment]], done: Mapping[str, Mapping[str, Path]]) -> str:
    asked, there = (sum(map(len, of.values())) for of in (wanted, done))
    return f"{there:,} of {asked:,} experiments"


@contextmanager
def _progress(
    directory: Path, wanted: Mapping[str, Sequence[Experiment]]
) -> Iterator[Callable[[Experiment, str | None], None]]:
    """A bar over the seconds that are to be expected; failures are printed as they come, with their output's end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from .experiments import found

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    missing = [one for name, some in wanted.items() for one in some if one.key not in found(some, directory / name)]
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn(),
        TextColumn("left:"), TimeRemainingColumn(elapsed_when_finished=True),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not missing) as progress:
        bar = progress.add_task("study", total=sum(one.seconds for one in missing) or 1, count=f"0/{len(missing)}")
        ended = 0

        def tell(one: Experiment, why: str | None) -> None:
            nonlocal ended
            ended += 1
            progress.update(bar, advance=one.seconds, count=f"{ended}/{len(missing)}")
            if why is not None:
                console.print(f"failed: {one.title}: {why}")
            elif not console.is_terminal:
                console.print(f"{ended}/{len(missing)} {one.title}")

        yield tell


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)
