"""What a part of the study provides: experiments whose results are kept, and sections of the page made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    models: tuple[str, ...]
    """Names of models or paths of GPT-NeoX's files, smallest first. The time part trains small shapes of its own."""
    quick: bool = False
    """Few points: what shows that everything works."""
    network: str | None = None
    """A file of `commtrace bench`, a description of a network, or the name of a shipped one."""
    ranks: int = 2
    """Real ranks of this machine that the time part trains with."""


@dataclass(frozen=True)
class Experiment:
    """Something that is run once, and found again by its key."""

    key: str
    """Says everything that the result depends on; letters, digits, `-`, `_` and `.`, for it names a folder."""
    title: str
    """In a few words, for the progress bar."""
    run: Callable[[Path], None]
    """Leaves logs or tables in the empty folder that it is given, which gets its name when `run` has returned.

    Programs are run by `experiments.execute`. Raises CommtraceError, with the end of a failed program's output.
    """
    seconds: float
    """About how long it takes on one core."""
    alone: bool = False
    """Nothing else may run at the same time: it measures time."""
    command: str = ""
    """What a user types to repeat it, in the folder of choice."""


@dataclass(frozen=True)
class Section:
    """What the page shows of one figure of the paper."""

    number: str
    """The figure's number in the paper, "7" or "1 and 2"; empty for what the paper does not have."""
    title: str
    text: Sequence[str]
    """Paragraphs, made from the data: what the paper says, and what was found; `code` between backquotes."""
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    """By file name without its ending, unique in the study ("figure-07-19M")."""
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    """By file name without its ending: each is written whole to data/, and its beginning is shown."""
    commands: Sequence[str] = ()
    """How to repeat it."""
    missing: Sequence[str] = ()
    """Experiments that it needs and has not: what a reader must know before believing it."""
    look_for: str = ""
    """What a reader should look at in the figures."""


class Part(Protocol):
    """A part of the study. `command.PARTS` names them."""

    name: str
    """What `--part` takes; experiments are kept in a folder of this name."""

    def experiments(self, options: Options) -> Sequence[Experiment]:
        """All that the sections need; one that several need appears once."""

    def sections(self, options: Options, found: Mapping[str, Path]) -> Sequence[Section]:
        """What can be shown of the results: key of an experiment -> its folder, of those that are done."""
