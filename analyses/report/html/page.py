"""What stands on the page, and the page."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

import pandas as pd

from commtrace.analyses import figures
from commtrace.analyses.comparison import compare
from commtrace.analyses.engine import NamedTables, rows_of
from commtrace.analyses.report import network, preface
from commtrace.analyses.steps import ALL
from commtrace.errors import MissingLibraryError
from commtrace.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_plural,
    format_share,
    format_signed,
    format_small_share,
    is_known,
)
from commtrace.reading.run import RecordedRun
from commtrace.run import Run

try:
    import jinja2
    from plotly.offline import get_plotlyjs
except ImportError as error:
    raise MissingLibraryError(f"--html: needs {error.name}; pip install 'commtrace[html]'") from None

SITES: Final = 40
"""Lines of code in the table, where no other number is asked for."""

Cells = Callable[[Any], str]


@dataclass(frozen=True)
class Tile:
    """A number that is seen first."""

    name: str
    value: str
    note: str = ""
    alarming: bool = False


@dataclass(frozen=True)
class Table:
    """Words as they are shown. `kinds` of the columns: "number" stands right, "word" is not broken, "text" is."""

    head: Sequence[str]
    kinds: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Drawing:
    """A figure as the page has it: plotly's JSON, what it is called, and its height in px."""

    name: str
    title: str
    figure: str
    height: int


