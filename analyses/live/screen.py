"""The lines that `commtrace top` shows, from top to bottom: what is wrong, steps, where their time goes, volumes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from commtrace.analyses.across_ranks.endings_section import ENDINGS_SECTION
from commtrace.analyses.across_ranks.step_time_section import delay_sentences
from commtrace.analyses.across_ranks.step_time_specs import STEP_TIME_PARTS
from commtrace.analyses.across_ranks.stuck_calls_section import STUCK_SECTION
from commtrace.analyses.job_summary import summarize_job
from commtrace.analyses.report.spec_table import spec_table
from commtrace.analyses.sections import Report
from commtrace.analyses.volume_by_purpose import VOLUME_BY_PURPOSE
from commtrace.analyses.volume_tables import RANKS
from commtrace.formatting import format_duration, format_plural, format_share
from commtrace.text_tables import paragraph, stdout_accepts_unicode

from .followed_run import LiveRun

VIEWS: Final = ("purposes", "ranks")
"""What the lower half of the screen shows, in the order of the key Tab."""
_BARS: Final = "▁▂▃▄▅▆▇█"
_ASCII_BARS: Final = "_.-=+*%#"
_STEPS_IN_HISTORY: Final = 48
_LABEL_WIDTH: Final = 14


def render(live: LiveRun, width: int, view: str = VIEWS[0], rows: int = 12) -> Iterator[RenderableType]:
    """Yield the screen.

    Args:
        live: The run.
        width: Width in columns.
        view: One of VIEWS.
        rows: Maximum number of rows of its table.
    """
    yield Text(f"Run {live.run.id}, {_state(live)}", style="bold")
    yield from (paragraph(text, width, first="! ", style="bold red") for text in alarms(live))
    for name, text in _facts(live, width):
        yield paragraph(text, width, first=name.ljust(_LABEL_WIDTH))
    parts = live.tables["step_time_parts"]
    median = parts.loc[parts["which"] == "median"]
    if len(median):
        yield Text()
        yield _heading(f"Where the time of a step goes (step {int(median['step'].iloc[0]):,}, of median duration)")
        yield spec_table(STEP_TIME_PARTS, median, width, view="live")
    for sentence in delay_sentences(live.tables):
        yield paragraph(sentence, width, first="- ")
    yield Text()
    spec = RANKS if view == "ranks" else VOLUME_BY_PURPOSE
    table = Report(live.tables, live.run).rows(spec)
    more = f", {rows} of {len(table):,} rows" if len(table) > rows else ""
    yield _heading(spec.title + more)
    if live.totalled < live.records:
        share = format_share(live.totalled / live.records)
        of = f"the first {live.totalled:,} of {live.records:,} calls in the log ({share}); the others are being added"
        yield paragraph(f"Of {of}.", width)
    yield spec_table(spec, table.head(rows), width)


def alarms(live: LiveRun) -> list[str]:
    """Return what is wrong, in sentences."""
    return [text for section in (ENDINGS_SECTION, STUCK_SECTION) for text in section.alarms(live.tables)]


def _heading(text: str) -> Text:
    return Text(text, style="bold cyan")


def _state(live: LiveRun) -> str:
    """Return whether the processes run, such as "4 of 4 ranks run"."""
    ends = [end.state for end in live.run.ends]
    names = {"runs": "run", "ended": "ended", "stopped": "stopped tracing", "died": "died"}
    counts = [f"{ends.count(state):,} {name}" for state, name in names.items() if state in ends]
    unknown = ends.count("unknown")
    counts += [f"{unknown:,} on another host, or died"] if unknown else []
    world = live.run.world_size
    of = f"{len(live.run.ranks):,} of {world:,} ranks" if world else format_plural(len(live.run.ranks), "rank")
    return f"{of}: {', '.join(counts)}"


def _facts(live: LiveRun, width: int) -> Iterator[tuple[str, str]]:
    if job := summarize_job(live.run):
        yield "job", job
    times = live.tables["step_times"]
    if not len(times):
        yield "step", f"{live.step:,}, no times yet" if live.step >= 0 else "none yet"
        return
    last = times.iloc[-1]
    median = float(times["ns"].tail(_STEPS_IN_HISTORY).median())
    slowest = f"rank {int(last['slowest_rank'])} computed {format_duration(last['delay_ns'])} longer than the others"
    yield (
        "step",
        f"{live.step:,}; step {int(last['step']):,} took {format_duration(last['ns'])} "
        f"(median {format_duration(median)}), {format_share(last['waiting_ns'] / last['ns'])} waiting, "
        f"{format_share(last['exposed_ns'] / last['ns'])} exposed communication"
        + (f"; {slowest}" if last["delay_ns"] > 0 else ""),
    )
    steps = times["ns"].tail(_STEPS_IN_HISTORY)
    between = f"{format_duration(steps.min())} to {format_duration(steps.max())}"
    history = steps.tail(width - _LABEL_WIDTH - len(between) - 2)
    yield "last steps", f"{bars(history.tolist())}  {between}"


def bars(values: Sequence[float]) -> str:
    """Return one bar per value, from 0 to the largest."""
    characters = _BARS if stdout_accepts_unicode() else _ASCII_BARS
    most = max(values, default=0) or 1
    return "".join(characters[min(len(characters) - 1, int(value / most * len(characters)))] for value in values)
