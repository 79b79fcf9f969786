"""A dashboard of Grafana for the metrics of `commtrace metrics --openmetrics`, from whichever Prometheus scrapes them.

    commtrace metrics --dashboard > commtrace.json      # Dashboards > New > Import

It asks for the data source and the run, and needs Grafana 9 or later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

SCHEMA_VERSION: Final = 36
"""Version of the dashboard's format: that of Grafana 9, which later ones convert."""
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS: Final = 24
_RUN: Final = 'run=~"$run"'
_RATE: Final = f"{{{_RUN}}}[$__rate_interval]"


@dataclass(frozen=True)
class _Panel:
    """A panel.

    Attributes:
        kind: Type of the panel: timeseries, stat or table.
        title: Its title.
        text: What it shows and what to look for, behind the panel's (i).
        queries: PromQL by legend; the legend of a table is "".
        unit: Unit, by Grafana's names.
        width: Number of the dashboard's 24 columns.
        height: Rows of 30 px.
        is_stacked: Whether its lines are parts of a sum.
        thresholds: Colours from values upwards, above green.
    """

    kind: str
    title: str
    text: str
    queries: Mapping[str, str]
    unit: str = "short"
    width: int = 12
    height: int = 8
    is_stacked: bool = False
    thresholds: Mapping[float, str] | None = None


PANELS: Final = (
    _Panel("stat", "Step", "The last training step of which a call is in the log.",
        {"{{run}}": f"max by (run) (commtrace_step{{{_RUN}}})"}, width=6, height=4),
    _Panel("stat", "Processes", "Processes by state. A process that died has ended without telling why.",
        {"{{state}}": f"sum by (state) (commtrace_processes{{{_RUN}}})"}, width=6, height=4),
    _Panel("stat", "Stuck in a call", "The longest time for which a call has not completed. No data: no call is stuck.",
        {"{{operation}}": f"max by (operation) (commtrace_stuck_seconds{{{_RUN}}})"}, "s", width=6, height=4,
        thresholds={0: "orange", 60: "red"}),
    _Panel("stat", "No progress",
        "The longest time for which a rank has made no progress. No data: all ranks make some.",
        {"{{activity}}": f"max by (activity) (commtrace_stalled_seconds{{{_RUN}}})"}, "s", width=6, height=4,
        thresholds={0: "orange", 60: "red"}),
    _Panel("timeseries", "Where the time of a step goes",
        "The last measured step, mean over the ranks. Exposed is communication that no computation hides; waiting is "
        "for ranks that arrive later.",
        {"{{part}}": f'avg by (part) (commtrace_step_seconds{{{_RUN}, part=~"computation|waiting|exposed"}})'}, "s",
        is_stacked=True),
    _Panel("timeseries", "Shares of a step", "Of the duration of the last measured step.",
        {
            part: f'avg by (run) (commtrace_step_seconds{{{_RUN}, part="{part}"}}) / '
            f'avg by (run) (commtrace_step_seconds{{{_RUN}, part="step"}})'
            for part in ("waiting", "exposed", "hidden")
        }, "percentunit"),
    _Panel("timeseries", "Delay by the slowest rank",
        "Computation of the slowest rank of the last measured step beyond the median of the others. One rank for long "
        "is a straggler.",
        {"rank {{rank}}": f"max by (rank) (commtrace_delay_seconds{{{_RUN}}})"}, "s"),
    _Panel("timeseries", "Steps", "Training steps by second.",
        {"{{run}}": f"deriv(commtrace_step{_RATE})"}, "ops"),
    _Panel("timeseries", "Payload by purpose",
        "Bytes of the buffers of calls, as nccl-tests counts them, over all ranks.",
        {"{{purpose}}": f"sum by (purpose) (rate(commtrace_payload_bytes_total{_RATE}))"}, "Bps"),
    _Panel("timeseries", "Wire bytes by parallel dimension",
        "The fewest bytes that can be sent for the calls, over all ranks.",
        {"{{dimension}}": f"sum by (dimension) (rate(commtrace_wire_bytes_total{_RATE}))"}, "Bps"),
    _Panel("timeseries", "Calls by operation", "Over all ranks.",
        {"{{operation}}": f"sum by (operation) (rate(commtrace_calls_total{_RATE}))"}, "ops", width=24),
    _Panel("table", "Calls that do not complete",
        "The ranks of the group, and those of them that did not enter the call: look at what they do.",
        {"": f"max by (run, operation, ranks, absent) (commtrace_stuck_seconds{{{_RUN}}})"}, "s"),
    _Panel("table", "Ranks without progress", "What each of them does, and in which line.",
        {"": f"max by (run, rank, activity, line) (commtrace_stalled_seconds{{{_RUN}}})"}, "s"),
)  # fmt: skip
"""The panels, from left to right and from top to bottom."""


def dashboard() -> dict[str, Any]:
    """Return the dashboard, in the types of JSON."""
    return {
        "uid": "commtrace",
        "title": "commtrace",
        "description": "Communication of distributed training, from commtrace metrics --openmetrics.",
        "tags": ["commtrace"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [*_variables()]},
        "panels": [*_placed_panels()],
    }


def _variables() -> Iterator[dict[str, Any]]:
    """Yield the data source and the runs."""
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    query = "label_values(commtrace_processes, run)"
    yield {
        "name": "run", "label": "Run", "type": "query", "datasource": _SOURCE,
        "query": {"query": query, "refId": "runs"}, "refresh": 2, "sort": 2, "includeAll": True, "allValue": ".+",
    }  # fmt: skip


def _placed_panels() -> Iterator[dict[str, Any]]:
    """Yield the panels with their places, in rows of 24 columns."""
    x = y = 0
    for number, panel in enumerate(PANELS, 1):
        if x + panel.width > _COLUMNS:
            x, y = 0, y + PANELS[number - 2].height
        place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
        yield {"id": number, "gridPos": place, **_panel(panel)}
        x += panel.width


def _panel(panel: _Panel) -> dict[str, Any]:
    is_table = panel.kind == "table"
    colours = [(None, "green"), *(panel.thresholds or {}).items()]
    steps = [{"value": value, "color": colour} for value, colour in colours]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.is_stacked:
        defaults["custom"] = {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 40}
    targets = [
        {
            "refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": expression, "legendFormat": legend,
            "instant": is_table, "range": not is_table, "format": "table" if is_table else "time_series",
        }
        for number, (legend, expression) in enumerate(panel.queries.items())
    ]  # fmt: skip
    # Grafana's name of the number of a table, and the time of the query, which says nothing.
    hidden = {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": {"Value": "time"}}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
        **({"transformations": [hidden]} if is_table else {}),
    }