@dataclass(frozen=True)
class Section:
    """A part of the page: a figure, or the sentence why there is none; and a table. Or several of each."""

    name: str
    title: str
    text: str
    figure: str | None = None
    height: int = 0
    absent: str = ""
    table: Table | None = None
    table_title: str = ""
    paragraphs: Sequence[Sequence[tuple[str, str]]] = ()
    """Each in pieces: what a piece is ("code", "strong" or ""), and the piece."""
    drawings: Sequence[Drawing] = ()
    tables: Sequence[tuple[str, Table]] = ()
    commands: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """Everything that the template shows."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    findings: Sequence[str]
    warnings: Sequence[str]
    facts: Sequence[tuple[str, str]]
    lists: Sequence[tuple[str, Sequence[str]]]
    sections: Sequence[Section]
    facts_title: str = ""
    """Of the last part; "The log" or "The logs" unless said."""


def page_of_run(name: str, run: RecordedRun, tables: NamedTables, *, sites: int = SITES) -> str:
    """The page of one run. `tables` with those of DETAILS; `sites`: lines of code to show, 0: all."""
    sections = [_figure(key, kind, tables, _NUMBERS.get(key)) for key, kind in figures.FIGURES.items()]
    return render(
        Page(
            title=name,
            subtitle=preface.job_line(run) or "what was trained was not captured",
            tiles=list(_tiles(tables)),
            findings=list(_findings(tables)),
            warnings=[*preface.newest(run), *_warnings(tables)],
            facts=[("run", run.id), *preface.facts(run, tables)],
            lists=[
                (title, texts)
                for title, texts in (
                    ("Not computed in a dry run", preface.unknown(run)),
                    ("Not seen by the hooks", preface.blind_spots(tables)),
                    ("Notes on this log", preface.notes(run)),
                )
                if texts
            ],
            sections=[*sections, *_network(tables), _sites(tables["volume_by_site"], sites)],
        )
    )


def page_of_runs(runs: Mapping[str, Run], tables: Mapping[str, NamedTables]) -> str:
    """The page of several runs, by the names they are given."""
    both = compare(runs, tables)
    overview = Section(
        "runs",
        "The runs",
        "A training step of each run, per rank. Wire bytes are what a rank must at least send for the payload.",
        table=_table(both["runs"], _RUNS),
    )
    sections = [_figure(key, kind, both, _NUMBERS.get(key)) for key, kind in figures.COMPARISONS.items()]
    incomplete = {name: [*_warnings(told)] for name, told in tables.items()}
    return render(
        Page(
            title=", ".join(runs),
            subtitle=f"{format_plural(len(runs), 'run')} side by side",
            tiles=[],
            findings=[],
            warnings=[f"{name}: {text}" for name, texts in incomplete.items() for text in texts],
            facts=[(str(row.run), f"{row.path}, run {row.id}") for row in rows_of(both["runs"])],
            lists=[],
            sections=[overview, *sections],
        )
    )


def page_of_scaling(runs: Mapping[str, Run], tables: NamedTables, sentences: Sequence[str]) -> str:
    """The page of runs on more and more ranks: the tables of `commtrace.analyses.scaling` and what they say."""
    sections = [
        _figure(key, kind, tables, _NUMBERS.get(key)) for key, kind in figures.SCALING.items()
    ]  # fmt: skip
    volumes = Section(
        "sent",
        "What a rank sends in a step",
        "Means over the ranks. Expected, and the closed form: of the lowest rank, where theory has rules for the job.",
        table=_table(tables["scaling"], _SENT),
    )
    ahead = tables["scaling_projection"]
    model = Section(
        "model",
        "The model, and more ranks",
        "Computing as a part that stays and one that is divided, calls of a latency and a bandwidth, and waiting.",
        table=_table(ahead, _AHEAD) if len(ahead) else None,
        absent="" if len(ahead) else "There is no model: calls have one size only, or their times are not known.",
    )
    return render(
        Page(
            title=", ".join(runs),
            subtitle=f"scaling from {tables['scaling']['ranks'].min():,} to {tables['scaling']['ranks'].max():,} ranks",
            tiles=[],
            findings=list(sentences),
            warnings=[],
            facts=[(name, f"{run.log.path}, run {run.id}") for name, run in runs.items()],
            lists=[],
            sections=[*sections, volumes, model],
        )
    )


# --- the run at a glance --------------------------------------------------------------------------------------------


def _tiles(tables: NamedTables) -> Iterator[Tile]:
    coverage = tables["coverage"].iloc[0]
    seen, world = int(coverage["ranks_seen"]), coverage["world_size"]
    missing = bool(is_known(world)) and seen < int(world)
    of = f"of {format_count(world)}" if is_known(world) else "of an unknown number"
    yield Tile("ranks seen", format_count(seen), f"{of}, on {format_plural(int(coverage['hosts']), 'host')}", missing)
    counted = coverage["calls"]
    recorded = (
        format_share(coverage["records"] / counted) + " of those counted" if is_known(counted) and counted else ""
    )
    yield Tile(
        "calls recorded", format_count(coverage["records"]), recorded, recorded != "" and coverage["records"] < counted
    )
    steady = tables["steady_step"]
    for _, step in steady.loc[steady["op"] == ALL].iterrows():
        yield Tile("training steps", format_count(step["steps"]), _alike(step))
        calls = f"{format_count(step['calls_per_rank'])} calls"
        yield Tile("payload of a step", format_bytes(step["payload_bytes_per_rank"]), f"per rank, in {calls}")
        yield Tile("sent in a step", format_bytes(step["wire_bytes_per_rank"]), "per rank, at least")
    cost = tables["tracing_cost"].dropna(subset=["share"])
    if coverage["simulated"]:
        yield Tile("times", "none", "simulated: nothing was sent")
    elif len(cost):
        mean = cost["calls_ns"].sum() / cost["calls"].sum() if cost["calls"].sum() else None
        yield Tile(
            "cost of tracing",
            format_small_share(cost["share"].mean()),
            f"of the run's time; {format_duration(mean)} a call",
        )
    else:
        yield Tile("cost of tracing", "not known")


def _alike(step: pd.Series[Any]) -> str:
    differing = int(step["differing_steps"])
    return "all alike" if not differing else f"{differing:,} unlike the median one"


def _findings(tables: NamedTables) -> Iterator[str]:
    """What the page shows, in sentences."""
    steady = tables["steady_step"]
    total = float(steady.loc[steady["op"] == ALL, "payload_bytes_per_rank"].sum())
    steady = steady.loc[steady["op"] != ALL]
    if total:
        most = steady.nlargest(3, "payload_bytes_per_rank")
        parts = [
            f"{format_share(row.payload_bytes_per_rank / total)} {row.op}"
            for row in rows_of(most)
            if row.payload_bytes_per_rank / total >= 0.01
        ]
        yield f"A training step moves {format_bytes(total)} per rank: {', '.join(parts)}."
    sites = tables["volume_by_site"]
    if len(sites) and is_known(sites["payload_share"].iloc[0]) and sites["payload_bytes"].iloc[0]:
        first = sites.iloc[0]
        place = first["site"] or "a line that was not recorded"
        yield f"{format_share(first['payload_share'])} of the payload comes from one line, {place}."
    waterfall = tables.get("waterfall")
    if waterfall is not None and len(waterfall):
        sums = waterfall.groupby("kind")["bytes"].sum()
        form, measured = sums.get("closed form", 0), sums.get("measured", 0)
        if form:
            yield (
                f"A rank sends {measured / form:.2f} times what the closed form predicts, {format_bytes(form)} a step."
            )


def _warnings(tables: NamedTables) -> Iterator[str]:
    """What must be known before any number is believed."""
    coverage = tables["coverage"].iloc[0]
    if coverage["ranks_missing"]:
        yield f"Ranks {coverage['ranks_missing']} left no log: sums and means are of the ranks seen."
    gone = [f"{format_count(coverage[name])} {name}" for name in ("dropped", "removed", "lost") if coverage[name]]
    gone += (
        [f"{format_count(coverage['not_found'])} not found"]
        if is_known(coverage["not_found"]) and coverage["not_found"]
        else []
    )
    if gone:
        yield f"Some calls are counted and not recorded ({', '.join(gone)}): volumes are lower bounds."
    if coverage["without_end"]:
        yield f"{format_plural(int(coverage['without_end']), 'process', 'processes')} ended early, or still run."
    if coverage["simulated"]:
        yield "Simulated, a dry run: the calls are the job's, nothing was sent, and there are no times."
    if is_known(coverage["hook_errors"]) and coverage["hook_errors"]:
        failed = format_plural(int(coverage["hook_errors"]), "call")
        yield f"The hooks failed on {failed}: what they saw of them is missing."
    damaged = sum(int(coverage[f"files_{kind}"]) for kind in ("cut", "foreign", "unreadable", "missing", "garbled"))
    if damaged:
        yield f"{format_plural(damaged, 'file')} of the log are damaged or foreign; the notes below say which."


# --- sections -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Numbers:
    """The numbers below a figure: the columns of its table, each with its head and how its values are written."""

    columns: Mapping[str, tuple[str, Cells]]
    most: int = 60
    title: str = "The numbers"
    rows: Callable[[pd.DataFrame], pd.DataFrame] = lambda table: table


def _figure(name: str, kind: figures.Figure, tables: NamedTables, numbers: Numbers | None) -> Section:
    table = tables.get(kind.table)
    if table is None or not kind.can(table):
        return Section(name, kind.title, "", absent=kind.absent + _why_not_predicted(kind.table, tables))
    drawn = kind.draw(table)
    rows = numbers.rows(table) if numbers is not None else table.head(0)
    shown = _table(rows.head(numbers.most), numbers) if numbers is not None and len(rows) else None
    more = f", the first {numbers.most} of {len(rows):,}" if numbers is not None and len(rows) > numbers.most else ""
    return Section(
        name,
        kind.title,
        kind.look_for,
        figure=_json(json.loads(drawn.to_json())),
        height=int(drawn.layout.height),
        table=shown,
        table_title=f"{numbers.title}{more}" if numbers is not None else "",
    )


def drawing(name: str, figure: Any) -> Drawing:
    """A plotly figure for the page."""
    layout = figure.layout
    return Drawing(name, layout.title.text or name, _json(json.loads(figure.to_json())), int(layout.height))


def _why_not_predicted(table: str, tables: NamedTables) -> str:
    """The reasons that the comparison with theory gives, where it is what is missing and gives any."""
    theory = tables.get("theory")
    if theory is None or table not in ("waterfall", "reconciliation"):
        return ""
    return "".join(f" ({reason})" for reason in theory["not_predicted"].dropna().unique()[:3])


def _table(frame: pd.DataFrame, numbers: Numbers) -> Table:
    columns = [name for name in numbers.columns if name in frame]
    heads, cells = zip(*(numbers.columns[name] for name in columns), strict=True)
    rows = [
        [write(value) for write, value in zip(cells, row, strict=True)]
        for row in frame[columns].itertuples(index=False, name=None)
    ]
    return Table(heads, [_KINDS.get(write, "number") for write in cells], rows)


def _word(value: Any) -> str:
    return str(value) if is_known(value) else "-"


def _text(value: Any) -> str:
    return _word(value)


def _site(value: Any) -> str:
    return _word(value) if value != "" else "not recorded"


_KINDS: Final[dict[Cells, str]] = {_word: "word", _text: "text", _site: "text"}


def _ratio(value: Any) -> str:
    return f"{value:.2f}" if is_known(value) else "-"


def _differences(reconciliation: pd.DataFrame) -> pd.DataFrame:
    """Leftovers of the training steps by dimension, operation and cause, the largest first."""
    left = reconciliation.loc[(reconciliation["step"] >= 0) & ~reconciliation["cause"].isin(["", "expected"])]
    sums = {name: (name, "sum") for name in ("expected_calls", "measured_calls", "difference_bytes")}
    found = left.groupby(["role", "op", "cause"], as_index=False).agg(**sums, sites=("sites", "max"))
    return found.sort_values("difference_bytes", key=lambda difference: difference.abs(), ascending=False)


_VOLUME: Final[dict[str, tuple[str, Cells]]] = {
    "calls": ("calls", format_count),
    "payload_bytes": ("payload", format_bytes),
    "wire_bytes": ("wire, at least", format_bytes),
    "payload_share": ("share of payload", format_share),
}
_PER_RANK: Final[dict[str, tuple[str, Cells]]] = {
    "calls_per_rank": ("calls", format_count),
    "payload_bytes_per_rank": ("payload", format_bytes),
    "wire_bytes_per_rank": ("wire, at least", format_bytes),
}
_OPERATION: Final[dict[str, tuple[str, Cells]]] = {"op": ("operation", _word)}

_SITES: Final = Numbers({"site": ("line", _site), **_OPERATION, **_VOLUME})
_RUNS: Final = Numbers(
    {
        "run": ("run", _word),
        "job": ("job", _text),
        "ranks_seen": ("ranks", format_count),
        "steps": ("steps", format_count),
        **_PER_RANK,
        "tracing_share": ("cost of tracing", format_small_share),
    }
)
_SENT: Final = Numbers(
    {
        "run": ("run", _word),
        "ranks": ("ranks", format_count),
        "calls": ("calls", format_count),
        "payload_bytes": ("payload", format_bytes),
        "wire_bytes": ("wire, at least", format_bytes),
        "expected_wire_bytes": ("expected", format_bytes),
        "closed_form_bytes": ("closed form", format_bytes),
    }
)
_AHEAD: Final = Numbers(
    {
        "ranks": ("ranks", format_count),
        "step_ns": ("a step", format_duration),
        "measured_ns": ("measured", format_duration),
        "efficiency": ("efficiency", format_share),
        "compute_ns": ("computing", format_duration),
        "latency_ns": ("latency", format_duration),
        "bandwidth_ns": ("bandwidth", format_duration),
        "late_ns": ("waiting", format_duration),
    }
)
_NETWORK: Final = Numbers(
    {
        **_OPERATION,
        "ranks": ("ranks", format_count),
        "hosts": ("hosts", format_count),
        "payload_bytes": ("payload", format_bytes),
        "calls": ("calls", format_count),
        "timed": ("timed", format_count),
        "measured_ns": ("measured", format_duration),
        "expected_ns": ("expected", format_duration),
        "latency_ns": ("of it latency", format_duration),
        "efficiency": ("efficiency", format_share),
        "how": ("expected how", _word),
        "why_not": ("", _text),
    }
)
_NUMBERS: Final[dict[str, Numbers]] = {
    "speedup": Numbers(
        {
            "run": ("run", _word),
            "ranks": ("ranks", format_count),
            "steps": ("steps", format_count),
            "step_ns": ("a step", format_duration),
            "speedup": ("speedup", _ratio),
            "efficiency": ("efficiency", format_share),
            "tokens_per_s": ("tokens/s", format_count),
        }
    ),
    "step_parts": Numbers(
        {
            "run": ("run", _word),
            "compute_ns": ("computing", format_duration),
            "blocked_ns": ("in communication", format_duration),
            "late_ns": ("of it, others late", format_duration),
            "in_flight_ns": ("under way", format_duration),
            "communication_per_compute": ("comm/compute", _ratio),
        }
    ),
    "volume": Numbers({"role": ("dimension", _word), **_OPERATION, **_VOLUME}),
    "waterfall": Numbers({"label": ("cause", _text), "bytes": ("bytes", format_count)}),
    "waterfall_by_role": Numbers(
        {"role": ("dimension", _word), "label": ("cause", _text), "bytes": ("bytes", format_count)},
    ),
    "expected_and_measured": Numbers(
        {
            "role": ("dimension", _word),
            **_OPERATION,
            "cause": ("cause", _text),
            "expected_calls": ("expected calls", format_count),
            "measured_calls": ("measured calls", format_count),
            "difference_bytes": ("difference, bytes", format_signed),
            "sites": ("lines", _text),
        },
        title="What differs, sums over ranks and training steps",
        rows=_differences,
    ),
    "message_sizes": Numbers(
        {
            **_OPERATION,
            "from_bytes": ("from", format_bytes),
            "below_bytes": ("below", format_bytes),
            "calls": ("calls", format_count),
            "sum_bytes": ("bytes in all", format_bytes),
        }
    ),
    "operation_volumes": Numbers({"run": ("run", _word), "part": ("part", _word), **_OPERATION, **_PER_RANK}),
    "measured_and_predicted": Numbers(
        {
            "run": ("run", _word),
            "predicted_bytes": ("predicted", format_bytes),
            "measured_bytes": ("measured", format_bytes),
        }
    ),
}


def _sites(table: pd.DataFrame, most: int) -> Section:
    some = table.head(most) if most else table
    more = f", the first {len(some)} of {len(table):,}" if len(some) < len(table) else ""
    return Section(
        "sites",
        f"Lines of code{more}",
        "The line that asked for the communication, behind the wrappers of torch and DeepSpeed. Sums over the ranks.",
        table=_table(some, _SITES) if len(some) else None,
        absent="" if len(some) else "The log holds no call.",
    )


def _network(tables: NamedTables) -> list[Section]:
    """Where the report was asked for it."""
    if "network" not in tables:
        return []
    table = tables["network"]
    text = f"{network.about(tables)} {network.MEANING}"
    return [Section("network", network.title(tables), text, table=_table(table.head(_NETWORK.most), _NETWORK))]


# --- the page -------------------------------------------------------------------------------------------------------


def render(page: Page) -> str:
    """The whole page, which needs nothing else."""
    parts = {name: resources.files(__package__).joinpath(name).read_text("utf-8") for name in _PARTS}
    scripts = [_script(get_plotlyjs()), _script(parts["page.js"])]
    return _template(parts["page.html"]).render(
        page=page,
        style=parts["style.css"],
        scripts=scripts,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"script-src {' '.join(_digest(script) for script in scripts)}; base-uri 'none'; form-action 'none'",
    )


_PARTS: Final = ("page.html", "style.css", "page.js")


@cache
def _template(text: str) -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text)


def _script(code: str) -> str:
    """A script that can stand in a page: nothing in it ends it."""
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _digest(script: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def _json(value: Any) -> str:
    """JSON that can stand in a page: no letter in it means anything to HTML."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
