"""Interface of a part of the study: experiments to run, and sections of the page made from their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from .claims import Claim


@dataclass(frozen=True)
class Options:
    """Options of a study."""

    models: tuple[str, ...]
    """Names of models or paths of GPT-NeoX files, smallest first. The time part trains small models of its own."""
    quick: bool = False
    """Run few points, to see that everything works."""
    network: str | None = None
    """A file of `commtrace bench`, a network description, or the name of a shipped network."""
    nproc: int = 2
    """Local ranks of the time part."""


@dataclass(frozen=True)
class Experiment:
    """An experiment, which is run once; its key identifies the result."""

    key: str
    """Name of the result's folder. Differs if anything that the result depends on differs."""
    title: str
    """A few words for the progress bar."""
    run: Callable[[Path], None]
    """Write logs or tables into an empty folder. Raises CommtraceError with the end of a failed program's output."""
    seconds: float
    """Expected duration on one core."""
    alone: bool = False
    """Whether it must run alone, because it measures time."""
    command: str = ""
    """Shell command that repeats the experiment."""


@dataclass(frozen=True)
class Section:
    """What the page shows of one figure of the paper."""

    number: str
    """The figure's number in the paper, "7" or "1 and 2"; empty if the paper has no such figure."""
    title: str
    caption: str = ""
    """How to read the figures."""
    claims: Sequence[Claim] = ()
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    """By file name without suffix, unique in the study."""
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    """By file name without suffix: each is written to data/, and its first rows are shown."""
    commands: Sequence[str] = ()
    """Shell commands that repeat it."""
    warnings: Sequence[str] = ()
    """What limits the meaning of the numbers."""
    missing: Sequence[str] = ()
    """Needed experiments without a result."""

    @property
    def heading(self) -> str:
        """Number and title."""
        return f"Figure {self.number}: {self.title}" if self.number else self.title


class StudyPart(Protocol):
    """A part of the study, named in `PARTS` of `__main__`."""

    def experiments(self, options: Options) -> Sequence[Experiment]:
        """Return all experiments that the sections need, each once."""

    def sections(self, options: Options, done: Mapping[str, Path]) -> Sequence[Section]:
        """Return the sections with the results so far. `done`: folders of finished experiments, by key."""
